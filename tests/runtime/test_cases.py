"""Cases that broke other implementations, each beside plain torch, on real ranks and in every stage."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import (
    Block,
    batches,
    config,
    first_difference,
    more,
    net,
    precision,
    rank,
    start,
    table,
    train,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold

STAGES = [0, 1, 2, 3]
FIRST_STAGES = [3, 2, more(0), more(1)]
WIDTH = 10
STEPS = 3
# Plain SGD shows a wrong factor that Adam would hide.
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
SGD = {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM, "weight_decay": DECAY}}

Weights = dict[str, torch.Tensor]


def data(step: int, *shape: int) -> torch.Tensor:
    """Different on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank() + 7)
    return torch.randn(shape or (4, WIDTH), generator=generator)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank()))


class Reference:
    """Plain torch: autograd on this rank's data, the average over ranks, torch's SGD on fp32 masters.

    As everywhere in the ZeRO family, a parameter without a gradient counts as one whose gradient is zero.
    """

    def __init__(self, model: nn.Module, groups: Iterable[dict[str, Any]] | None = None) -> None:
        self.model = model
        self._masters = {p: p.detach().float().clone() for p in model.parameters() if p.requires_grad}
        settings = groups or [{"params": list(self._masters)}]
        self._optimizer = torch.optim.SGD(
            [{**group, "params": [self._masters[p] for p in group["params"]]} for group in settings],
            lr=RATE,
            momentum=MOMENTUM,
            weight_decay=DECAY,
        )

    def step(self) -> None:
        line = torch.cat([
            (torch.zeros_like(master) if parameter.grad is None else parameter.grad.to_dense().float()).flatten()
            for parameter, master in self._masters.items()
        ])  # fmt: skip
        dist.all_reduce(line)
        pieces = (line / dist.get_world_size()).split([master.numel() for master in self._masters.values()])
        for (parameter, master), piece in zip(self._masters.items(), pieces, strict=True):
            master.grad = piece.view_as(master)
            parameter.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)


def twin(engine: onefold.Engine, build: Callable[[], nn.Module]) -> nn.Module:
    """A model of plain torch with the engine's weights."""
    plain = build()
    plain.load_state_dict(weights_of(engine.module))
    return plain


def assert_close(mine: Weights, theirs: Weights, label: Any = "") -> None:
    assert mine.keys() == theirs.keys()
    # 16-bit gradients accumulate in fp32 here and in 16 bits in plain torch.
    coarse = any(weight.dtype != torch.float32 for weight in theirs.values())
    for name, expected in theirs.items():
        torch.testing.assert_close(
            mine[name],
            expected,
            rtol=1e-2 if coarse else 2e-5,
            atol=1e-3 if coarse else 2e-6,
            msg=lambda text, name=name: f"{label} {name}: {text}",
        )


def equal(mine: Weights, other: Weights) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


# -- models ------------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks in a list between two projections; subclasses change what is done with them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.step = 0

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.run(self.enter(x)))


class TiedInOneUnit(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.leave.weight = self.enter.weight


class TiedAcrossUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.leave.weight = self.enter.weight


class Frozen(Stack):
    """A whole unit, the root's weights, and single biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].norm.bias.requires_grad_(False)
        self.enter.weight.requires_grad_(False)


class MixedDtypes(Stack):
    """One unit all bf16, one half and half."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].bfloat16()
        self.blocks[2].up.bfloat16()
        self.blocks[2].down.bfloat16()

    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](h).bfloat16()).float()
        last = self.blocks[2]
        return h + last.down(torch.tanh(last.up(last.norm(h).bfloat16()))).float()


class NoRootParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(WIDTH), Block(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class OnlyOneModule(nn.Linear):
    """The root is the only module there is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class UnusedOnSomeRanks(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](h)
        if rank() == 0:
            h = self.blocks[1](h)
        return self.blocks[2].down(torch.tanh(self.blocks[2].up(h)))


class UnusedOnAllRanks(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[2].norm(self.blocks[0](h))


class RunTwice(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[2](self.blocks[1](self.blocks[0](h))))


class Skipped(Stack):
    """Another block is left out in each step, and the order of the blocks changes after the first."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)
        if self.training:
            self.step += 1
        del blocks[self.step % 3]
        for block in reversed(blocks) if self.step % 2 else blocks:
            h = block(h)
        return h


class SharedBetweenPlaces(Stack):
    """One module registered under two names, inside the list and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.extra = self.blocks[1]

    def run(self, h: torch.Tensor) -> torch.Tensor:
        return self.extra(super().run(h))


class OutputView(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, 2, WIDTH // 2)[:, 0]


class InPlaceInside(Stack):
    """Each block's output is a view that the next line changes in place."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h).view(-1, WIDTH)
            h.mul_(0.5).add_(0.1)
        return h


class DictOutput(Stack):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.run(self.enter(x))
        return {"h": h, "outputs": [self.leave(h), None, "text"]}


@dataclass
class Output:
    loss: torch.Tensor
    extras: tuple[torch.Tensor, ...]


class DataclassOutput(Stack):
    def forward(self, x: torch.Tensor) -> Output:
        h = self.run(self.enter(x))
        return Output(loss=self.leave(h).square().mean(), extras=(h, h.detach()))


class OpaqueOutput(Stack):
    """An output that no hook can look into."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return lambda: out


class Reentrant(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class NonReentrant(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class ReentrantTwice(Stack):
    """A block that two checkpoints run: its gradients come twice, the second time late."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 1):
            h = checkpoint(self.blocks[index], h, use_reentrant=True)
        return h


class NonReentrantTwice(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 1):
            h = checkpoint(self.blocks[index], h, use_reentrant=False)
        return h


class ReentrantTied(Stack):
    """A weight that two checkpoints use, once through another unit's module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class ReentrantForeign(Stack):
    """Checkpointed functions that read a weight of another unit, which nothing in the module tree shows."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(self._one, block, h, use_reentrant=True)
        return h

    def _one(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h) + F.linear(h, self.blocks[2].up.weight[:WIDTH])


class ReentrantTwiceOnOneRank(Stack):
    """Only one rank has late gradients."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2) if rank() == 0 else (0, 1, 2):
            h = checkpoint(self.blocks[index], h, use_reentrant=True)
        return h


class RankDivergent(Stack):
    """In each step every rank goes through other blocks, and in another order."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.step += 1
        first = (rank() + self.step) % 3
        h = self.blocks[first](h)
        return self.blocks[(first + 1 + rank()) % 3](h) if rank() else h


class Experts(Stack):
    """Experts inside one unit: each rank's data choose others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Block(WIDTH) for _ in range(2)) for _ in range(2))

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer[rank() % 2](h)
        return h


class ZeroSized(Stack):
    """Empty parameters in the root, and a unit that holds nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.nothing = nn.ModuleList([Empty(), Empty()])

    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = super().run(h) + self.empty.sum()
        for module in self.nothing:
            h = module(h)
        return h


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 0))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.weight.sum()


class OneElement(nn.Module):
    """Fewer elements than ranks; one parameter has no dimension at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return h


class StridedParameters(nn.Module):
    """Parameters that are not contiguous, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + self.bias


# -- losses ------------------------------------------------------------------------------------------------------------


def square(model: Any, step: int) -> torch.Tensor:
    return (model(data(step)) - data(step + 50)).square().mean()


def of_grad_inputs(model: Any, step: int) -> torch.Tensor:
    return model(data(step).requires_grad_()).square().mean()


def of_tokens(model: Any, step: int) -> torch.Tensor:
    return model(tokens(step)).square().mean()


def of_view(model: Any, step: int) -> torch.Tensor:
    out = model(data(step))
    out += 1
    out[:, 0].mul_(2)
    return out.square().mean()


def of_dict(model: Any, step: int) -> torch.Tensor:
    out = model(data(step))
    return out["outputs"][0].square().mean() + out["h"].abs().mean()


def of_dict_in_part(model: Any, step: int) -> torch.Tensor:
    return model(data(step))["h"].square().mean()


def of_dataclass(model: Any, step: int) -> torch.Tensor:
    out = model(data(step))
    return out.loss + out.extras[0].square().mean()


def of_opaque(model: Any, step: int) -> torch.Tensor:
    return model(data(step))().square().mean()


def reads_weight(model: Any, step: int) -> torch.Tensor:
    return F.linear(model(data(step)), model.leave.weight).square().mean() + model.blocks[1].up.weight.square().mean()


def around_the_root(model: Any, step: int) -> torch.Tensor:
    """The root's own forward never runs."""
    return model.leave(model.run(model.enter(data(step)))).square().mean()


def two_forwards(model: Any, step: int) -> torch.Tensor:
    return model(data(step)).square().mean() + (model(data(step + 50)) - 1).square().mean()


def forward_of_forward(model: Any, step: int) -> torch.Tensor:
    return model(model(data(step))).square().mean()


Case = tuple[Callable[[], nn.Module], Callable[[Any, int], torch.Tensor]]

# The models of a group train in one call on the ranks.
GROUPS: dict[str, dict[str, Case]] = {
    "parameters": {
        "plain": (Stack, square),
        "tied in one unit": (TiedInOneUnit, square),
        "tied across units": (TiedAcrossUnits, square),
        "frozen": (Frozen, square),
        "mixed dtypes": (MixedDtypes, square),
        "no root parameters": (NoRootParameters, square),
        "only one module": (OnlyOneModule, square),
        "zero-sized": (ZeroSized, square),
        "one element": (OneElement, square),
        "sparse embedding": (SparseEmbedding, of_tokens),
        "strided parameters": (StridedParameters, square),
    },
    "paths": {
        "inputs that need grad": (Stack, of_grad_inputs),
        "unused on some ranks": (UnusedOnSomeRanks, square),
        "unused on all ranks": (UnusedOnAllRanks, square),
        "run twice": (RunTwice, square),
        "skipped": (Skipped, square),
        "shared between places": (SharedBetweenPlaces, square),
        "around the root": (Stack, around_the_root),
        "rank-divergent": (RankDivergent, square),
        "experts": (Experts, square),
        "weight read outside": (Stack, reads_weight),
        "two forwards": (Stack, two_forwards),
        "forward of forward": (Stack, forward_of_forward),
    },
    "outputs": {
        "output view": (OutputView, of_view),
        "in place inside": (InPlaceInside, square),
        "dict": (DictOutput, of_dict),
        "dict in part": (DictOutput, of_dict_in_part),
        "dataclass": (DataclassOutput, of_dataclass),
        "opaque output": (OpaqueOutput, of_opaque),
    },
    "checkpoints": {
        "reentrant": (Reentrant, square),
        "non-reentrant": (NonReentrant, square),
        "reentrant twice": (ReentrantTwice, square),
        "non-reentrant twice": (NonReentrantTwice, square),
        "reentrant tied": (ReentrantTied, square),
        "reentrant foreign": (ReentrantForeign, square),
        "reentrant twice on one rank": (ReentrantTwiceOnOneRank, square),
        "reentrant around the root": (Reentrant, around_the_root),
        "reentrant twice around the root": (ReentrantTwice, around_the_root),
    },
}
CASES: dict[str, Case] = {name: case for group in GROUPS.values() for name, case in group.items()}
QUICK = [
    "tied across units",
    "mixed dtypes",
    "sparse embedding",
    "unused on some ranks",
    "rank-divergent",
    "weight read outside",
]


def num_steps(accumulation: int) -> int:
    return STEPS if accumulation == 1 else 2


def train_case(case: str, stage: int, *, bare: bool = False, accumulation: int = 1, overlap: bool = False) -> Weights:
    build, loss_of = CASES[case]
    torch.manual_seed(5 + rank())
    engine = start(build(), settings(stage, accumulation, overlap))
    for step in range(num_steps(accumulation) * accumulation):
        loss = loss_of(engine, step)
        loss.backward() if bare else engine.backward(loss)
        engine.step()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert engine.global_steps == num_steps(accumulation)
    weights = weights_of(engine.module)
    engine.destroy()
    return weights


def train_reference(case: str, accumulation: int) -> Weights:
    build, loss_of = CASES[case]
    torch.manual_seed(5)
    reference = Reference(build())
    for step in range(num_steps(accumulation) * accumulation):
        (loss_of(reference.model, step) / accumulation).backward()
        if (step + 1) % accumulation == 0:
            reference.step()
    return weights_of(reference.model)


def settings(stage: int, accumulation: int = 1, overlap: bool = False, **more: Any) -> dict[str, Any]:
    return config(
        stage,
        optimizer=SGD,
        gradient_accumulation_steps=accumulation,
        zero_optimization={"overlap_comm": overlap},
        **more,
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "engine.backward": {},
    "bare, overlapped": {"bare": True, "overlap": True},
    "accumulated": {"accumulation": 2},
    "bare, accumulated, overlapped": {"bare": True, "accumulation": 2, "overlap": True},
}


def close(left: Weights, right: Weights) -> bool:
    return all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def on_other_ranks(case: str, runs: Iterable[Weights]) -> list[str]:
    """Return the ranks whose weights are not those of rank 0."""
    lines = [weight.detach().double().flatten() for weights in runs for weight in weights.values()]
    bits = hashlib.blake2b(torch.cat(lines).numpy().tobytes(), digest_size=8).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bits)
    return [f"{case}: rank {number} has other weights" for number, each in enumerate(found) if each != found[0]]


def beside_torch(case: str, stage: int, labels: Sequence[str]) -> list[str]:
    """Return what differs from plain torch, or from another variant that has to give the same bits."""
    mine = {label: train_case(case, stage, **VARIANTS[label]) for label in labels}
    theirs = {accumulation: train_reference(case, accumulation) for accumulation in (1, 2)}
    problems = []
    for label in labels:
        problems += apart(
            mine[label], theirs[VARIANTS[label].get("accumulation", 1)], f"{case}, stage {stage}, {label}"
        )
    # When things move never moves a bit, nor does who calls backward. Where ranks part from the program they follow
    # depends on what was in flight, and with it which gradients come late.
    same = close if case == "rank-divergent" and stage == 3 else equal
    for accumulated in (False, True):
        alike = [label for label in labels if ("accumulated" in label) == accumulated]
        problems += [
            f"{case}, stage {stage}: {alike[0]} and {label} differ"
            for label in alike[1:]
            if not same(mine[label], mine[alike[0]])
        ]
    return problems + on_other_ranks(case, mine.values())


def apart(mine: Weights, theirs: Weights, label: str) -> list[str]:
    """Return the first parameter that is not close, with how far it is."""
    try:
        assert_close(mine, theirs, label)
    except AssertionError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class Run:
    stage: int
    accumulation: int
    bare: bool
    overlap: bool

    def train(self, case: str) -> Weights:
        return train_case(case, self.stage, bare=self.bare, accumulation=self.accumulation, overlap=self.overlap)


# Every stage, once and accumulated; every two of these settings meet.
RUNS = [
    Run(stage=0, accumulation=1, bare=False, overlap=True),
    Run(stage=0, accumulation=2, bare=True, overlap=False),
    Run(stage=1, accumulation=1, bare=False, overlap=False),
    Run(stage=1, accumulation=2, bare=True, overlap=True),
    Run(stage=2, accumulation=1, bare=True, overlap=False),
    Run(stage=2, accumulation=2, bare=False, overlap=True),
    Run(stage=3, accumulation=1, bare=True, overlap=True),
    Run(stage=3, accumulation=2, bare=False, overlap=False),
]
# A module run twice under reentrant checkpoints reports its gradient in two parts. In the very first step, before the
# order is agreed, sharded parameters let both be reduced as one: the same sum, rounded elsewhere. Ranks that go other
# ways in every step part from the program, and some gradients come late.
IN_TWO_PARTS = {
    "reentrant twice",
    "reentrant foreign",
    "reentrant twice on one rank",
    "reentrant twice around the root",
    "rank-divergent",
}


def in_every_stage(case: str) -> list[str]:
    """Return what differs from plain torch, or from a stage that has to give the same bits."""
    mine = {(run.stage, run.accumulation): run.train(case) for run in RUNS}
    theirs = {accumulation: train_reference(case, accumulation) for accumulation in (1, 2)}
    problems = []
    for (stage, accumulation), weights in mine.items():
        problems += apart(weights, theirs[accumulation], f"{case}, stage {stage}, accumulation {accumulation}:")
    sharded = close if case in IN_TWO_PARTS else equal
    for one, other, same in [
        ((0, 1), (1, 1), equal),
        ((0, 1), (2, 1), equal),
        ((0, 1), (3, 1), sharded),
        ((0, 2), (1, 2), equal),
        ((2, 2), (3, 2), sharded),
    ]:
        if not same(mine[one], mine[other]):
            difference = first_difference(mine[other], mine[one])
            problems.append(f"{case}, accumulation {one[1]}: stage {other[0]} is not stage {one[0]}: {difference}")
    return problems + on_other_ranks(case, mine.values())


@pytest.mark.parametrize("group", ["quick", *map(more, GROUPS)])
def test_models_equal_plain_torch_and_are_bit_equal_in_every_stage(on_ranks, group):
    names = QUICK if group == "quick" else [name for name in GROUPS[group] if name not in QUICK]
    assert on_ranks(2, table, names, in_every_stage) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("group", GROUPS)
def test_models_equal_plain_torch_in_every_variant(on_ranks, group, stage):
    assert on_ranks(2, table, list(GROUPS[group]), beside_torch, stage, list(VARIANTS)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_models_equal_plain_torch_at_other_world_sizes(on_ranks, group, world):
    variants = ["bare, overlapped", "accumulated"]
    assert on_ranks(world, table, list(GROUPS[group]), beside_torch, 2, variants) == [[]] * world


def scaled_around_the_root(stage: int) -> Weights:
    """fp16, reentrant checkpoints, the root's forward never runs: the backward begins inside a nested graph task."""
    torch.manual_seed(5)
    engine = start(Reentrant(), settings(stage, **precision("fp16")))
    for step in range(STEPS):
        x = data(step).half()
        module = engine.module
        engine.scale(module.leave(module.run(module.enter(x))).float().square().mean()).backward()
        engine.step()
    assert engine.skipped_steps == 0
    return weights_of(engine.module)


def fp16_reference() -> Weights:
    torch.manual_seed(5)
    reference = Reference(Reentrant().half())
    for step in range(STEPS):
        module = reference.model
        loss = module.leave(module.run(module.enter(data(step).half()))).float().square().mean()
        (loss * 256).backward()
        for parameter in module.parameters():
            parameter.grad /= 256
        reference.step()
    return weights_of(reference.model)


@covering(stage=FIRST_STAGES)
def test_a_scaled_bare_backward_may_begin_inside_a_checkpoint(on_ranks, stage):
    for mine in on_ranks(2, scaled_around_the_root, stage):
        assert_close(mine, on_ranks(2, fp16_reference)[0])


# -- losses and backwards ----------------------------------------------------------------------------------------------


def two_losses(stage: int, bare: bool, accumulation: int, overlap: bool) -> tuple[Weights, Weights]:
    """Two losses of one forward, two backwards, one step; with accumulation, that twice."""
    torch.manual_seed(5 + rank())
    engine = start(DictOutput(), settings(stage, accumulation, overlap))
    reference = Reference(twin(engine, DictOutput))
    for step in range(STEPS * accumulation):
        out = engine(data(step))
        first, second = out["outputs"][0].square().mean(), out["h"].abs().mean()
        if bare:
            first.backward(retain_graph=True)
            second.backward()
        else:
            engine.backward(first, retain_graph=True)
            engine.backward(second)
        engine.step()
        out = reference.model(data(step))
        ((out["outputs"][0].square().mean() + out["h"].abs().mean()) / accumulation).backward()
        if (step + 1) % accumulation == 0:
            reference.step()
    return weights_of(engine.module), weights_of(reference.model)


@covering(stage=STAGES, bare=(False, True), accumulation=(1, 2), overlap=(True, False), strength=1)
def test_two_backwards_before_one_step(on_ranks, stage, bare, accumulation, overlap):
    for mine, theirs in on_ranks(2, two_losses, stage, bare, accumulation, overlap):
        assert_close(mine, theirs)


def two_forwards_two_backwards(stage: int, bare: bool) -> tuple[Weights, Weights]:
    """Both forwards of a window run before its first backward."""
    torch.manual_seed(5 + rank())
    engine = start(Stack(), settings(stage, 2, True))
    reference = Reference(twin(engine, Stack))
    for step in range(0, 2 * STEPS, 2):
        losses = [square(engine, step), square(engine, step + 1)]
        for loss in losses:
            loss.backward() if bare else engine.backward(loss)
            engine.step()
        ((square(reference.model, step) + square(reference.model, step + 1)) / 2).backward()
        reference.step()
    return weights_of(engine.module), weights_of(reference.model)


@covering(stage=FIRST_STAGES, bare=(False, True), strength=1)
def test_two_forwards_before_the_first_backward(on_ranks, stage, bare):
    for mine, theirs in on_ranks(2, two_forwards_two_backwards, stage, bare):
        assert_close(mine, theirs)


def gradients_of_inputs(stage: int, bare: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    engine = start(Stack(), settings(stage))
    plain = twin(engine, Stack)
    found = []
    for model in (engine, plain):
        x = data(0).requires_grad_()
        loss = model(x).square().mean()
        loss.backward() if bare or model is plain else engine.backward(loss)
        found.append(x.grad)
    return found[0], found[1]


@covering(stage=FIRST_STAGES, bare=(False, True), strength=1)
def test_inputs_get_their_gradients(on_ranks, stage, bare):
    for mine, theirs in on_ranks(2, gradients_of_inputs, stage, bare):
        torch.testing.assert_close(mine, theirs)


# -- a backward that raises --------------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    """Raises in backward while it is blown."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fuse.blown:
            Fuse.blown = False
            raise ArithmeticError("in the middle of backward")
        return gradient


class Fused(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](Fuse.apply(self.blocks[0](h))))


def going_on(stage: int, bare: bool, around: bool, overlap: bool, zeroed: bool, when: int) -> tuple[Weights, Weights]:
    """The second of three steps raises in backward and is tried again with the same data."""
    Fuse.blown = False
    torch.manual_seed(5 + rank())
    # Buckets this small launch every unit by itself.
    engine = start(Fused(), settings(stage, 1, overlap) | {"zero_optimization": {
        "stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 2}})  # fmt: skip
    reference = Reference(twin(engine, Fused))
    loss_of = around_the_root if around else square
    for step in range(STEPS):
        if step == when:
            Fuse.blown = True
            loss = loss_of(engine, step)
            with pytest.raises(ArithmeticError):
                loss.backward() if bare else engine.backward(loss)
            if zeroed:
                engine.zero_grad()
        loss = loss_of(engine, step)
        loss.backward() if bare else engine.backward(loss)
        engine.step()
        loss_of(reference.model, step).backward()
        reference.step()
    return weights_of(engine.module), weights_of(reference.model)


@covering(stage=FIRST_STAGES, bare=(False, True), overlap=(True, False), zeroed=(True, False), strength=1)
def test_training_goes_on_after_a_backward_that_raised(on_ranks, stage, bare, overlap, zeroed):
    for when in (0, 1):
        for mine, theirs in on_ranks(2, going_on, stage, bare, False, overlap, zeroed, when):
            assert_close(mine, theirs)


@covering(stage=FIRST_STAGES, bare=(False, True), strength=1)
def test_training_goes_on_where_the_roots_forward_never_runs(on_ranks, stage, bare):
    for mine, theirs in on_ranks(2, going_on, stage, bare, True, False, False, 1):
        assert_close(mine, theirs)


# -- evaluation, accumulation, construction ----------------------------------------------------------------------------


def evaluated(stage: int, overlap: bool, bare_module: bool) -> tuple[Weights, Weights, list[float], list[float]]:
    torch.manual_seed(5 + rank())
    engine = start(Stack(), settings(stage, 2, overlap))
    reference = Reference(twin(engine, Stack))
    mine, theirs = [], []
    for step in range(2 * STEPS):
        # Before the first step, inside a window, and right after a step that may still be in flight.
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                engine.eval()
                called = engine.module if bare_module else engine
                mine.append(square(called, 99).item())
                theirs.append(square(reference.model, 99).item())
                engine.train()
        engine.backward(square(engine, step))
        engine.step()
        (square(reference.model, step) / 2).backward()
        if step % 2:
            reference.step()
    return weights_of(engine.module), weights_of(reference.model), mine, theirs


@covering(stage=FIRST_STAGES, overlap=(True, False), bare_module=(False, True), strength=1)
def test_evaluation_between_steps(on_ranks, stage, overlap, bare_module):
    for mine, theirs, losses, expected in on_ranks(2, evaluated, stage, overlap, bare_module):
        assert_close(mine, theirs)
        assert losses == pytest.approx(expected, rel=1e-5)


def with_other_counts(stage: int, dtype: str) -> tuple[Weights, Weights]:
    torch.manual_seed(5 + rank())
    engine = start(Stack(), settings(stage, 1, **precision(dtype)))
    reference = Reference(twin(engine, lambda: Stack().to(torch.bfloat16 if dtype == "bf16" else torch.float32)))
    cast = engine.module.leave.weight.dtype
    step = 0
    for count in (1, 3, 2, 1):
        engine.set_train_batch_size(4 * dist.get_world_size() * count)
        assert engine.batch.accumulation == count
        for index in range(2 * count):
            out = engine(data(step).to(cast)).float().square().mean()
            engine.backward(out)
            engine.step()
            (reference.model(data(step).to(cast)).float().square().mean() / count).backward()
            if (index + 1) % count == 0:
                reference.step()
            step += 1
    assert engine.global_steps == 8
    return weights_of(engine.module), weights_of(reference.model)


@covering(stage=FIRST_STAGES, dtype=("fp32", "bf16"), world=(2, more(1)), strength=1)
def test_a_changed_accumulation_count(on_ranks, world, stage, dtype):
    for mine, theirs in on_ranks(world, with_other_counts, stage, dtype):
        if dtype == "fp32":
            assert_close(mine, theirs)
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=3e-2, atol=1e-2)


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 12, bias=False)
        self.leave.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


def from_meta(stage: int, own_optimizer: bool) -> tuple[Weights, Weights, Weights, bool]:
    torch.manual_seed(5 + rank())
    with torch.device("meta"):
        model = OnMeta()
    before = dict(model.named_parameters())
    optimizer = None
    if own_optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    engine = start(model, settings(stage), optimizer=optimizer)
    after = dict(engine.module.named_parameters())
    same = before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    first = weights_of(engine.module)
    reference = Reference(twin(engine, OnMeta))
    for step in range(STEPS):
        engine.backward(of_tokens(engine, step))
        engine.step()
        of_tokens(reference.model, step).backward()
        reference.step()
    return first, weights_of(engine.module), weights_of(reference.model), same


@covering(stage=FIRST_STAGES, own_optimizer=(False, True), strength=1)
def test_a_model_built_on_the_meta_device(on_ranks, stage, own_optimizer):
    results = on_ranks(2, from_meta, stage, own_optimizer)
    for first, mine, theirs, same in results:
        assert same
        assert first_difference(first, results[0][0]) is None
        assert first["embed.weight"].std().item() == pytest.approx(1, abs=0.3)
        assert torch.equal(first["blocks.0.norm.weight"], torch.ones(WIDTH))
        assert_close(mine, theirs)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def refused_meta(kind: str) -> str:
    with torch.device("meta"):
        model = NoReset() if kind == "parameter" else nn.BatchNorm1d(3)
        if kind == "buffer":
            model = nn.Module()
            model.add_module("linear", nn.Linear(3, 3))
            model.register_buffer("table", torch.zeros(3))
    with pytest.raises(ValueError, match="meta") as caught:
        start(model, config(0))
    return str(caught.value)


def test_meta_tensors_without_values_are_refused(on_ranks):
    assert "reset_parameters" in on_ranks(1, refused_meta, "parameter")[0]
    assert "buffer" in on_ranks(1, refused_meta, "buffer")[0]


# -- memory ------------------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    with contextlib.suppress(ReferenceError):
        return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))
    raise AssertionError


def settled_count(expected: int) -> int:
    """Threads of gloo let go of what they sent a moment after the wait: a leak never comes back to the count."""
    count = live_tensors()
    for _ in range(20 if expected else 0):
        if count <= expected:
            break
        count = live_tensors()
    return count


def at_rest(stage: int, dtype: str, accumulation: int, overlap: bool, bare: bool) -> list[tuple[Any, ...]]:
    """What is held after each step, the first two left out: they build the order and the buffers."""
    engine = start(net(), config(
        stage, gradient_accumulation_steps=accumulation, zero_optimization={"overlap_comm": overlap}, **precision(dtype)
    ))  # fmt: skip
    found = []
    for index in range(5):
        for x, y in batches(accumulation, seed=index):
            loss = engine(x, y)
            if bare:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        del loss, x, y
        engine.module  # noqa: B018 - whatever is in flight arrives
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert all(
            run.grad.slot is None and run.grad.shard.value is None for run in engine.state.schedule.trained_params()
        )
        if index >= 2:
            found.append((engine.model_memory.held_bytes(), settled_count(found[0][1] if found else 0)))
    planned, held = engine.model_memory.planned_bytes(), engine.model_memory.held_bytes()
    for part in ("parameters", "masters", "states"):
        assert getattr(planned, part) == getattr(held, part), part
    return found


@covering(
    stage=STAGES,
    dtype=("fp32", "bf16", "fp16"),
    accumulation=(1, 2),
    overlap=(True, False),
    bare=(False, True),
    strength=1,
)
def test_memory_returns_to_rest_after_each_step(on_ranks, stage, dtype, accumulation, overlap, bare):
    for found in on_ranks(2, at_rest, stage, dtype, accumulation, overlap, bare):
        assert all(held == found[0][0] for held, _ in found), found
        assert all(count <= found[0][1] for _, count in found), found


def after_life(stage: int, end: str, overlap: bool) -> tuple[int, int, list[str]]:
    train(start(net(), config(0)), 1)  # what is made once for all
    before = live_tensors()
    model = net()
    engine, optimizer, _, _ = onefold.initialize(
        model=model, config=config(stage, zero_optimization={"overlap_comm": overlap}, bf16={"enabled": True},
                                   log_level="warning")
    )  # fmt: skip
    train(engine, 2)
    held = {
        f"{unit.name}.{name}": weakref.ref(value)
        for unit in engine.state.schedule.units
        for run in unit.params
        for part in (run, run.store, *((run.grad, run.grad.shard) if run.trainable else ()))
        for name, value in [(type(part).__name__, part), *vars(part).items()]
        if value is part or (isinstance(value, torch.Tensor) and name != "full")
    }
    held["master"] = weakref.ref(engine.state.step.stores[0].master.tensor)
    held["state"] = weakref.ref(engine.state.step.stores[0].states["exp_avg"].tensor)
    if end == "destroy":
        engine.destroy()
        del optimizer
    else:
        del engine, optimizer
    gc.collect()
    # A model whose parameters rest as shards still has those, and can be made whole.
    kept = ("FlatParam", "ShardStore", "_master", "master") if stage == 3 else ()
    alive = [n for n, reference in held.items() if reference() is not None and n.rpartition(".")[2] not in kept]
    onefold.zero.gather_distributed_parameters(model)
    gc.collect()
    alive += [name for name, reference in held.items() if reference() is not None and name not in alive]
    with torch.no_grad():
        x, y = batches(1)[0]
        assert torch.isfinite(model(x, y))
    del model, x, y
    if end == "destroy":
        del engine
    return before, live_tensors(), alive


@covering(stage=FIRST_STAGES, end=("del", "destroy"), overlap=(True, False), strength=1)
def test_an_engine_that_is_gone_holds_nothing(on_ranks, stage, end, overlap):
    for before, after, alive in on_ranks(2, after_life, stage, end, overlap):
        assert alive == []
        assert after <= before


# -- several engines ---------------------------------------------------------------------------------------------------


def interleaved(stages: tuple[int, int], overlap: bool) -> tuple[list[Weights], list[Weights]]:
    """Two engines of different models take turns within each step."""
    torch.manual_seed(5 + rank())
    engines = [
        start(build(), settings(stage, 1, overlap))
        for build, stage in zip((Stack, TiedAcrossUnits), stages, strict=True)
    ]
    references = [Reference(twin(engines[0], Stack)), Reference(twin(engines[1], TiedAcrossUnits))]
    for step in range(STEPS):
        losses = [square(engine, step) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
        for reference in references:
            square(reference.model, step).backward()
            reference.step()
    return [weights_of(engine.module) for engine in engines], [weights_of(ref.model) for ref in references]


@covering(stages=((0, 2), (1, 1), (2, 2), (3, 3)), overlap=(True, False), strength=1)
def test_two_engines_in_one_process(on_ranks, stages, overlap):
    for mine, theirs in on_ranks(2, interleaved, stages, overlap):
        for weights, expected in zip(mine, theirs, strict=True):
            assert_close(weights, expected)


def chained(stage: int, overlap: bool) -> tuple[list[Weights], list[Weights]]:
    """One loss through two engines: the second one's backward is a bare one to the first."""
    torch.manual_seed(5 + rank())
    first, second = (start(Stack(), settings(stage, 1, overlap)) for _ in range(2))
    references = [Reference(twin(engine, Stack)) for engine in (first, second)]
    for step in range(STEPS):
        second.backward(second(first(data(step))).square().mean())
        first.step()
        second.step()
        references[1].model(references[0].model(data(step))).square().mean().backward()
        for reference in references:
            reference.step()
    return [weights_of(engine.module) for engine in (first, second)], [weights_of(ref.model) for ref in references]


@covering(stage=FIRST_STAGES, overlap=(True, False), strength=1)
def test_one_loss_through_two_engines(on_ranks, stage, overlap):
    for mine, theirs in on_ranks(2, chained, stage, overlap):
        for weights, expected in zip(mine, theirs, strict=True):
            assert_close(weights, expected)


def initialized_twice(stages: tuple[int, int], overlap: bool) -> tuple[Weights, Weights, str]:
    torch.manual_seed(5 + rank())
    model = Stack()
    first = start(model, settings(stages[0], 1, overlap))
    first.backward(square(first, 0))
    first.step()
    second = start(model, settings(stages[1], 1, overlap))
    reference = Reference(twin(second, Stack))
    for step in range(STEPS):
        second.backward(square(second, step))
        second.step()
        square(reference.model, step).backward()
        reference.step()
    with pytest.raises(RuntimeError) as caught:
        first.step()
    return weights_of(second.module), weights_of(reference.model), str(caught.value)


@covering(stages=((0, 0), (1, 2), (2, 0), (2, 2)), overlap=(True, False), strength=1)
def test_initialize_twice_on_one_model(on_ranks, stages, overlap):
    for mine, theirs, message in on_ranks(2, initialized_twice, stages, overlap):
        assert_close(mine, theirs)
        assert "optimizer" in message


# -- overflow and groups -----------------------------------------------------------------------------------------------


def overflowing(stage: int, bad_rank: int, accumulation: int) -> list[tuple[Weights, int, float, bool]]:
    """One rank's loss is infinite in the second step."""
    engine = start(net(), config(
        stage, gradient_accumulation_steps=accumulation, 
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    ))  # fmt: skip
    found = []
    for index, (x, y) in enumerate(batches(3 * accumulation)):
        loss = engine(x, y)
        if index == accumulation and rank() == bad_rank:
            loss = loss * 1e30
        engine.backward(loss)
        engine.step()
        if engine.state.window.micro_steps % accumulation == 0:
            found.append(
                (
                    weights_of(engine.module),
                    engine.skipped_steps,
                    engine.optimizer.loss_scale,
                    engine.was_step_applied(),
                )
            )
    return found


@covering(stage=STAGES, bad_rank=(0, 1), accumulation=(1, 2), strength=1)
def test_an_overflow_on_one_rank_skips_the_step_on_all(on_ranks, stage, bad_rank, accumulation):
    results = on_ranks(2, overflowing, stage, bad_rank, accumulation)
    for found in results:
        assert [(skipped, scale, applied) for _, skipped, scale, applied in found] == [
            (0, 256.0, True),
            (1, 128.0, False),
            (1, 128.0, True),
        ]
        assert first_difference(found[1][0], found[0][0]) is None
        assert not equal(found[2][0], found[1][0])
        assert all(torch.isfinite(weight).all() for weight in found[2][0].values())
        assert first_difference(found[2][0], results[0][2][0]) is None


class Weighed(nn.Module):
    """Its gradient is what it is called with. Two shards of 2,048 elements on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def overflow_in_one_shard(stage: int, element: int) -> tuple[list[bool], bool]:
    """In the second step one element of every rank's gradient is infinite, so that one rank's shard overflows."""
    engine = start(Weighed(), config(stage, fp16={"enabled": True, "initial_scale_power": 4}))
    assert engine.state.schedule.units[0].trained_params[0].layout.shard_size == 2048
    applied = []
    for step in range(3):
        gradient = torch.full((64, 64), 0.5).half()
        if step == 1:
            gradient.view(-1)[element] = torch.inf
        engine.backward(engine(gradient))
        engine.step()
        applied.append(engine.was_step_applied())
    return applied, bool(torch.isfinite(weights_of(engine.module)["weight"]).all())


@covering(stage=STAGES, element=(0, 4095), strength=1)
def test_an_overflow_in_one_ranks_shard_skips_the_step_on_all(on_ranks, stage, element):
    assert on_ranks(2, overflow_in_one_shard, stage, element) == [([True, False, True], True)] * 2


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms do not decay; one block learns faster."""
    fast = list(model.blocks[1].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in fast)]
    return [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0, "lr": 0.01},
        {"params": fast, "lr": 0.2, "momentum": 0.5},
    ]


def with_groups(stage: int, how: str) -> tuple[Weights, Weights, list[float]]:
    torch.manual_seed(5 + rank())
    model = Stack()
    given: dict[str, Any] = {"model_parameters": grouped(model)}
    if how == "instance":
        optimizer = torch.optim.SGD(grouped(model), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        given = {"optimizer": optimizer}
    engine = start(model, settings(stage), **given)
    plain = twin(engine, Stack)
    reference = Reference(plain, grouped(plain))
    for step in range(STEPS):
        engine.backward(square(engine, step))
        engine.step()
        square(plain, step).backward()
        reference.step()
    return weights_of(engine.module), weights_of(plain), engine.get_lr()


@covering(stage=FIRST_STAGES, how=("model_parameters", "instance"), world=(2, more(1), more(3)), strength=1)
def test_groups_with_their_own_decay_and_rate(on_ranks, world, stage, how):
    for mine, theirs, rates in on_ranks(world, with_groups, stage, how):
        assert_close(mine, theirs)
        assert rates == [RATE, 0.01, 0.2]


# -- what is seen from outside -----------------------------------------------------------------------------------------


def seen_right_after_a_step(how: str) -> tuple[bool, bool, torch.Tensor, torch.Tensor]:
    """With gathers in flight, someone reads the head's weight without going through the engine."""
    torch.manual_seed(5 + rank())
    model = Stack()
    engine = start(model, settings(2, 1, True))
    owner = next(
        unit
        for unit in engine.state.schedule.units
        if any(p is model.leave.weight for r in unit.params for p in r.parameters)
    )
    for step in range(2):
        engine.backward(square(engine, step))
        engine.step()
    in_flight = any(unit.is_updating for unit in engine.state.schedule.units)
    read = {
        "attribute": lambda: model.leave.weight,
        "through the engine": lambda: engine.leave.weight,
        "parameters()": lambda: list(model.parameters())[-1],
        "get_parameter": lambda: model.get_parameter("leave.weight"),
        "state_dict": lambda: model.state_dict()["leave.weight"],
        "state_dict of a submodule": lambda: model.leave.state_dict()["weight"],
        "deepcopy": lambda: copy.deepcopy(model).leave.weight,
        "deepcopy of a submodule": lambda: copy.deepcopy(model.leave).weight,
        "functional_call": lambda: torch.func.functional_call(model.leave, {}, (torch.eye(WIDTH),)).t(),
    }[how]
    value = read().detach().clone()
    arrived = not owner.is_updating
    return in_flight, arrived, value, engine.module.leave.weight.detach().clone()


@pytest.mark.parametrize("how", [
    "attribute", "through the engine", "parameters()", "get_parameter", "state_dict", "state_dict of a submodule",
    "deepcopy", "deepcopy of a submodule", "functional_call",
])  # fmt: skip
def test_a_step_in_flight_is_finished_before_anyone_sees_it(on_ranks, how):
    results = on_ranks(2, seen_right_after_a_step, how)
    for in_flight, arrived, value, expected in results:
        assert in_flight
        assert arrived
        assert torch.equal(value, expected)
        assert torch.equal(value, results[0][2])


def arrived_by_reading(how: str) -> tuple[bool, str | None]:
    """The same without the white look: reading must itself have finished the gather."""
    torch.manual_seed(5 + rank())
    model = Stack()
    engine = start(model, settings(1, 1, True))
    engine.backward(square(engine, 0))
    engine.step()
    copied = copy.deepcopy(model) if how == "model" else copy.deepcopy(model.blocks)
    units = [unit for unit in engine.state.schedule.units if how == "model" or unit.name.startswith("blocks")]
    arrived = not any(unit.is_updating for unit in units)
    mine = model.state_dict() if how == "model" else model.blocks.state_dict()
    return arrived, first_difference(dict(copied.state_dict()), dict(mine))


@pytest.mark.parametrize("how", ["model", "part"])
def test_a_copy_is_made_of_whole_parameters(on_ranks, how):
    assert on_ranks(2, arrived_by_reading, how) == [(True, None)] * 2


def beside_a_copy(stage: int, overlap: bool, copies: bool) -> tuple[Weights, int, bool]:
    """A copy of the module trains in plain torch, also inside the engine's accumulation window."""
    torch.manual_seed(5 + rank())
    engine = start(Stack(), settings(stage, 2, overlap))
    moved = True
    traffic = 0
    for step in range(2 * STEPS):
        engine.backward(square(engine, step))
        if copies:
            with onefold.zero.GatheredParameters(engine.module.parameters()):
                other = copy.deepcopy(engine.module)
            theirs = weights_of(engine.module)
            before = sum(row.calls for row in engine.ledger.rows())
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            square(other, step).backward()
            moved = moved and all(parameter.grad is not None for parameter in other.parameters())
            optimizer.step()
            moved = moved and not equal(dict(other.state_dict()), theirs)
            traffic += sum(row.calls for row in engine.ledger.rows()) - before
        engine.step()
    return weights_of(engine.module), traffic, moved


@covering(stage=FIRST_STAGES, overlap=(True, False), strength=1)
def test_a_copy_of_the_module_is_plain_torch(on_ranks, stage, overlap):
    with_copies = on_ranks(2, beside_a_copy, stage, overlap, True)
    without = on_ranks(2, beside_a_copy, stage, overlap, False)
    for (mine, traffic, moved), (expected, _, _) in zip(with_copies, without, strict=True):
        assert moved
        assert traffic == 0, "the copy's training moved the engine's bytes"
        assert first_difference(mine, expected) is None
