"""Models and programs whose blocks are captured, for tests on CPUs and on GPUs."""

from __future__ import annotations

import random
from typing import Any

import torch
from models import config, start, weights_of
from torch import nn
from torch.nn import functional as F

from onefold.comm import local_device

WIDTH, VOCABULARY, STEPS = 64, 96, 30


class Block(nn.Module):
    """Attention and MLP with dropout, a mask for all blocks, and constants among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float) -> tuple[torch.Tensor, None]:
        self.calls.add_(1)
        heads = self.inputs(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return x + scale * self.down(F.gelu(self.up(self.mlp_norm(x)))), None


class Decoder(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embed(tokens)
        length = tokens.shape[1]
        mask = torch.ones(length, length, device=h.device, dtype=torch.bool).tril().expand(len(tokens), 1, -1, -1)
        for block in self.blocks:
            h, _ = block(h, mask=mask, scale=0.5)
        logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()), h


def settings(stage: int, graphs: bool | str, **others: Any) -> dict[str, Any]:
    others = {"bf16": {"enabled": True}, **others}
    own = {"cuda_graphs": graphs, **others.pop("onefold", {})}
    return config(stage, onefold=own, **others)


def batch(number: int, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (2, length), generator=generator).to(local_device())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"gradient_clipping": 0.1},
    "accumulation": {"gradient_accumulation_steps": 3, "gradient_clipping": 0.1},
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 24}},
    "fp32": {"bf16": {"enabled": False}},
    "autocast": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "overlap": {"zero_optimization": {"overlap_comm": True}},
    "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def trained(folder: str, stage: int, graphs: bool | str, case: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses and weights of a run with evaluations, another length, frozen weights and a resume in it."""
    torch.manual_seed(0)
    own = dict(CASES[case])
    if stage == 3:
        own["zero_optimization"] = {"stage3_param_persistence_threshold": 0, **own.get("zero_optimization", {})}
    made = settings(stage, graphs, **own)
    engine = start(Decoder(), made)
    losses = []
    for number in range(STEPS):
        length = 24 if number % 7 == 6 else 16
        loss, _ = engine(batch(number, length))
        engine.backward(loss)
        engine.step()
        losses.append(loss)
        if number % 10 == 4:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(batch(1))[0])
            engine.train()
        if number == 17:
            engine.module.blocks[1].up.weight.requires_grad_(False)
        if number == 20:
            engine.save_checkpoint(folder, f"{stage}-{graphs}-{case}")
            engine.destroy()
            engine = start(Decoder(), made)
            engine.load_checkpoint(folder, f"{stage}-{graphs}-{case}")
    told = None
    if graphs:
        found = engine._hooks.graphs
        replays = found.num_replays
        few = 10  # steps since the resume
        is_replayed = 0 < replays < few if graphs == "model" else replays > few
        told = [found.reasons, is_replayed, found.describe()]
    weights = {name: tensor.cpu() for name, tensor in weights_of(engine.module).items()}
    weights |= {name: tensor.cpu() for name, tensor in engine.module.named_buffers()}
    engine.destroy()
    return [loss.item() for loss in losses], weights, told


def problems(folder: str, stage: int, case: str, scope: str = "blocks") -> list[Any]:
    eager, graphs = (trained(folder, stage, on, case) for on in (False, scope))
    wrong: list[Any] = []
    if differing := [n for n, (a, b) in enumerate(zip(eager[0], graphs[0], strict=True)) if a != b]:
        wrong.append(f"losses differ at {differing[:3]}")
    wrong += [name for name, tensor in eager[1].items() if not torch.equal(tensor, graphs[1][name])][:3]
    if graphs[2][0] or not graphs[2][1]:
        wrong.append(graphs[2])
    return wrong


class ReadingBlock(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        if x.float().abs().max().item() > 1e6:
            x = x * 0.5
        return super().forward(x, **kwargs)


class DrawingBlock(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x * (1 + random.random() * 0), **kwargs)


class StoringBlock(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        found = super().forward(x, **kwargs)
        self.last = found[0].mean()
        return found


class WritingBlock(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x.mul_(0.9), **kwargs)


EAGER = {
    ReadingBlock: "waits for the GPU",
    DrawingBlock: "random numbers on the host",
    StoringBlock: "changes last",
    WritingBlock: "writes to its arguments",
}


def reasons_of(kind: type[nn.Module], scope: str = "blocks") -> tuple[set[str], int]:
    engine = start(Decoder(kind), settings(2, scope))
    for number in range(6):
        engine.backward(engine(batch(number))[0])
        engine.step()
    graphs = engine._hooks.graphs
    found = set(graphs.reasons.values()), graphs.num_replays
    engine.destroy()
    return found


def hooked() -> list[Any]:
    """A hook of the user is added after the capture, and removed again."""
    engine, seen = start(Decoder(), settings(2, "blocks")), []
    handle = None
    graphs = engine._hooks.graphs
    counts = []
    for number in range(16):
        if number == 6:
            handle = engine.module.blocks[2].up.register_forward_hook(lambda *_: seen.append(1))
        if number == 10:
            handle.remove()
        engine.backward(engine(batch(number))[0])
        engine.step()
        counts.append(graphs.num_replays)
    engine.destroy()
    return [len(seen), counts[5] - counts[4], counts[9] - counts[8]]


def odd_programs(scope: str) -> list[Any]:
    """Two forwards before their backwards, outputs that are kept, gradients of inputs, and a retained graph."""
    found: list[Any] = []
    for graphs in (False, scope):
        torch.manual_seed(0)
        engine = start(Decoder(), settings(2, graphs))
        values, kept = [], []
        for number in range(12):
            if number % 3 == 2:
                one, other = engine(batch(number))[0], engine(batch(number + 1))[0]
                loss = one + other
            else:
                loss, hidden = engine(batch(number))
                kept.append(hidden.detach())
            engine.backward(loss)
            engine.step()
            values.append(loss)
        found.append(([value.item() for value in values], [h.float().sum().item() for h in kept]))
        if graphs:
            loss = engine(batch(0))[0]
            engine.backward(loss, retain_graph=True)
            try:
                engine.backward(loss)
                found.append("no error")
            except RuntimeError as error:
                found.append(str(error))
        engine.destroy()
    return found


class Remembering(Decoder):
    """Keeps the hidden states of the last pass, as models with a memory do, and adds them in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], device=h.device, dtype=torch.bool).tril()
        for number, block in enumerate(self.blocks):
            h, _ = block(h, mask=mask, scale=0.5)
            if number == 1:
                h, self.kept = h + self.kept if self.kept is not None else h, h.detach()
        return F.cross_entropy(self.head(h)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Towers(Decoder):
    """Two towers of blocks, whose masks are one tensor or two."""

    def forward(self, tokens: torch.Tensor, other_mask: bool = False) -> list[torch.Tensor]:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device, dtype=torch.bool).tril()
        masks = [mask, torch.ones_like(mask) if other_mask else mask]
        found = []
        for number in range(2):
            h = self.embed(tokens)
            for block in (self.blocks[2 * number], self.blocks[2 * number + 1]):
                h, _ = block(h, mask=masks[number], scale=0.5)
            found.append(self.head(h).float().square().mean())
        return found


def remembered() -> list[list[float]]:
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        engine, losses = start(Remembering(), settings(2, graphs)), []
        for number in range(12):
            loss = engine(batch(number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert not graphs or engine._hooks.graphs.num_replays > 0
        engine.destroy()
        found.append(losses)
    return found


def with_other_masks() -> list[list[float]]:
    """Blocks that shared a mask at the capture get two masks in some steps."""
    found = []
    for graphs in (False, "blocks"):
        torch.manual_seed(0)
        engine, losses = start(Towers(), settings(2, graphs)), []
        for number in range(14):
            one, other = engine(batch(number), other_mask=number > 8 and number % 2 == 0)
            engine.backward(one + other)
            engine.step()
            losses.append((one + other).item())
        if graphs:
            told = engine._hooks.graphs
            assert told.num_replays > 0
            assert any("other shared arguments" in reason for reason in told.eager_calls)
        engine.destroy()
        found.append(losses)
    return found


def in_another_order() -> str:
    """The backwards of two towers run in another order than at the capture."""
    engine = start(Towers(), settings(2, "blocks"))
    for number in range(8):
        one, other = engine(batch(number))
        first, second = (one, other) if number < 7 else (other, one)
        try:
            torch.autograd.backward(first)
            torch.autograd.backward(second)
        except RuntimeError as error:
            engine.destroy()
            return str(error)
        engine.step()
    engine.destroy()
    return "no error"


def kept_gradients() -> list[list[float]]:
    """Gradients that a program keeps, reads, writes or adds to, while the model is captured as a whole."""
    found = []
    for graphs in (False, "model"):
        torch.manual_seed(0)
        engine, kept, values = start(Decoder(), settings(2, graphs)), [], []
        for number in range(16):
            weight = engine.module.blocks[1].up.weight
            engine.backward(engine(batch(number))[0])
            if number % 4 == 1:
                kept.append(weight.grad)
            elif number % 4 == 2:
                weight.grad.mul_(2)
            elif number % 4 == 3:  # a second backward before the step adds its gradients
                engine.backward(engine(batch(number + 1))[0])
            engine.step()
            values.append(engine.get_global_grad_norm())
        if weight.is_cuda:  # on a CPU the pool reuses the memory
            values += [gradient.float().abs().sum().item() for gradient in kept]
        assert not graphs or engine._hooks.graphs.num_replays > 10
        engine.destroy()
        found.append(values)
    return found


def other_outputs() -> tuple[list[list[float]], str]:
    """A loss of the first output, then one of the second, whose gradient the graph does not take."""
    found = []
    for graphs in (False, "model"):
        torch.manual_seed(0)
        engine, losses = start(Decoder(), settings(2, graphs)), []
        for number in range(8):
            loss, _ = engine(batch(number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
    try:
        engine.backward(engine(batch(0))[1].float().mean())
    except RuntimeError as error:
        return found, str(error)
    return found, "no error"


def planned_gradients(scope: str, stage: int) -> tuple[int, int]:
    """Return the planned bytes of the units in use, and the bytes of all gradients."""
    engine = start(Decoder(), settings(stage, scope))
    specs = [param.spec for unit in engine.state.schedule.units for param in unit.trained_params]
    found = engine.model_memory.planned_buffers().unit_in_use, sum(spec.unsharded_bytes for spec in specs)
    engine.destroy()
    return found
