"""Offload: bytes and traffic equal the plan's, and whatever a user does gives the bits of an engine without it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Net, batches, config, more, net, precision, rank, start, train, weights_of
from test_offload import CPU, nvme, variants
from torch import nn

import onefold
from onefold.config import ConfigError
from onefold.optim.host import HostStep
from onefold.plan import Tier
from onefold.tier.lower import read
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

# So that every unit is gathered for each use, from wherever it rests.
NOTHING_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
FEW = ["2 cpu", "3 cpu cpu", "3 disk disk"]
OTHERS = ["1 cpu", "3 cpu", "2 half", "3 half cpu", "3 cpu disk", "1 disk", "2 disk", "3 disk cpu", "3 params cpu"]
ALL = [FEW, more(OTHERS)]
ADAM = ("exp_avg", "exp_avg_sq")


# -- running one case in many tiers -----------------------------------------------------------------------------


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through containers."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


class Maker:
    """`make(model, **settings)` is an engine in one tier; `tier` its name, None on the device."""

    def __init__(self, folder: str, tier: str | None) -> None:
        self.tier = tier
        self.stage, self.keys = variants(folder)[tier] if tier is not None else (2, {})
        self.made: list[onefold.Engine] = []

    def __call__(self, model: nn.Module, **settings: Any) -> onefold.Engine:
        options = {name: settings.pop(name) for name in ("optimizer_instance", "groups") if name in settings}
        zero = {**self.keys, "overlap_comm": True, **settings.pop("zero_optimization", {})}
        given: dict[str, Any] = {}
        if "optimizer_instance" in options:
            given["optimizer"] = options["optimizer_instance"]
        if "groups" in options:
            given["model_parameters"] = options["groups"]
        built = config(self.stage, zero_optimization=zero, **settings)
        if given.get("optimizer") is not None:
            del built["optimizer"]
        self.made.append(start(model, built, **given))
        return self.made[-1]


def over_tiers(case: Callable[..., Any], folder: str, names: list[str], args: tuple[Any, ...]) -> dict[str, Any]:
    own = Path(folder, f"rank{rank()}")
    found = {}
    for name in (None, *names):
        make = Maker(str(own), name)
        found[name or "device"] = case(make, *args)
        for engine in make.made:
            engine.destroy()
        assert not files_in(own), (name, files_in(own))
    return found


def equal_in_every_tier(
    on_ranks: Any, world: int, case: Callable[..., Any], folder: Path, names: list[str], *args: Any
) -> list[dict[str, Any]]:
    results = on_ranks(world, over_tiers, case, str(folder), names, args)
    for result in results:
        for name in names:
            assert same(result["device"], result[name]), name
    return results


def files_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def everything_of(engine: onefold.Engine) -> list[Any]:
    """Masters and states of all trained parameters, whole, and all weights."""
    found: list[Any] = [weights_of(engine.module)]
    for parameter in engine.module.parameters():
        found.append(safe_get_full_fp32_param(parameter))
        found += [safe_get_full_optimizer_state(parameter, key) for key in ADAM]
    return found


def below(engine: onefold.Engine) -> list[torch.Tensor]:
    """What this rank keeps of masters and states, as it is kept."""
    optimizer = engine.optimizer
    assert optimizer is not None
    optimizer.wait_for_host()
    pieces = [optimizer.piece_of(run) for unit in engine._units for run in unit.trained]
    kept = [flat for piece in pieces for flat in (piece.master, *piece.states.values())]
    return [read(flat).clone() for flat in kept]


def one_step(engine: onefold.Engine, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    return loss.item()


@contextmanager
def host_held() -> Iterator[threading.Event]:
    """The host's step waits until the event is set."""
    go, steps = threading.Event(), HostStep._step

    def held(self: HostStep, *args: Any) -> Any:
        assert go.wait(60)
        return steps(self, *args)

    with mock.patch.object(HostStep, "_step", held):
        try:
            yield go
        finally:
            go.set()


# -- bytes and traffic ------------------------------------------------------------------------------------------


def measure(folder: str, names: list[str], dtype: str, accumulation: int) -> dict[str, Any]:
    found = {}
    for name in names:
        stage, keys = variants(str(Path(folder, f"rank{rank()}")))[name]
        settings = config(
            stage,
            zero_optimization={**keys, **NOTHING_KEPT},
            gradient_accumulation_steps=accumulation,
            **precision(dtype),
        )
        engine = start(net(), settings)
        gradients, rest, traffic = [], [], None
        for number in range(4):
            before = engine.ledger.copy()
            for x, y in batches(accumulation, seed=number):
                engine.backward(engine(x, y))
                if engine.is_gradient_accumulation_boundary():
                    gradients.append({tier: engine.held_bytes(tier).gradients for tier in Tier})
                engine.step()
            engine.settle()
            since = engine.ledger.since(before)
            traffic = {way: since.bytes(way) for way in ("down", "up", "read", "write")}
            rest.append({tier: engine.held_bytes(tier) for tier in Tier})
        crossing = engine.planned_crossing()
        runs = [run for unit in engine._units for run in unit.trained if run.rest.offloads_states]
        found[name] = {
            "planned": {tier: engine.planned_bytes(tier) for tier in Tier},
            "gradients": gradients,
            "rest": rest,
            "traffic": traffic,
            "crossing": {
                "down": crossing.down,
                "up": crossing.up,
                "read": crossing.read,
                "write": crossing.written,
            },
            "offloaded": sum(run.layout.shard_size for run in runs),
        }
        engine.destroy()
    return found


MEASURED = [
    (1, "bf16", 1, False),
    (2, "bf16", 2, False),
    (2, "fp32", 1, False),
    (1, "fp32", 1, True),
    (1, "fp32", 2, True),
    (1, "bf16", 2, True),
    (1, "fp16", 1, True),
    (2, "bf16", 1, True),
    (2, "fp32", 2, True),
    (2, "fp16", 2, True),
]
CASES = [
    more(world, dtype, accumulation) if slow else (world, dtype, accumulation)
    for world, dtype, accumulation, slow in MEASURED
]
VARIANTS = [*FEW, *OTHERS]


@pytest.fixture(scope="module")
def measured(on_ranks, tmp_path_factory):
    """One run of all variants serves bytes and traffic."""
    kept: dict[Any, Any] = {}

    def get(world: int, dtype: str, accumulation: int) -> list[dict[str, Any]]:
        key = world, dtype, accumulation
        if key not in kept:
            kept[key] = on_ranks(world, measure, str(tmp_path_factory.mktemp("m")), VARIANTS, dtype, accumulation)
        return kept[key]

    return get


@pytest.mark.parametrize(("world", "dtype", "accumulation"), CASES)
def test_held_bytes_below_the_device_equal_the_plan(measured, world, dtype, accumulation):
    wrong = []
    for got in measured(world, dtype, accumulation):
        for name, seen in got.items():
            for tier in (Tier.HOST, Tier.NVME):
                planned = seen["planned"][tier]
                wrong += [
                    (name, tier, field, getattr(held[tier], field), getattr(planned, field))
                    for held in seen["rest"]
                    for field in ("parameters", "masters", "states")
                    if getattr(held[tier], field) != getattr(planned, field)
                ]
                wrong += [
                    (name, tier, "gradients", held[tier], planned.gradients)
                    for held in seen["gradients"]
                    if held[tier] != planned.gradients
                ]
    assert wrong == []


@pytest.mark.parametrize(("world", "dtype", "accumulation"), CASES)
def test_held_bytes_left_on_the_device_equal_the_plan(measured, world, dtype, accumulation):
    wrong = []
    for got in measured(world, dtype, accumulation):
        for name, seen in got.items():
            planned = seen["planned"][Tier.DEVICE]
            wrong += [
                (name, field, getattr(held[Tier.DEVICE], field), getattr(planned, field))
                for held in seen["rest"]
                for field in ("parameters", "masters", "states")
                if getattr(held[Tier.DEVICE], field) != getattr(planned, field)
            ]
            wrong += [
                (name, "gradients", held[Tier.DEVICE], planned.gradients)
                for held in seen["gradients"]
                if held[Tier.DEVICE] != planned.gradients
            ]
    assert wrong == []


@pytest.mark.parametrize(("world", "dtype", "accumulation"), CASES)
def test_the_host_keeps_14_bytes_a_parameter_or_16_where_sums_are_wide(measured, world, dtype, accumulation):
    limit = 14 if (world, accumulation) == (1, 1) and dtype != "fp32" else 16
    for got in measured(world, dtype, accumulation):
        for name in ("1 cpu", "2 cpu", "3 cpu", "2 half"):
            held = got[name]["rest"][-1][Tier.HOST]
            total = held.parameters + got[name]["gradients"][-1][Tier.HOST] + held.masters + held.states
            assert got[name]["offloaded"]
            assert total == limit * got[name]["offloaded"], name


@pytest.mark.parametrize(("world", "dtype", "accumulation"), CASES)
def test_bytes_that_cross_in_a_step_equal_the_plan(measured, world, dtype, accumulation):
    wrong = []
    for got in measured(world, dtype, accumulation):
        for name, seen in got.items():
            if seen["traffic"] != seen["crossing"]:
                wrong.append((name, "counted", seen["traffic"], "planned", seen["crossing"]))
    assert wrong == []
