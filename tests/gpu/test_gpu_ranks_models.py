"""Ways of running a model on several NCCL ranks that share one GPU: frozen weights and adapters, recomputation,
compiled blocks, generation, ranks that go different ways, several engines, parameters that are read and written.

Inside one node every stage adds in the same order, so runs are compared to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_stage3 as stage3
import torch
from models import Net, Trace, assert_alike, batches, config, first_difference, net, precision, rank, start, train
from test_checkpointing import DroppingNet
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.utils import safe_get_full_fp32_param

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Nothing is kept whole: every use gathers.
NOTHING_KEPT = stage3.LIMITS["none"]

# -- two ranks: frozen weights and adapters ----------------------------------------------------------------------------


class Adapted(nn.Module):
    """LoRA by hand: a linear layer that rests, and two thin ones beside it that learn."""

    def __init__(self, base: nn.Linear, num_ranks: int = 3) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, num_ranks, bias=False)
        self.b = nn.Linear(num_ranks, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def partly_frozen(kind: str) -> Net:
    model = net(depth=4)
    if kind == "adapters":
        model.requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    elif kind == "units between":  # which gradients flow through
        model.blocks[1].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        model.blocks[0].norm.bias.requires_grad_(False)
    else:  # the first units: nothing flows back into them
        model.requires_grad_(False)
        model.blocks[3].up.requires_grad_(True)
    return model


def trained_in_part(kind: str, stage: int, dtype: str) -> tuple[Trace, str | None, int]:
    """The run, what differs of frozen weights from before it, and how many weights have moved."""
    zero = NOTHING_KEPT if stage == 3 else {}
    engine = start(
        partly_frozen(kind), config(stage, zero_optimization=zero, gradient_clipping=0.3, **precision(dtype))
    )
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    before = train(engine, 0).weights
    trace = train(engine, 4)
    engine.destroy()
    moved = {name for name, weight in trace.weights.items() if not torch.equal(weight, before[name])}
    kept = first_difference({name: trace.weights[name] for name in frozen}, {name: before[name] for name in frozen})
    return trace, kept, len(moved)


@pytest.mark.parametrize(("kind", "dtype"), [("adapters", "bf16"), ("units between", "fp32"), ("units first", "fp32")])
def test_frozen_weights_rest_and_the_others_train_alike(on_nccl_ranks, kind, dtype):
    expected = on_nccl_ranks(2, trained_in_part, kind, 0, dtype)
    num_trained = {"adapters": 16, "units between": 11, "units first": 2}[kind]
    for stage in (2, 3):
        found = on_nccl_ranks(2, trained_in_part, kind, stage, dtype)
        assert_alike([trace for trace, *_ in found], [trace for trace, *_ in expected], exact=True)
        assert [(kept, num) for _, kept, num in found] == [(None, num_trained)] * 2


# -- recomputation -----------------------------------------------------------------------------------------------------


def recomputed(stage: int, reentrant: bool | None) -> Trace:
    """Blocks with dropout, computed again in backward with the random numbers of their forward; None: not again."""
    torch.manual_seed(5)
    model = DroppingNet()
    if reentrant is not None:
        model.call = lambda *args: checkpoint(*args, use_reentrant=reentrant)
    torch.manual_seed(7 + rank())
    zero = NOTHING_KEPT if stage == 3 else {}
    return train(start(model, config(stage, zero_optimization=zero, gradient_clipping=0.3, **precision("bf16"))))


def test_recomputed_blocks_train_alike(on_nccl_ranks):
    expected = on_nccl_ranks(2, recomputed, 3, None)
    assert_alike(on_nccl_ranks(2, recomputed, 3, True), expected, exact=True)
    assert_alike(on_nccl_ranks(2, recomputed, 3, False), expected, exact=True)
    assert_alike(on_nccl_ranks(2, recomputed, 0, None), expected, exact=True)


# -- compiled blocks ---------------------------------------------------------------------------------------------------


def compiled(stage: int, compiles: bool, **how: Any) -> tuple[Trace, dict[str, int]]:
    torch._dynamo.reset()
    engine = start(net(width=64, depth=2), config(stage, gradient_clipping=0.5))
    if compiles:
        engine.compile(**how)
    trace = train(engine, 3)
    traffic = {row.operation: row.bytes for row in engine.ledger.rows() if row.operation != "synchronize"}
    assert engine.is_compiled == compiles
    engine.destroy()
    return trace, traffic


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_train_alike(on_nccl_ranks, stage):
    eager, found = (on_nccl_ranks(2, compiled, stage, compiles) for compiles in (False, True))
    for (mine, sent), (theirs, expected) in zip(found, eager, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)
        assert sent == expected


# -- several engines ---------------------------------------------------------------------------------------------------


def several(together: bool) -> list[Any]:
    """Two engines that are trained and one that is only asked, in turn within each step or one after another."""
    settings = config(3, zero_optimization=NOTHING_KEPT, gradient_clipping=0.3)
    engines = [start(net(tied=True), settings), start(net(seed=8, width=34, depth=2), settings)]
    asked = start(net(seed=11, depth=2), {**settings, **precision("bf16")})
    found: list[Any] = [[], [], []]

    def ask(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            found[2].append(asked(x, y).item())

    asked.eval()
    if together:
        for x, y in batches(4):
            losses = [engine(x, y) for engine in engines]
            ask(x, y)
            for engine, loss in zip(engines, losses, strict=True):
                engine.backward(loss)
            for number, engine in reversed(list(enumerate(engines))):
                engine.step()
                found[number].append((losses[number].item(), engine.get_global_grad_norm()))
    else:
        for number, engine in enumerate(engines):
            trace = train(engine, 4)
            found[number] = list(zip(trace.losses, trace.norms, strict=True))
        for x, y in batches(4):
            ask(x, y)
    return [*found, *(train(engine, 1, seed=1) for engine in engines)]


def test_several_engines_in_one_process_train_as_each_alone(on_nccl_ranks):
    for together, alone in zip(on_nccl_ranks(2, several, True), on_nccl_ranks(2, several, False), strict=True):
        assert first_difference(together, alone) is None


# -- four ranks: different ways ----------------------------------------------------------------------------------------


def went(case: str, stage: int, kept: str) -> Trace:
    """A case of test_stage3.py: every rank goes its own way through the model, in some another one in each step."""
    build, loss_of, more = stage3.CASES[case]
    more = dict(more)
    num_steps = more.pop("num_steps", 4)
    engine = stage3.engine_of(build, stage, stage3.LIMITS[kept] if stage == 3 else None, **more)
    losses, norms = [], []
    for step in range(num_steps):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    weights = train(engine, 0).weights
    engine.destroy()
    return Trace(losses, norms, weights)


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        ("mixture of experts", True),
        ("drops layers from the first step", True),
        ("tower not on the first rank", True),
        ("no batch on one rank", True),
        # Ranks leave the program in the middle of a pass: what comes late is added in another order.
        ("layer that no rank used at first", False),
    ],
)
def test_ranks_may_go_different_ways(on_nccl_ranks, case, exact):
    expected = on_nccl_ranks(4, went, case, 0, "none")
    for kept in ("none", "kept"):
        assert_alike(on_nccl_ranks(4, went, case, 3, kept), expected, exact=exact)


# -- generation --------------------------------------------------------------------------------------------------------


class Speaker(Net):
    """With targets a loss, without them logits."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.logits(x) if y is None else super().forward(x, y)


def generated(stage: int, speaks: bool) -> tuple[list[Any], Trace]:
    """Between steps ranks generate different numbers of tokens, and evaluate different numbers of batches."""
    torch.manual_seed(5 + rank())
    zero = NOTHING_KEPT if stage == 3 else {}
    engine = start(Speaker(), config(stage, zero_optimization=zero, **precision("bf16")))
    said: list[Any] = []
    for part in range(2):
        train(engine, 2, seed=part)
        if not speaks:
            continue
        engine.eval()
        with torch.no_grad():
            tokens = batches(1, seed=7 + part)[0][0]
            for _ in range(3 + 4 * ((rank() + part) % 4)):
                tokens = torch.cat([tokens, engine(tokens)[:, -1:].argmax(-1)], dim=1)
            said.append(tokens.cpu())
            said += [engine(x, y).item() for x, y in batches((rank() + 1 + part) % 4, seed=9)]
        engine.train()
    return said, train(engine, 2, seed=2)


def test_ranks_may_generate_different_numbers_of_tokens(on_nccl_ranks):
    found = on_nccl_ranks(4, generated, 3, True)
    assert [said[0].shape[1] for said, _ in found] == [10, 14, 18, 22]
    for mine, theirs in zip(found, on_nccl_ranks(4, generated, 0, True), strict=True):
        assert first_difference(mine, theirs) is None
    silent = on_nccl_ranks(4, generated, 3, False)
    assert_alike([trace for _, trace in found], [trace for _, trace in silent], exact=True)


# -- whole parameters --------------------------------------------------------------------------------------------------


def read_and_written(stage: int, dtype: str) -> dict[str, Any]:
    """Whole parameters as ranks read them, each in an order of its own; then one rank writes, and all train on."""
    zero = NOTHING_KEPT if stage == 3 else {}
    engine = start(net(), config(stage, zero_optimization=zero, **precision(dtype)))
    model = engine.module
    found: dict[str, Any] = {"before": train(engine, 2)}
    names, parameters = zip(*model.named_parameters(), strict=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(rank())).tolist()
    with onefold.zero.GatheredParameters([parameters[index] for index in order]):
        found["read"] = {name: parameter.detach().clone().cpu() for name, parameter in model.named_parameters()}
    head, up = model.head.weight, model.blocks[1].up.weight
    with onefold.zero.GatheredParameters([head, up], modifier_rank=2):
        values = torch.arange(head.numel(), dtype=torch.float32).view(head.shape).div(head.numel())
        head.data.copy_(values if rank() == 2 else values + 99)
        if rank() == 2:
            up.data.mul_(0.5)
    found["masters"] = [safe_get_full_fp32_param(parameter).cpu() for parameter in (head, up, model.embed.weight)]
    found["values"] = values.to(found["read"]["head.weight"].dtype).float()
    assert stage < 3 or head.numel() == 0, "sharded again"
    found["after"] = train(engine, 2, seed=1)
    engine.destroy()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whole_parameters_are_read_and_written(on_nccl_ranks, dtype):
    found = on_nccl_ranks(4, read_and_written, 3, dtype)
    for mine, theirs in zip(found, on_nccl_ranks(4, read_and_written, 0, dtype), strict=True):
        assert first_difference(mine, theirs) is None
        assert first_difference(mine["read"], found[0]["read"]) is None
        assert first_difference(mine["masters"][0], mine["values"]) is None
