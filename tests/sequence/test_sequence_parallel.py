"""Sequence parallelism trains as plain torch does with whole sequences: losses, norms, weights, bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from covering import covering
from models import config, more, rank, start
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.comm import local_device
from onefold.config import ConfigError
from onefold.sequence.heads import key_head_repeats

VOCABULARY, LENGTH, MICRO, STEPS = 37, 24, 2, 3
SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}


def sent_elements(batch: int, tokens: int, num_heads: int, num_key_heads: int, head_dim: int, size: int) -> int:
    """What a rank sends for the forward of one attention. Backward sends as many."""
    key_heads = num_key_heads * key_head_repeats(num_heads, num_key_heads, size)
    return (size - 1) * batch * tokens * head_dim * 2 * (num_heads + key_heads) // size


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, width // heads
        self.qkv = nn.Linear(width, self.dim * (heads + 2 * key_heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shapes = [self.dim * self.heads, self.dim * self.key_heads, self.dim * self.key_heads]
        q, k, v = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in self.qkv(x).split(shapes, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, key_heads), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(torch.tanh(x))


class Plain(nn.Module):
    """A causal model with torch's SDPA that takes positions and targets."""

    recomputes = False

    def __init__(self, heads: int = 4, key_heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def plain_model(heads: int, key_heads: int, recomputes: bool = False) -> nn.Module:
    torch.manual_seed(3)
    model = Plain(heads, key_heads)
    model.recomputes = recomputes
    return model


def transformers_model(kind: str, heads: int, key_heads: int, recomputes: bool = False, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(3)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 16 // heads}
    settings = getattr(transformers, f"{kind}Config")(**size, **heads_of, use_cache=False, **changes)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(settings)
    if recomputes:
        model.gradient_checkpointing_enable()
    model.train()
    return model


def samples(step: int, replica: int, packed: bool = False, prompt: int = 0) -> dict[str, torch.Tensor]:
    """The batch of one replica: with `prompt`, the first tokens have no labels."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    ids = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :prompt] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:  # documents of other lengths in each row, which no part of a sequence aligns with
        rows = [[7, 10, 7], [11, 13]]
        positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
        batch["position_ids"] = torch.stack(positions)
    return batch


def shifted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch for a plain model, whose labels are those of the next token."""
    positions = batch.get("position_ids", torch.arange(LENGTH, device=batch["labels"].device).expand(MICRO, -1))
    return batch | {"labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:], "position_ids": positions}


def here(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(local_device()) for name, value in batch.items()}


def train_plainly(model: nn.Module, replicas: int, clipping: float, **options: Any) -> tuple[list[float], list[float]]:
    """Losses of replica 0, and gradient norms, of plain torch with whole sequences."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    losses, norms = [], []
    for step in range(STEPS):
        for replica in range(replicas):
            batch = here(samples(step, replica, **options))
            loss = model(**shifted(batch)) if isinstance(model, Plain) else model(**batch).loss
            (loss / replicas).backward()
            losses += [loss.item()] if replica == 0 else []
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train_in_parts(
    make: str,
    arguments: tuple[Any, ...],
    size: int,
    stage: int,
    world: int,
    options: dict[str, Any],
    keys: dict[str, Any],
) -> dict[str, Any]:
    """Train on this rank's parts; compare the whole run with plain torch, and return weights for other comparisons."""
    model = globals()[make](*arguments[:-1], **arguments[-1])
    reference, replicas, tiled = copy.deepcopy(model).to(local_device()), world // size, options.pop("tiled", False)
    if tiled:
        onefold.use_tiled_loss(model, 2)
    clipping = keys.get("gradient_clipping", 0.0)
    settings = config(stage, sequence_parallel_size=size, optimizer=SGD, train_micro_batch_size_per_gpu=MICRO, **keys)
    engine = start(model, settings)
    assert engine.batch.train == MICRO * replicas
    parallel = engine.sequence_parallel
    losses, norms, spent = [], [], 0
    for step in range(STEPS):
        batch = here(samples(step, rank() // size, **options))
        part = parallel.split(shifted(batch) if isinstance(model, Plain) else batch)
        before = engine.ledger.bytes("attention")
        found = engine(**part)
        loss = parallel.mean_loss(found if isinstance(model, Plain) else found.loss, part["labels"])
        engine.backward(loss)
        spent = engine.ledger.bytes("attention") - before
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    with onefold.zero.GatheredParameters(list(model.parameters())):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    expected_losses, expected_norms = train_plainly(reference, replicas, clipping, **options)
    if rank() // size == 0:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5, msg=name)
    weights = {name: value.cpu() for name, value in weights.items()}
    return {"weights": weights, "norms": norms, "losses": losses, "bytes": spent}


def run(on_ranks: Any, world: int, make: str, *arguments: Any, size: int = 2, stage: int = 3, **more: Any) -> list[Any]:
    options = {name: more.pop(name) for name in ("packed", "prompt", "tiled") if name in more}
    model_options = {name: more.pop(name) for name in ("recomputes", "sliding_window") if name in more}
    found: list[Any] = on_ranks(
        world, train_in_parts, make, (*arguments, model_options), size, stage, world, options, more
    )
    return found


@covering(stage=(3, 1, more(0), more(2)), recomputes=(False, True), strength=1)
def test_a_model_with_sdpa_trains_as_with_whole_sequences(on_ranks, stage, recomputes):
    """Check losses, norms, weights under SGD, and the bytes of attention."""
    results = run(on_ranks, 2, "plain_model", 4, 4, stage=stage, recomputes=recomputes, prompt=3)
    elements = 2 * sent_elements(MICRO, LENGTH // 2, 4, 4, 4, 2)  # of two blocks
    assert {result["bytes"] for result in results} == {elements * 4 * (3 if recomputes else 2)}


@pytest.mark.parametrize(
    ("kind", "heads", "key_heads"),
    [
        ("Llama", 4, 2),
        ("Qwen3", 4, 1),
        more("Llama", 4, 1),
        more("Qwen3", 4, 2),
        more("Llama", 8, 4),
        more("Qwen3", 8, 4),
    ],
)
def test_a_transformers_model_trains_as_with_whole_sequences(on_ranks, kind, heads, key_heads):
    run(on_ranks, 2, "transformers_model", kind, heads, key_heads, gradient_clipping=0.1)


@pytest.mark.parametrize("kind", ["Llama", more("Qwen3")])
@pytest.mark.parametrize(("size", "key_heads"), [(4, 2), more(2, 2), more(4, 4)])
def test_four_ranks(on_ranks, kind, size, key_heads):
    """Check two replicas of two ranks, and fewer key heads than ranks."""
    run(on_ranks, 4, "transformers_model", kind, 4, key_heads, size=size)


def test_a_rank_without_labels(on_ranks):
    """Check a prompt that fills the first rank's part."""
    run(on_ranks, 2, "transformers_model", "Llama", 4, 2, prompt=LENGTH // 2 + 2)


@pytest.mark.parametrize("recomputes", [True, more(False)])
def test_packed_samples(on_ranks, recomputes):
    run(on_ranks, 2, "transformers_model", "Llama", 4, 2, packed=True, recomputes=recomputes)


@pytest.mark.parametrize("packed", [True, more(False)])
def test_sliding_windows(on_ranks, packed):
    run(on_ranks, 2, "transformers_model", "Mistral", 4, 2, sliding_window=5, packed=packed)


@pytest.mark.parametrize(
    "keys",
    [
        {"onefold": {"batch_chunks": 2}},
        more({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        more({"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}),
        more({"onefold": {"collective": "native"}}),
        {"gradient_allreduce_op": "sum"},
    ],
    ids=str,
)
def test_other_features_at_the_same_time(on_ranks, keys):
    """Check chunks of the batch, offload, another collective and sums of gradients, with a tiled loss."""
    run(on_ranks, 2, "transformers_model", "Llama", 4, 2, tiled=True, **keys)


def lora() -> None:
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(transformers_model("Llama", 4, 2), adapters))
    models[1].load_state_dict(models[0].state_dict())
    settings = config(3, sequence_parallel_size=2, optimizer=SGD, train_micro_batch_size_per_gpu=MICRO)
    engine = start(models[0], settings)
    part = engine.sequence_parallel.split(samples(0, 0))
    loss = engine.sequence_parallel.mean_loss(engine(**part).loss, part["labels"])
    engine.backward(loss)
    engine.step()
    expected = models[1](**samples(0, 0)).loss
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    norms = [p.grad.norm() for p in models[1].parameters() if p.grad is not None]
    assert engine.get_global_grad_norm() == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)
    engine.destroy()


def test_adapters(on_ranks):
    on_ranks(2, lora)


def stages_side_by_side(size: int) -> dict[int, Any]:
    found = {}
    for stage in range(4):
        engine = start(transformers_model("Llama", 4, 2), config(stage, sequence_parallel_size=size))
        trace = []
        for step in range(STEPS):
            part = engine.sequence_parallel.split(samples(step, rank() // size))
            loss = engine.sequence_parallel.mean_loss(engine(**part).loss, part["labels"])
            engine.backward(loss)
            engine.step()
            trace += [loss.item(), engine.get_global_grad_norm()]
        engine.destroy()
        found[stage] = trace
    return found


def test_stages_are_bit_equal(on_ranks):
    for found in on_ranks(4, stages_side_by_side, 2):
        assert found[1] == found[0]
        assert found[2] == found[0]
        assert found[3] == found[0]


def test_key_heads_are_repeated_as_often_as_needed():
    assert key_head_repeats(8, 8, 4) == 1
    assert key_head_repeats(8, 2, 2) == 1
    assert key_head_repeats(8, 2, 4) == 2
    assert key_head_repeats(24, 6, 4) == 2
    assert key_head_repeats(8, 1, 8) == 8
    with pytest.raises(ValueError, match=r"does not divide the 6 attention heads.*1, 2, 3, 6"):
        key_head_repeats(6, 6, 4)


def refusals() -> list[str]:
    found = []

    def refused(act: Any, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind) as error:
            act()
        found.append(str(error.value))

    engine = start(transformers_model("Llama", 4, 2), config(2, sequence_parallel_size=2))
    parallel = engine.sequence_parallel
    batch = samples(0, 0)
    refused(lambda: engine(input_ids=batch["input_ids"]))
    refused(lambda: parallel.split({"input_ids": batch["input_ids"][:, :-1]}))
    refused(lambda: parallel.split(batch | {"attention_mask": torch.ones(MICRO, 1, LENGTH, LENGTH)[:, 0]}))
    part = parallel.split(batch)
    four = torch.zeros(MICRO, 1, LENGTH // 2, LENGTH // 2)
    refused(lambda: engine(**part, attention_mask=four))
    left = torch.ones(MICRO, LENGTH)
    left[:, :3] = 0
    refused(lambda: engine(**parallel.split(batch | {"attention_mask": left})))
    uneven = parallel.split({"input_ids": batch["input_ids"][:, : 20 + 4 * rank()]})
    refused(lambda: engine(**uneven))
    refused(lambda: start(net_without_attention(), config(2, sequence_parallel_size=4)), ConfigError)
    engine.destroy()
    refused(lambda: start(transformers_model("Llama", 1, 1), config(2, sequence_parallel_size=2)), ConfigError)
    engine = start(net_without_attention(), config(2, sequence_parallel_size=2))
    refused(lambda: engine(torch.ones(2, 4)), RuntimeError)
    engine.destroy()
    return found


def net_without_attention() -> nn.Module:
    return nn.Linear(4, 4)


def test_what_is_not_divided_is_refused_by_name(on_ranks):
    names = [
        "without position_ids", "pad_to_multiple_of", "only masks of padding",
        "attention_mask must be a mask of padding", "padding_side", "inputs of different shapes",
        "does not divide the 2 ranks", "attention heads of the model",
        "neither torch's scaled_dot_product_attention",
    ]  # fmt: skip
    for found in on_ranks(2, refusals):
        for name, text in zip(names, found, strict=True):
            assert name in text


def whole_and_after() -> None:
    model = transformers_model("Llama", 4, 2)
    batch = samples(0, rank())  # other sequences on each rank
    with torch.no_grad():
        expected = model(**batch).loss
    before = model.config._attn_implementation
    engine = start(model, config(3, sequence_parallel_size=2))
    with engine.sequence_parallel.whole_sequences(), torch.no_grad():
        torch.testing.assert_close(engine(**batch).loss, expected)
    padded = batch | {"attention_mask": torch.ones(MICRO, LENGTH)}
    padded["attention_mask"][:, -5:] = 0
    same = {name: value if rank() == 0 else torch.zeros_like(value) for name, value in padded.items()}
    for value in same.values():
        torch.distributed.broadcast(value, 0)
    with torch.no_grad():
        same["labels"][:, -5:] = -100
        part = engine.sequence_parallel.split(same)
        found = engine.sequence_parallel.mean_loss(engine(**part).loss, part["labels"])
    engine.destroy()
    assert model.config._attn_implementation == before
    assert F.scaled_dot_product_attention.__module__ != "onefold.sequence.dispatch"
    onefold.zero.gather_distributed_parameters(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**same).loss, found)


def test_whole_sequences_padding_and_closing(on_ranks):
    """Check undivided batches, right padding, and that a closed engine leaves the model's attention as it was."""
    on_ranks(2, whole_and_after)
