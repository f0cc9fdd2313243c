"""Small models and a training loop that tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.comm import local_device
from onefold.runtime import Unit, unsharded

VOCABULARY = 31
# Of a checkpoint that no engine has written.
NO_STATE = {
    "optimizer": None,
    "lr_scheduler": None,
    "loss_scale": None,
    "counters": dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0),
    "client_state": {},
    "config": None,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: sizes that divide by nothing in particular."""

    def __init__(self, width: int = 21, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.embed.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), y.flatten())


def more(*values: Any) -> Any:
    """One more of the same cases, for `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """Some of many like cases; the others are for `make test-slow`."""
    return [value if number % every == 0 else more(value) for number, value in enumerate(values)]


def table(names: Iterable[str], check: Callable[..., list[str]], *args: Any) -> list[str]:
    """Run `check(name, *args)` for each name, in one call on the ranks, and return what is wrong with any of them."""
    problems = []
    for name in names:
        try:
            problems += check(name, *args)
        except BaseException as error:
            error.add_note(f"This was {name!r}.")
            raise
    return problems


def flip(file: Path, offset: int) -> None:
    """Damage a byte."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x10]))


def rank() -> int:
    return dist.get_rank()


def config(stage: int, **more: Any) -> dict[str, Any]:
    """A config that says nothing it need not; sections in `more` are merged."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        # Parameters this small would stay whole: shard them all the same.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key != "optimizer":
            base[key] = {**base[key], **value}
        else:
            base[key] = value
    return base


def precision(name: str) -> dict[str, Any]:
    # A scale that small test losses survive, and that overflows nothing.
    return {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    }[name]


def tiers_of(folder: str) -> dict[str, dict[str, Any]]:
    """Where states and parameters may rest: `zero_optimization` by a name. Disks are in the folder."""
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "device": {"stage": 2},
        "host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "half": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "host and parameters": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}
        },
        "disk": {"stage": 3, "offload_optimizer": {**disk, "buffer_size": 4096}},
        "all on disk": {"stage": 3, "offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}},
    }  # fmt: skip


def start(model: nn.Module, settings: dict[str, Any], **more: Any) -> onefold.Engine:
    # CPUs without bf16 units say so at length for every kind of matrix product.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return onefold.initialize(model=model, config={"log_level": "warning", **settings}, **more)[0]


def batches(num: int, size: int = 4, length: int = 7, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Different on every rank, the same in every run; on the rank's device."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * rank() + 3)
    found = []
    for _ in range(num):
        x = torch.randint(0, VOCABULARY, (size, length), generator=generator).to(local_device())
        found.append((x, x.roll(-1, 1)))
    return found


@dataclass
class Trace:
    """What a run is compared by."""

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, torch.Tensor]

    def same(self, other: Trace) -> bool:
        return first_difference(self, other) is None


def first_difference(got: Any, expected: Any, where: str = "") -> str | None:
    """Where two runs part, in words: the first step, name or element that is not the same to the bit, with both values.
    None where they are the same. Takes traces, and dicts and lists of tensors and plain values.

    A case returns this from its ranks, and its test asserts that it is None: a failure then names what differs.
    """
    if isinstance(got, Trace) and isinstance(expected, Trace):
        return (
            first_difference(_by_step(got), _by_step(expected), where)
            or first_difference(got.losses, expected.losses, f"{where}losses")
            or first_difference(got.norms, expected.norms, f"{where}norms")
            or first_difference(got.weights, expected.weights, f"{where}weights ")
        )
    if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        return _first_element(got, expected, where)
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        return f"{where}: {type(got).__name__}, expected {type(expected).__name__}"
    if isinstance(got, dict) and isinstance(expected, dict):
        if missing := [name for name in (*expected, *got) if (name in got) != (name in expected)]:
            return f"{where}{missing[0]}: is only in {'what was got' if missing[0] in got else 'what was expected'}"
        return _first_of(first_difference(got[name], expected[name], f"{where}{name}") for name in expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{where}: {len(got)} of them, {len(expected)} were expected"
        pairs = enumerate(zip(got, expected, strict=True))
        return _first_of(first_difference(one, other, f"{where}[{index}]") for index, (one, other) in pairs)
    return None if got == expected else f"{where}: {got!r}, expected {expected!r}"


# How far losses may be apart, relatively, and weights in the mean: where 16-bit sums round a small gradient to another
# sign, Adam moves one weight the other way.
ROUNDING = {"fp32": (1e-4, 1e-5), "bf16": (3e-2, 3e-3), "fp16": (5e-3, 3e-4)}


def assert_alike(found: Sequence[Trace], expected: Sequence[Trace], *, exact: bool, dtype: str = "fp32") -> None:
    """The runs of all ranks beside those of another job: the same to the bit, or as far as its dtype rounds."""
    of_losses, of_weights = ROUNDING[dtype]
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if exact:
            told = first_difference(got, wanted)
            assert told is None, f"rank {number}: {told}"
            continue
        assert got.losses == pytest.approx(wanted.losses, rel=of_losses), f"rank {number}"
        for name, weight in wanted.weights.items():
            apart = (got.weights[name].float() - weight.float()).abs().mean().item()
            assert apart < of_weights, f"rank {number}: {name}: {apart} apart in the mean"


def _by_step(trace: Trace) -> dict[str, Any]:
    """In the order in which a run meets them: what differs first is nearest to the cause."""
    found: dict[str, Any] = {}
    for step, (loss, norm) in enumerate(zip(trace.losses, trace.norms, strict=False)):
        found |= {f"step {step}: loss": loss, f"step {step}: norm": norm}
    return found


def _first_element(got: torch.Tensor, expected: torch.Tensor, where: str) -> str | None:
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in (got, expected)]
    if kinds[0] != kinds[1]:
        return f"{where}: {kinds[0][0]} {kinds[0][1]}, expected {kinds[1][0]} {kinds[1][1]}"
    if torch.equal(got, expected):
        return None
    unlike = (got != expected).flatten().nonzero().flatten()
    first = int(unlike[0])
    values = got.flatten()[first].item(), expected.flatten()[first].item()
    return f"{where}[{first}]: {values[0]!r}, expected {values[1]!r}; {len(unlike)} of {got.numel()} elements differ"


def _first_of(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def train(engine: onefold.Engine, num_micro_steps: int = 4, seed: int = 0) -> Trace:
    losses, norms = [], []
    for x, y in batches(num_micro_steps, seed=seed):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return Trace(losses, norms, {name: weight.cpu() for name, weight in weights_of(engine.module).items()})


@contextmanager
def launched_gathers() -> Iterator[list[str]]:
    """The names of the units whose all-gathers are launched meanwhile."""
    found: list[str] = []
    launch = Unit.launch_all_gather

    def count(units: Any, **options: Any) -> None:
        found.extend(unit.name for unit in units)
        launch(units, **options)

    Unit.launch_all_gather = staticmethod(count)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Unit.launch_all_gather = staticmethod(launch)  # type: ignore[method-assign]


def train_beside(
    engine: onefold.Engine, plain: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The engine and plain torch on the same batches, the same on every rank; the weights of both."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        x = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
        engine.backward(engine(x, x))
        engine.step()
        plain(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(engine.module), weights_of(plain)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with unsharded(model.parameters()):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def net(seed: int = 5, **shape: Any) -> Net:
    """Ranks build different weights on purpose: initialize must take rank 0's."""
    torch.manual_seed(seed + rank())
    return Net(**shape)
