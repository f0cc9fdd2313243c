"""Chunked blocks in every plan: the results of the whole batch to rounding, one gather and one reduction per pass."""

from __future__ import annotations

import copy
import functools
import io
import logging
import re
from typing import Any

import pytest
import torch
from covering import covering
from live_bytes import Peaks
from models import (
    VOCABULARY,
    Block,
    Net,
    Trace,
    config,
    first_difference,
    more,
    net,
    precision,
    rank,
    start,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import checkpointing
from onefold.config import load_config
from onefold.runtime import Unit
from onefold.runtime.batch_chunks import ChunkedForward, num_chunks_for

STAGES = (0, 1, 2, 3)
BATCH = 6
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "states": {"offload_optimizer": {"device": "cpu"}},
    "host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def samples(num: int, size: int = BATCH, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * seed + rank())
    tokens = [torch.randint(0, VOCABULARY, (size, 7), generator=generator) for _ in range(num)]
    return [(x, x.roll(-1, 1)) for x in tokens]


def settings(stage: int, chunks: Any, dtype: str = "fp32", tier: str = "device", **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **TIERS[tier], **more.pop("zero", {})}
    base = {"train_micro_batch_size_per_gpu": BATCH, "onefold": {"batch_chunks": chunks}, **precision(dtype), **SGD}
    return config(stage, **{**base, **more, "zero_optimization": zero})


def train(engine: onefold.Engine, num: int = 3) -> Trace:
    losses, norms = [], []
    for x, y in samples(num):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    return Trace(losses, norms, weights_of(engine.module))


def run(model: nn.Module, given: dict[str, Any], num: int = 3) -> Trace:
    engine = start(model, given)
    trace = train(engine, num)
    engine.destroy()
    return trace


def compare(found: Trace, expected: Trace, dtype: str) -> list[str]:
    """SGD, because Adam hides a wrong scale of a gradient."""
    of_losses, of_weights = {"fp32": (1e-5, 1e-5), "bf16": (2e-2, 2e-2)}[dtype]
    problems = []
    for name, one, other in (("losses", found.losses, expected.losses), ("norms", found.norms, expected.norms)):
        if one != pytest.approx(other, rel=of_losses):
            problems.append(f"{name}: {one}, expected {other}")
    for name, weight in expected.weights.items():
        apart = (found.weights[name].float() - weight.float()).norm() / weight.float().norm().clamp_min(1e-3)
        if apart > of_weights:
            problems.append(f"{name}: {apart:.2g} apart")
    return problems


# -- the same results --------------------------------------------------------------------------------------------------


def as_whole(stage: int, dtype: str, tier: str, tied: bool, accumulation: int) -> list[str]:
    more = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5}
    traces = [
        run(net(tied=tied), settings(stage, chunks, dtype, tier, **more), 2 * accumulation) for chunks in (0, 1, 4)
    ]
    return [problem for trace in traces[1:] for problem in compare(trace, traces[0], dtype)]


@covering(
    world=(1, 2),
    stage=STAGES,
    dtype=("fp32", "bf16"),
    tier=tuple(TIERS),
    tied=(False, True),
    accumulation=(1, 2),
    strength=1,
    always=[(2, 3, "bf16", "host", False, 1), (2, 3, "fp32", "device", True, 2), (1, 3, "bf16", "host", True, 1)],
    where=lambda stage, tier, **_: tier == "device" or stage == 3 or (tier == "states" and stage > 0),
)
def test_results_are_those_of_the_whole_batch(on_ranks, world, stage, dtype, tier, tied, accumulation):
    for problems in on_ranks(world, as_whole, stage, dtype, tier, tied, accumulation):
        assert problems == []


def stages_beside_0(dtype: str) -> list[str | None]:
    traces = {}
    for stage in STAGES:
        traces[stage] = run(net(), settings(stage, 4, dtype))
    for tier in ("states", "host"):
        traces[tier] = run(net(), settings(3, 4, dtype, tier))
    return [first_difference(trace, traces[0]) for trace in traces.values()]


@pytest.mark.parametrize(("world", "dtype"), [(2, "bf16"), more(1, "fp32"), more(1, "bf16"), more(2, "fp32")])
def test_stages_and_tiers_are_bit_equal_with_the_same_chunks(on_ranks, world, dtype):
    for found in on_ranks(world, stages_beside_0, dtype):
        assert found == [None] * 6


class Sums(nn.Module):
    """Blocks whose weight gets a large gradient from one sample and small ones from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Factor() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().sum()


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def gradient_of_many_chunks(stage: int) -> float:
    engine = start(Sums(), settings(stage, 1001, "bf16", train_micro_batch_size_per_gpu=1001))
    x = torch.full((1001, 1), 2.0**-8, dtype=torch.bfloat16)
    x[0] = 1
    engine.backward(engine(x))
    engine.step()
    found = float(weights_of(engine.module)["blocks.1.weight"])
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [3, more(1)])
def test_chunks_add_in_fp32(on_ranks, stage):
    """A thousand gradients of 2**-8 beside one of 1: sums in bf16 lose them, and the weight becomes 0.9."""
    (found,) = on_ranks(1, gradient_of_many_chunks, stage)
    assert found == pytest.approx(1 - 0.1 * (1 + 1000 / 256), rel=2**-6)


# -- traffic and memory ------------------------------------------------------------------------------------------------


def traffic(stage: int, tier: str, chunks: int, micro_steps: int, size: int) -> dict[tuple[str, str], tuple[int, int]]:
    given = settings(
        stage, chunks, "bf16", tier, train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=micro_steps
    )
    engine = start(net(), given)
    for _ in range(2):
        before = engine.ledger.copy()
        for x, y in samples(micro_steps, size):
            engine.backward(engine(x, y))
            engine.step()
        engine.wait_for_step()
    rows = engine.ledger.since(before).rows()
    engine.destroy()
    return {(row.operation, str(row.group)): (row.calls, row.bytes) for row in rows}


def traffic_of_each(stage: int, tier: str) -> list[Any]:
    return [traffic(stage, tier, *case) for case in ((0, 1, 8), (4, 1, 8), (0, 4, 2))]


@pytest.mark.parametrize(("stage", "tier"), [(2, "states"), more(3, "device"), (3, "host")])
def test_chunks_have_the_traffic_of_one_micro_step(on_ranks, stage, tier):
    for whole, chunks, accumulated in on_ranks(2, traffic_of_each, stage, tier):
        assert chunks == whole
        assert sum(size for _, size in accumulated.values()) > 1.5 * sum(size for _, size in chunks.values())


def gathers(chunks: int) -> list[str]:
    engine = start(net(), settings(3, chunks, zero={"stage3_max_reuse_distance": 0}))
    found = []
    launch = Unit.launch_all_gather

    def count(units: Any, **options: Any) -> None:
        found.extend(unit.name for unit in units)
        launch(units, **options)

    for x, y in samples(2):
        found.clear()
        Unit.launch_all_gather = staticmethod(count)
        try:
            engine.backward(engine(x, y))
        finally:
            Unit.launch_all_gather = staticmethod(launch)
        engine.step()
    engine.destroy()
    return [name for name in found if name.startswith("blocks")]


def test_a_unit_is_gathered_once_per_pass(on_ranks):
    for found in on_ranks(2, gathers, 3):
        assert sorted(found) == sorted([f"blocks.{index}" for index in range(3)] * 2)


class Wide(nn.Module):
    """Blocks whose activations are 16 times as large as their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def peak_of(chunks: int) -> int:
    torch.manual_seed(0)
    engine = start(Wide(), settings(3, chunks, train_micro_batch_size_per_gpu=64))
    x = torch.randn(64, 64, 16)
    for _ in range(2):
        with Peaks() as peaks:
            engine.backward(engine(x))
        engine.step()
    engine.destroy()
    return peaks.peak


def test_memory_is_that_of_one_chunk_and_the_inputs(on_ranks):
    whole, recomputed, chunked = (on_ranks(1, peak_of, chunks)[0] for chunks in (0, 1, 8))
    boundary = 64 * 64 * 16 * 4
    # Each block saves its wide activation, and its gradient exists in one block at a time.
    assert whole > (4 + 1) * 16 * boundary
    assert recomputed > (1 + 1) * 16 * boundary
    # Inputs and outputs of the blocks, two gradients of these, 4 wide tensors of one chunk of 8, and parameters.
    assert chunked < (5 + 2) * boundary + 4 * 16 * boundary / 8 + (1 << 20)
    assert chunked < recomputed / 2


# -- evaluation, dropout, copies, the compiler -------------------------------------------------------------------------


class Noisy(Net):
    """With dropout in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(21), nn.Dropout(0.5)) for _ in range(2))


def evaluation() -> list[str]:
    engine = start(net(), settings(3, 4))
    plain = Net()
    plain.load_state_dict(weights_of(engine.module))
    problems = []
    (x, y), *_ = samples(1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, expected = engine(x, y), plain(x, y)
        if found.item() != pytest.approx(expected.item(), rel=1e-5) or found.requires_grad:
            problems.append(f"{context.__name__}: {found}, expected {expected}")
    trace = train(engine)
    engine.destroy()
    return problems + compare(trace, run(net(), settings(3, 0)), "fp32")


def test_an_evaluation_computes_in_chunks(on_ranks):
    assert on_ranks(2, evaluation) == [[], []]


def dropout_twice() -> str | None:
    traces = []
    for _ in range(2):
        torch.manual_seed(5)
        engine = start(Noisy(), settings(3, 3))
        torch.manual_seed(9 + rank())
        traces.append(train(engine))
        engine.destroy()
    return first_difference(*traces)


def test_dropout_is_reproducible_and_not_taken_for_mixing(on_ranks):
    assert on_ranks(2, dropout_twice) == [None, None]


class AlwaysNoisy(Block):
    """With dropout in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3)


def noise_in_evaluation() -> list[str]:
    engine = start(with_blocks(AlwaysNoisy), settings(3, 3))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("onefold").addHandler(handler)
    train(engine, 2)
    logging.getLogger("onefold").removeHandler(handler)
    engine.destroy()
    return said


def test_blocks_that_are_always_random_are_not_compared_and_reported(on_ranks):
    (found,) = on_ranks(1, noise_in_evaluation)
    assert [line.split(" draws")[0] for line in found] == [f"onefold.batch_chunks: blocks.{index}" for index in (0, 1)]


def copies() -> list[str]:
    engine = start(net(), settings(2, 3))
    model = engine.module
    (x, y), *_ = samples(1)
    with torch.no_grad():
        expected = engine(x, y).item()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    problems = [
        f"{type(m.blocks[0].forward)}" for m in (copied, loaded) if isinstance(m.blocks[0].forward, ChunkedForward)
    ]
    problems += [f"{found(x, y).item()}" for found in (copied, loaded) if found(x, y).item() != pytest.approx(expected)]
    if not isinstance(model.blocks[0].forward, ChunkedForward):
        problems.append("the forward of the engine's model is not chunked")
    engine.destroy()
    return problems + ["forward remains on a module"] * ("forward" in model.blocks[0].__dict__)


def test_copies_and_closed_models_have_the_forward_of_before(on_ranks):
    assert on_ranks(1, copies) == [[]]


def compiled() -> list[str]:
    engine = start(net(), settings(3, 3))
    engine.compile(backend="eager")
    trace = train(engine)
    problems = compare(trace, run(net(), settings(3, 0)), "fp32")
    model = engine.module
    engine.destroy()
    return problems + ["forward remains on a module"] * ("forward" in model.blocks[0].__dict__)


def test_chunks_of_compiled_units(on_ranks):
    assert on_ranks(1, compiled) == [[]]


def test_auto_makes_chunks_of_8192_rows():
    assert num_chunks_for(batch=32, num_rows=32 * 1024) == 4
    assert num_chunks_for(batch=3, num_rows=3 * 16384) == 3
    assert num_chunks_for(batch=7, num_rows=7 * 2048) == 2
    assert num_chunks_for(batch=4, num_rows=400) == 1


def descriptions() -> list[str]:
    found = []
    for chunks in (0, 4, "auto"):
        engine = start(net(), settings(3, chunks))
        found.append(engine.describe())
        engine.destroy()
    return found


def test_the_description_has_the_number_of_chunks(on_ranks):
    whole, four, auto = on_ranks(1, descriptions)[0]
    assert "batch chunks" not in whole
    assert "batch chunks      3 blocks compute and recompute each micro-batch in 4 chunks;" in four
    # Of each element of a block: fp32 sum and fp32 gradient.
    assert f"gradient sums of a block {8 * (2 * 21 * 42 + 42 + 2 * 21) / 1000:.1f} kB" in four
    assert "3 blocks compute and recompute each micro-batch in chunks of about 8,192 tokens" in auto


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, "at least 0"), ("some", "auto, or a whole number"), (2.5, "auto")]
)
def test_wrong_numbers_of_chunks_are_refused(value, expected):
    with pytest.raises(onefold.ConfigError, match=f"onefold.batch_chunks = .*: expected {expected}"):
        load_config({"onefold": {"batch_chunks": value}})


def offloaded_inputs() -> list[str]:
    """Checkpoints of onefold around the blocks, whose settings store inputs on the host."""
    found = []
    for chunks in (0, 3):
        torch.manual_seed(5)
        model = Checkpointed()
        model.call = checkpointing.checkpoint
        more = {"activation_checkpointing": {"cpu_checkpointing": True}}
        found.append(run(model, settings(3, chunks, **more)))
    checkpointing._set(checkpointing.Settings())
    return compare(found[1], found[0], "fp32")


def test_checkpoints_that_store_inputs_on_the_host_may_be_around_blocks(on_ranks):
    assert on_ranks(1, offloaded_inputs) == [[]]


# -- models that cannot be divided -------------------------------------------------------------------------------------


class Mixing(Block):
    """Subtracts the mean over the samples of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class MixingOnOneRank(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0) if rank() == 1 else x)


class Positional(Block):
    """Scales each sample by its position in the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.arange(1.0, 1 + len(x)).view(-1, *[1] * (x.dim() - 1)))


class Counting(Block):
    """Counts samples in a buffer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("num_seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen += len(x)
        return super().forward(x)


class Capturing(Block):
    """Uses a tensor that is not its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.of_model[0]


class Storing(Block):
    """Leaves a loss on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.router_loss = found.square().mean()
        return found


class Reentrant(Net):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h)


class Checkpointed(Net):
    call = functools.partial(checkpoint, use_reentrant=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = self.call(block, h)
        return self.head(h)


def with_blocks(kind: type[Block]) -> Net:
    torch.manual_seed(3)
    model = Net()
    model.blocks = nn.ModuleList(kind(21) for _ in range(2))
    if kind is Capturing:
        model.factor = nn.Parameter(torch.ones(1))
        for block in model.blocks:
            block.of_model = (model.factor,)
    return model


REFUSED = {
    "mixing": (lambda: with_blocks(Mixing), "on rank 0, blocks.0 mixes the samples of a batch: output 0 of its last"),
    "position": (lambda: with_blocks(Positional), "blocks.0 mixes the samples of a batch: output 0 of its last"),
    "counting": (lambda: with_blocks(Counting), "blocks.0 writes to its buffer num_seen in forward"),
    "one rank": (lambda: with_blocks(MixingOnOneRank), "on rank 1, blocks.0 mixes the samples of a batch"),
    "capturing": (lambda: with_blocks(Capturing), r"blocks.1 uses a tensor of shape \[1\] that requires a gradient"),
    "storing": (lambda: with_blocks(Storing), "blocks.1 stores a tensor with a gradient in 'router_loss'"),
    "reentrant": (Reentrant, "blocks.2 is recomputed by activation checkpointing around it"),
}


def refusal(name: str, stage: int) -> tuple[str, bool]:
    engine = start(REFUSED[name][0](), settings(stage, 3))
    before = weights_of(engine.module)
    (x, y), *_ = samples(1)
    try:
        engine.backward(engine(x, y))
    except RuntimeError as error:
        return str(error), first_difference(weights_of(engine.module), before) is None
    finally:
        engine.destroy()
    return "no error", False


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_depend_on_other_samples_are_refused_on_all_ranks(on_ranks, name, stage):
    for message, is_unchanged in on_ranks(2, refusal, name, stage):
        assert re.search(REFUSED[name][1], message), message
        assert is_unchanged


def refusal_in_evaluation() -> str:
    engine = start(with_blocks(Mixing), settings(3, 3))
    (x, y), *_ = samples(1)
    try:
        with torch.no_grad():
            engine(x, y)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_mixing_blocks_are_refused_in_an_evaluation(on_ranks):
    for message in on_ranks(2, refusal_in_evaluation):
        assert message.startswith("onefold.batch_chunks: blocks.0 mixes the samples of a batch")


def refusal_in_a_later_step() -> str:
    engine = start(with_blocks(Mixing), settings(1, 3))
    for size in (1, BATCH):
        (x, y), *_ = samples(1, size)
        try:
            engine.backward(engine(x, y))
        except RuntimeError as error:
            return f"batch of {size}: {error}"
        finally:
            if size > 1:
                engine.destroy()
        engine.step()
    return "no error"


def test_blocks_that_are_divided_later_are_compared_then(on_ranks):
    for message in on_ranks(2, refusal_in_a_later_step):
        assert message.startswith("batch of 6: onefold.batch_chunks: blocks.0 mixes the samples of a batch")


class MixingInTraining(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0) if self.training else x)


def refusal_after_an_evaluation() -> str:
    engine = start(with_blocks(MixingInTraining), settings(1, 3))
    (x, y), *_ = samples(1)
    engine.eval()
    with torch.no_grad():
        engine(x, y)
    engine.train()
    try:
        engine.backward(engine(x, y))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_blocks_that_mix_samples_in_training_only_are_refused_after_an_evaluation(on_ranks):
    for message in on_ranks(2, refusal_after_an_evaluation):
        assert "blocks.0 mixes the samples of a batch" in message


def checkpointed() -> list[str]:
    torch.manual_seed(5)
    model = Checkpointed()
    plain = copy.deepcopy(model)
    calls = []
    model.blocks[1].up.register_forward_hook(lambda *_: calls.append(1))
    trace = run(model, settings(3, 3), 3)
    # Each step has 3 chunks and their recomputations; the first also computes the whole batch once.
    problems = [] if len(calls) == 3 * 6 + 1 else [f"{len(calls)} calls"]
    return problems + compare(trace, run(plain, settings(3, 0)), "fp32")


def test_a_checkpoint_around_each_block_recomputes_nothing(on_ranks):
    assert on_ranks(1, checkpointed) == [[]]


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), copy.deepcopy(norm)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TopKGate(nn.Linear):
    """Under the name of a router of DeepSpeed."""


class Configured(Net):
    """With the config of a Hugging Face model that returns the logits of its routers."""

    config = type("Config", (), {"output_router_logits": True})()


REFUSED_BY_NAME = {
    "batch norm": (lambda: Normed(nn.BatchNorm1d(8)), "blocks.0.1 is a BatchNorm1d"),
    "synchronized": (lambda: Normed(nn.SyncBatchNorm(8)), "blocks.0.1 is a SyncBatchNorm"),
    "router": (lambda: Normed(TopKGate(8, 8)), "blocks.0.1 is a TopKGate"),
    "router logits": (Configured, "the model's config has output_router_logits"),
    "no blocks": (lambda: nn.Linear(8, 8), "the model has no repeated blocks"),
}


def refusal_by_name(name: str) -> str:
    try:
        start(REFUSED_BY_NAME[name][0](), settings(3, 3))
    except onefold.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", REFUSED_BY_NAME)
def test_known_classes_are_refused_by_name(on_ranks, name):
    for message in on_ranks(2, refusal_by_name, name):
        assert message.startswith("onefold.batch_chunks")
        assert REFUSED_BY_NAME[name][1] in message


def frozen_norm() -> list[str]:
    model = Normed(nn.BatchNorm1d(8)).eval()
    engine = start(model, settings(1, 3))
    x = torch.randn(BATCH, 8)
    engine.backward(engine(x))
    engine.step()
    model.blocks[1].train()
    try:
        engine(x)
    except onefold.ConfigError as error:
        return [str(error)]
    finally:
        engine.destroy()
    return []


def test_a_batch_norm_is_refused_only_while_it_uses_the_statistics_of_the_batch(on_ranks):
    ((message,),) = on_ranks(1, frozen_norm)
    assert "blocks.1.1 is a BatchNorm1d" in message


class Tabled(nn.Module):
    """Blocks with a rotary table, a mask that is the same for all samples, one for each, a number and None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TabledBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0, 1, 7)[:, None].expand(7, 8)
        everybody, each = torch.ones(1, 7, 1), torch.arange(len(x) * 7).view(-1, 7, 1) % 3 > 0
        for block in self.blocks:
            x, others = block(x, (table.cos(), table.sin()), everybody, each=each, factor=0.5, nothing=None)
            x = x + others["found"]
        return x.square().mean()


class TabledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, tables: Any, everybody: torch.Tensor, *, each: torch.Tensor, factor: float, nothing: None
    ) -> Any:
        assert nothing is None
        cos, sin = tables
        found = torch.tanh(self.up(x)) * cos + x * sin
        return F.softplus(found * everybody), {"found": found * each * factor, "none": None}


def tabled() -> list[str]:
    traces = []
    for chunks in (0, 4):
        torch.manual_seed(1)
        engine = start(Tabled(), settings(3, chunks))
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = engine(torch.randn(BATCH, 7, 8))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        traces.append(Trace(losses, [], weights_of(engine.module)))
        engine.destroy()
    return compare(traces[1], traces[0], "fp32")


def test_arguments_without_a_batch_dimension_are_passed_to_every_chunk(on_ranks):
    assert on_ranks(1, tabled) == [[]]


# -- models of transformers --------------------------------------------------------------------------------------------


def transformers_model(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "Bert":
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    else:
        options = {"num_key_value_heads": 2}
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    settings = getattr(transformers, f"{kind}Config")(**shape, num_attention_heads=4, **options)
    name = "BertForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM"
    model: nn.Module = getattr(transformers, name)(settings)
    return model.train()


def losses_of_transformers(kind: str, chunks: int, checkpoints: bool) -> list[float]:
    model = transformers_model(kind)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = start(model, settings(3, chunks))
    generator, found = torch.Generator().manual_seed(rank()), []
    for _ in range(3):
        x = torch.randint(0, 97, (BATCH, 10), generator=generator)
        mask = torch.ones_like(x)
        mask[1, 7:] = 0
        options = {} if kind == "Bert" else {"use_cache": False}
        loss = engine(input_ids=x, attention_mask=mask, labels=x, **options).loss
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm()]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "checkpoints"), [more("Llama", False), ("Llama", True), ("Mixtral", False), more("Bert", False)]
)
def test_models_of_transformers(on_ranks, kind, checkpoints):
    pytest.importorskip("transformers")
    whole, chunked = (on_ranks(2, losses_of_transformers, kind, chunks, checkpoints) for chunks in (0, 4))
    for found, expected in zip(chunked, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
