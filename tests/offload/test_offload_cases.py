"""Offload: bytes and traffic equal the plan's, and whatever a user does gives the bits of an engine without it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from covering import covering
from models import Net, batches, config, first_difference, more, net, precision, rank, start, train, weights_of
from test_offload import CPU, nvme, variants
from torch import nn

import onefold
from onefold.config import ConfigError
from onefold.optim.offloaded_step import OffloadedStep
from onefold.plan import Tier
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
FEWER = [["2 cpu", "3 disk disk"], more(["3 cpu cpu", *OTHERS])]
AHEAD = [["2 cpu", "3 deep"], more(["3 cpu cpu", "3 disk disk", *OTHERS])]
ADAM = ("exp_avg", "exp_avg_sq")


# -- running one case in many tiers -----------------------------------------------------------------------------


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through containers."""
    return first_difference(left, right) is None


class Maker:
    """`make(model, **settings)` is an engine in one tier; `tier` its name, None on the device."""

    def __init__(self, folder: str, tier: str | None) -> None:
        self.tier = tier
        # Everything on disk, and always about to be read ahead.
        deep = 3, {"offload_optimizer": nvme(folder), "offload_param": nvme(folder), **NOTHING_KEPT}
        self.stage, self.keys = {**variants(folder), "3 deep": deep}[tier] if tier is not None else (2, {})
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
            assert first_difference(result[name], result["device"]) is None, name
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
    engine.state.step.wait_for_host()
    stores = engine.state.step.stores
    kept = [buffer for store in stores for buffer in (store.master, *store.states.values())]
    return [buffer.fetch().clone() for buffer in kept]


def one_step(engine: onefold.Engine, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    return loss.item()


@contextmanager
def host_held() -> Iterator[threading.Event]:
    """The host's step waits until the event is set."""
    go, steps = threading.Event(), OffloadedStep._step

    def held(self: OffloadedStep, *args: Any) -> Any:
        assert go.wait(60)
        return steps(self, *args)

    with mock.patch.object(OffloadedStep, "_step", held):
        try:
            yield go
        finally:
            go.set()


# -- bytes and traffic ------------------------------------------------------------------------------------------


def measure(folder: str, names: list[str], dtype: str, accumulation: int, more_of_config: Any = None) -> dict[str, Any]:
    found = {}
    for name in names:
        stage, keys = variants(str(Path(folder, f"rank{rank()}")))[name]
        settings = config(
            stage,
            zero_optimization={**keys, **NOTHING_KEPT},
            gradient_accumulation_steps=accumulation,
            **{**precision(dtype), **(more_of_config or {})},
        )
        engine = start(net(), settings)
        gradients, rest, traffic = [], [], None
        for number in range(4):
            before = engine.ledger.copy()
            for x, y in batches(accumulation, seed=number):
                engine.backward(engine(x, y))
                if engine.is_gradient_accumulation_boundary():
                    gradients.append({tier: engine.model_memory.held_bytes(tier).gradients for tier in Tier})
                engine.step()
            engine.wait_for_step()
            engine.state.step.wait_for_host()  # also for a step whose weights are used one step later
            since = engine.ledger.since(before)
            traffic = {way: since.bytes(way) for way in ("down", "up", "read", "write")}
            rest.append({tier: engine.model_memory.held_bytes(tier) for tier in Tier})
        crossing = engine.model_memory.planned_offload_traffic()
        runs = [
            run
            for unit in engine.state.schedule.units
            for run in unit.trained_params
            if run.spec.residency.offloads_states
        ]
        found[name] = {
            "planned": {tier: engine.model_memory.planned_bytes(tier) for tier in Tier},
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
    (1, "bf16", 1, True),
    (2, "bf16", 2, False),
    (2, "fp32", 1, True),
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


@pytest.mark.parametrize(("dtype", "own"), [
    more("bf16", {}), ("bf16", {"master_dtype": "bf16_int16"}), more("bf16", {"master_dtype": "bf16"}),
    more("fp32", {}),
])  # fmt: skip
def test_bytes_that_cross_in_a_delayed_step_equal_the_plan(on_ranks, tmp_path, dtype, own):
    extra = {"onefold": {"delayed_host_step": True, **own}}
    (found,) = on_ranks(1, measure, str(tmp_path), VARIANTS, dtype, 1, extra)
    for name, seen in found.items():
        assert seen["traffic"] == seen["crossing"], name


# -- steps that are skipped, evaluated between, counted anew ----------------------------------------------------


def overflowing(make: Maker) -> Any:
    """fp16 with a scale that the first steps cannot have."""
    scale = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    engine = make(net(), gradient_clipping=0.3, **scale)
    losses, skipped = [], []
    for x, y in batches(14):
        before, weights = below(engine), weights_of(engine.module)
        traffic = engine.ledger.copy()
        losses.append(one_step(engine, x, y))
        skipped.append(not engine.was_step_applied())
        written, after = engine.ledger.since(traffic).bytes("write"), weights_of(engine.module)
        if skipped[-1]:
            assert written == 0
            assert first_difference(below(engine), before) is None
        assert same(weights, after) is skipped[-1]
    assert any(skipped)
    assert not all(skipped)
    return losses, skipped, engine.optimizer.loss_scale, engine.skipped_steps, everything_of(engine)


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", FEWER)
def test_an_overflow_skips_the_step_on_all_ranks_and_changes_nothing_below(on_ranks, tmp_path, world, names):
    results = equal_in_every_tier(on_ranks, world, overflowing, tmp_path, names)
    assert len({str(result[name][1]) for result in results for name in names}) == 1


def evaluating(make: Maker, dtype: str) -> Any:
    engine = make(net(), gradient_accumulation_steps=2, **precision(dtype))
    found = []

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            found.extend(engine(x, y).item() for x, y in batches(2, seed=9))
        engine.train()

    evaluate()
    for x, y in batches(4):
        loss = engine(x, y)
        evaluate()  # between a forward and its backward
        engine.backward(loss)
        evaluate()
        engine.step()
        evaluate()  # while the host steps
        found.append(loss.item())
    return found, everything_of(engine)


@covering(names=(FEW, more(OTHERS)), dtype=("bf16", more("fp32")), world=(1, more(2)), strength=1)
def test_evaluation_between_any_two_calls_disturbs_nothing(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, evaluating, tmp_path, names, dtype)


def counting_anew(make: Maker, dtype: str) -> Any:
    engine = make(net(), **precision(dtype))
    found = []
    for accumulation in (1, 3, 1, 2):
        engine.set_gradient_accumulation_steps(accumulation)
        trace = train(engine, 2 * accumulation, seed=accumulation)
        found.append((trace.losses, trace.norms, trace.weights))
    return found, everything_of(engine)


@covering(names=(FEW, more(OTHERS)), dtype=("bf16", more("fp32")), world=(2, more(1)), strength=1)
def test_the_accumulation_count_may_change_at_run_time(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, counting_anew, tmp_path, names, dtype)


def twice_before_a_step(make: Maker) -> Any:
    engine = make(net(), **precision("bf16"))
    norms = []
    for number in range(2):
        for x, y in batches(2, seed=number):
            engine.backward(engine(x, y))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, everything_of(engine)


@covering(tier=("2 cpu", more("3 disk disk")))
def test_a_second_backward_before_the_step_adds_to_the_first(on_ranks, tmp_path, tier):
    """One rank plans 16-bit gradients for one micro-step; the second one widens the sum."""
    equal_in_every_tier(on_ranks, 1, twice_before_a_step, tmp_path, [tier])


def widened(folder: str, tier: str) -> list[tuple[int, int]]:
    make = Maker(str(Path(folder, f"rank{rank()}")), tier)
    engine = make(net(), **precision("bf16"))
    found = []
    for accumulation in (1, 2, 2):
        engine.set_gradient_accumulation_steps(accumulation)
        for x, y in batches(accumulation):
            engine.backward(engine(x, y))
            if engine.is_gradient_accumulation_boundary():
                found.append(
                    (
                        engine.model_memory.held_bytes(Tier.HOST).gradients,
                        engine.model_memory.planned_bytes(Tier.HOST).gradients,
                    )
                )
            engine.step()
    engine.destroy()
    return found


@covering(tier=("2 cpu", more("3 disk disk")))
def test_a_new_accumulation_count_widens_the_sum_on_the_host_once(on_ranks, tmp_path, tier):
    narrow, wide, still = on_ranks(1, widened, str(tmp_path), tier)[0]
    assert narrow[0] * 2 == wide[0] == still[0]
    assert all(held == planned for held, planned in (narrow, wide, still))


# -- parameters that are unused, frozen, tied -------------------------------------------------------------------


class Branches(nn.Module):
    """Ranks use different blocks, and one block nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(depth=4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, skipped: list[int]) -> torch.Tensor:
        h = self.net.embed(x)
        for number, block in enumerate(self.net.blocks):
            if number not in skipped:
                h = block(h)
        return nn.functional.cross_entropy(self.net.head(h).float().flatten(0, 1), y.flatten())


def leaving_out(make: Maker) -> Any:
    torch.manual_seed(5 + rank())
    engine = make(Branches(), gradient_accumulation_steps=2, **precision("bf16"))
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        loss = engine(x, y, [2, (number + rank()) % 2])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, everything_of(engine)


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", FEWER)
def test_unused_parameters_count_as_zero(on_ranks, tmp_path, world, names):
    equal_in_every_tier(on_ranks, world, leaving_out, tmp_path, names)


def freezing(make: Maker, dtype: str) -> Any:
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1" not in name and "embed" not in name)
    engine = make(model, **precision(dtype))
    frozen = [run for unit in engine.state.schedule.units for run in unit.params if not run.trainable]
    assert frozen
    wanted = {
        "none": Tier.DEVICE,
        "cpu": Tier.HOST,
        "nvme": Tier.NVME,
    }[make.keys.get("offload_param", {}).get("device", "none")]
    assert {run.spec.residency.parameters for run in frozen} == {wanted}
    assert {run.spec.residency.states for run in frozen} == {Tier.DEVICE}
    trace = train(engine, 4)
    engine.wait_for_step()
    for tier in Tier:
        assert engine.model_memory.held_bytes(tier).parameters == engine.model_memory.planned_bytes(tier).parameters
    return trace.losses, trace.norms, trace.weights


@covering(names=(FEW, more(OTHERS)), dtype=("bf16", more("fp32")), world=(2, more(1)), strength=1)
def test_frozen_parameters_rest_where_parameters_are_offloaded_to(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, freezing, tmp_path, names, dtype)


def freezing_later(make: Maker, optimizer: str) -> Any:
    """Parameters that are frozen after some steps stay as they are, and move again when they are trained again."""
    params = {"lr": 0.02, "adam_lr": 1e-3} if optimizer == "Muon" else {"lr": 1e-2}
    engine = make(net(), optimizer={"type": optimizer, "params": params}, **precision("bf16"))
    losses = train(engine, 2).losses
    model = engine.module
    some = [model.blocks[0].up.weight, model.blocks[1].down.weight, model.head.weight]
    for parameter in some:
        parameter.requires_grad_(False)
    before = weights_of(model)
    losses += train(engine, 2).losses
    after = weights_of(model)
    for name in ("blocks.0.up.weight", "blocks.1.down.weight", "head.weight"):
        assert torch.equal(before[name], after[name]), f"{make.tier}: {name} has changed"
    for parameter in some:
        parameter.requires_grad_(True)
    return losses, train(engine, 2).losses, everything_of(engine) if optimizer == "AdamW" else weights_of(model)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_parameters_may_be_frozen_for_a_while(on_ranks, tmp_path, world, names, optimizer):
    equal_in_every_tier(on_ranks, world, freezing_later, tmp_path, names, optimizer)


class WithNothing(nn.Module):
    """A block beside a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        for block in self.net.blocks:
            block.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x, y) + sum(block.nothing.sum() for block in self.net.blocks)


def holding_nothing(make: Maker) -> Any:
    own = {"state_dtype": "int8", "int8_min_numel": 1}  # which gives it a flat parameter of its own
    engine = make(WithNothing(), onefold=own, **precision("bf16"))
    return train(engine, 3)


@pytest.mark.parametrize("names", FEWER)
def test_a_parameter_without_elements_is_stepped(on_ranks, tmp_path, names):
    equal_in_every_tier(on_ranks, 1, holding_nothing, tmp_path, names)


def tying(make: Maker, dtype: str) -> Any:
    engine = make(net(tied=True), gradient_accumulation_steps=2, **precision(dtype))
    trace = train(engine, 6)
    return trace.losses, trace.norms, trace.weights


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", FEWER)
@pytest.mark.parametrize("dtype", [more("fp32"), "bf16"])
def test_tied_weights_are_one(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, tying, tmp_path, names, dtype)


# -- values from outside ----------------------------------------------------------------------------------------


def loading_weights(make: Maker, dtype: str, between: str) -> Any:
    engine = make(net(), **precision(dtype))
    train(engine, 2)
    if between == "forward":  # a pass that never gets its backward has read ahead
        engine(*batches(1, seed=3)[0])
    torch.manual_seed(77)
    engine.module.load_state_dict(Net().state_dict())
    loaded = weights_of(engine.module)
    trace = train(engine, 3, seed=4)
    return loaded, trace.losses, trace.norms, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", AHEAD)
@pytest.mark.parametrize(("dtype", "between"), [("bf16", "forward"), more("fp32", "forward"), more("bf16", "")])
def test_load_state_dict_then_training(on_ranks, tmp_path, world, names, dtype, between):
    equal_in_every_tier(on_ranks, world, loading_weights, tmp_path, names, dtype, between)


def accessing(make: Maker, dtype: str, between: str) -> Any:
    engine = make(net(), gradient_clipping=0.2, gradient_accumulation_steps=2, **precision(dtype))
    named = dict(engine.module.named_parameters())
    found: list[Any] = []
    for x, y in batches(4):
        engine.backward(engine(x, y))
        if engine.is_gradient_accumulation_boundary():  # before it, plans reduce at different times
            found += [safe_get_full_grad(named[name]) for name in ("blocks.1.up.weight", "embed.weight")]
            gradient = safe_get_full_grad(named["blocks.0.down.weight"])
            assert gradient is not None
            safe_set_full_grad(named["blocks.0.down.weight"], gradient * 3)
            found.append(safe_get_full_grad(named["blocks.0.down.weight"]))
        engine.step()
        found.append(engine.get_global_grad_norm())
    for name in ("blocks.2.up.weight", "head.weight", "blocks.1.norm.bias"):
        parameter = named[name]
        # Right after the step, which the host may not have done.
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        found.append(master)
        if between == "forward":
            engine(*batches(1, seed=3)[0])
        safe_set_full_fp32_param(parameter, master * 0.5 + 0.25)
        found.append(safe_get_full_fp32_param(parameter))
        for key in ADAM:
            state = safe_get_full_optimizer_state(parameter, key)
            assert state is not None
            safe_set_full_optimizer_state(parameter, state + 0.125, key)
            found += [state, safe_get_full_optimizer_state(parameter, key)]
        for x, y in batches(2, seed=5):
            found.append(one_step(engine, x, y))
    local = safe_get_local_fp32_param(named["blocks.2.up.weight"])
    assert local is not None
    return found, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", AHEAD)
@pytest.mark.parametrize(("dtype", "between"), [("bf16", "forward"), more("fp32", "forward"), more("bf16", "")])
def test_masters_gradients_and_states_are_read_and_set_as_on_the_device(
    on_ranks, tmp_path, world, names, dtype, between
):
    equal_in_every_tier(on_ranks, world, accessing, tmp_path, names, dtype, between)


def setting_a_gradient(make: Maker) -> Any:
    engine = make(net(), gradient_clipping=0.2)
    found = []
    for x, y in batches(2):
        engine.backward(engine(x, y))
        weight = engine.module.blocks[0].down.weight
        gradient = safe_get_full_grad(weight)
        assert gradient is not None
        safe_set_full_grad(weight, gradient * 3)
        engine.step()
        found.append(engine.get_global_grad_norm())
    return found, everything_of(engine)


@pytest.mark.parametrize("names", FEWER)
def test_a_gradient_that_is_set_counts_in_the_norm(on_ranks, tmp_path, names):
    equal_in_every_tier(on_ranks, 1, setting_a_gradient, tmp_path, names)


def modifying(make: Maker, dtype: str, between: str) -> Any:
    engine = make(net(), **precision(dtype))
    train(engine, 2)
    if between == "forward":
        engine(*batches(1, seed=3)[0])
    parameters = [*engine.module.blocks[1].parameters(), engine.module.head.weight]
    with onefold.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if rank() == 0:
            for parameter in parameters:
                parameter.mul_(0.5).add_(0.01)
    trace = train(engine, 3, seed=2)
    return trace.losses, trace.norms, everything_of(engine)


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", AHEAD)
@pytest.mark.parametrize(("dtype", "between"), [("bf16", "forward"), more("fp32", "forward"), more("bf16", "")])
def test_gathered_parameters_that_a_rank_writes(on_ranks, tmp_path, world, names, dtype, between):
    equal_in_every_tier(on_ranks, world, modifying, tmp_path, names, dtype, between)


# -- optimizers -------------------------------------------------------------------------------------------------

BY_NAME = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "plain SGD": {"lr": 0.1},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.01, "amsgrad": True},
}


def by_name(make: Maker, name: str) -> Any:
    section = {"type": name.split()[-1], "params": BY_NAME[name]}
    engine = make(net(), optimizer=section, gradient_clipping=0.5, **precision("bf16"))
    trace = train(engine, 4)
    engine.wait_for_step()
    for tier in (Tier.HOST, Tier.NVME):
        held, planned = engine.model_memory.held_bytes(tier), engine.model_memory.planned_bytes(tier)
        assert (held.masters, held.states) == (planned.masters, planned.states)
    masters = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    return trace.losses, trace.norms, trace.weights, masters


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize("name", ["SGD", more("plain SGD"), "Adagrad", "Lion", more("Adam")])
def test_every_rule_steps_on_host_and_disk(on_ranks, tmp_path, world, names, name):
    equal_in_every_tier(on_ranks, world, by_name, tmp_path, names, name)


class Own(torch.optim.Optimizer):
    """Elementwise, with a state of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].setdefault("last", torch.zeros_like(parameter))
                    last.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(last, alpha=group["lr"])


INSTANCES = {
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "own": Own,
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
}
UNTESTED = {"zero_allow_untested_optimizer": True}
ON_HOST = ["2 cpu", "3 cpu cpu", "2 half"]


def of_instance(make: Maker, kind: str) -> Any:
    model = net()
    optimizer = INSTANCES[kind](model.parameters())
    engine = make(model, optimizer_instance=optimizer, **UNTESTED, **precision("bf16"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    losses = []
    for x, y in batches(4):
        losses.append(one_step(engine, x, y))
        scheduler.step()
    masters = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    return losses, weights_of(engine.module), masters


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", [ON_HOST, more(["1 cpu", "3 cpu", "3 half cpu", "3 cpu disk", "3 params cpu"])])
@pytest.mark.parametrize("kind", [more("rmsprop"), "own", more("adamw")])
def test_an_instance_steps_on_the_host_as_on_the_device(on_ranks, tmp_path, world, names, kind):
    equal_in_every_tier(on_ranks, world, of_instance, tmp_path, names, kind)


def refused_on_disk(folder: str, kind: str) -> tuple[str, list[str]]:
    make = Maker(str(Path(folder, f"rank{rank()}")), "2 disk")
    try:
        of_instance(make, kind)
    except ConfigError as error:
        return str(error), files_in(Path(folder))
    return "", []


def test_a_users_own_optimizer_on_disk_is_refused_by_name(on_ranks, tmp_path):
    for text, left in on_ranks(1, refused_on_disk, str(tmp_path), "own"):
        assert "Own" in text
        assert "nvme" in text
        assert left == []


@covering(kind=("adamax", more("rmsprop")))
def test_torchs_own_optimizer_on_disk_steps_as_on_the_device(on_ranks, tmp_path, kind):
    """Adamax divides by a power of the step number, which all tiles of a group have to count alike."""
    equal_in_every_tier(on_ranks, 1, of_instance, tmp_path, ["2 disk"], kind)


def grouping(make: Maker) -> Any:
    model = net()
    plain = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    rest = [p for name, p in model.named_parameters() if not ("norm" in name or "bias" in name)]
    groups = [{"params": rest, "lr": 1e-2, "weight_decay": 0.2}, {"params": plain, "lr": 3e-3, "weight_decay": 0.0}]
    engine = make(model, groups=groups, **precision("bf16"))
    trace = train(engine, 3)
    engine.optimizer.param_groups[1]["lr"] = 0.0
    later = train(engine, 2, seed=1)
    return trace.losses, later.losses, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", FEWER)
def test_parameter_groups_have_their_own_hyperparameters(on_ranks, tmp_path, world, names):
    equal_in_every_tier(on_ranks, world, grouping, tmp_path, names)


def scheduling(make: Maker, rate: Any) -> Any:
    """The rate changes as soon as step() has returned; the host is held until then."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2) if rate == "tensor" else 1e-2)
    engine = make(model, optimizer_instance=optimizer, **precision("bf16"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    losses = []
    for x, y in batches(3):
        with host_held() as go:
            losses.append(one_step(engine, x, y))
            scheduler.step()
            go.set()
            engine.wait_for_step()
    return losses, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", [["2 cpu", "3 disk disk"], more(["1 disk", "3 cpu cpu", "3 cpu", "2 half"])])
@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_a_step_uses_the_rates_of_the_moment_it_was_called(on_ranks, tmp_path, world, names, rate):
    # Over several ranks step() waits for the host, where whole parameters are to be sent to all.
    runs_on = [name for name in names if world == 1 or name.startswith("3")]
    equal_in_every_tier(on_ranks, world, scheduling, tmp_path, runs_on, rate)


# -- beginnings and ends ----------------------------------------------------------------------------------------


def our_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("onefold-"))


def ending(folder: str, tier: str, how: str) -> dict[str, Any]:
    own = Path(folder, f"rank{rank()}")
    gc.collect()
    before = our_threads()
    make = Maker(str(own), tier)
    engine = make(net(), **precision("bf16"))
    make.made.clear()
    model = engine.module
    for x, y in batches(2):
        one_step(engine, x, y)
    found: dict[str, Any] = {"working": bool(files_in(own)), "more threads": len(our_threads()) - len(before)}
    expected = weights_of(engine.module)
    one_step(engine, *batches(1, seed=1)[0])  # the host still steps
    if how == "destroy":
        engine.destroy()
    elif how == "again":
        start(model, config(2, **precision("bf16"))).destroy()
    del engine
    gc.collect()
    found["files"], found["folders"] = files_in(own), sorted(str(path) for path in own.rglob("onefold-swap"))
    found["threads"] = [name for name in our_threads() if name not in before]
    after = weights_of(model)
    found["model lives"] = expected.keys() == after.keys() and not same(expected, after)
    return found


def collected_by_its_own_thread(folder: str, tier: str) -> dict[str, Any]:
    """The last reference to an engine is in a cycle, which the collector finds on the thread that steps for it."""
    own = Path(folder, f"rank{rank()}")
    gc.collect()
    before, steps = our_threads(), OffloadedStep._step
    make = Maker(str(own), tier)
    engine = make(net(), **precision("bf16"))
    make.made.clear()
    one_step(engine, *batches(1)[0])
    model, expected = engine.module, weights_of(engine.module)
    dropped = threading.Event()

    def collecting(self: OffloadedStep, *args: Any) -> Any:
        assert dropped.wait(60)
        gc.collect()
        return steps(self, *args)

    gc.disable()
    try:
        with mock.patch.object(OffloadedStep, "_step", collecting):
            one_step(engine, *batches(1, seed=1)[0])
            cycle: list[Any] = [engine]
            cycle.append(cycle)
            del engine, make, cycle
            dropped.set()
            for _ in range(300):
                if our_threads() == before:
                    break
                time.sleep(0.1)
    finally:
        gc.enable()
    after = weights_of(model)
    return {"threads": our_threads(), "before": before, "files": files_in(own), "stepped": not same(expected, after)}


@covering(tier=("2 cpu", more("3 disk disk")))
def test_an_engine_may_be_collected_by_its_own_thread(on_ranks, tmp_path, tier):
    (got,) = on_ranks(1, collected_by_its_own_thread, str(tmp_path), tier)
    assert got["threads"] == got["before"]
    assert got["files"] == []
    assert got["stepped"]


@covering(
    tier=("2 cpu", "1 disk", "3 disk disk", "3 cpu disk", "3 deep"),
    how=("destroy", "del", "again"),
    world=(1, 2),
    strength=1,
)
def test_an_engine_that_ends_leaves_no_file_and_no_thread(on_ranks, tmp_path, world, tier, how):
    for got in on_ranks(world, ending, str(tmp_path), tier, how):
        assert got["more threads"] > 0
        assert got["working"] is ("disk" in tier or "deep" in tier)
        assert (got["files"], got["folders"], got["threads"]) == ([], [], [])
        assert got["model lives"]


def side_by_side(make: Maker) -> Any:
    """Two engines, turn by turn; alone they would do the same."""
    engines = [make(net(seed=seed), **precision("bf16")) for seed in (5, 50)]
    losses: list[list[float]] = [[], []]
    for x, y in batches(3):
        for engine, found in zip(engines, losses, strict=True):
            found.append(one_step(engine, x, y))
    return losses, [everything_of(engine) for engine in engines]


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", [["3 disk disk"], more(["2 cpu", "3 cpu cpu", "1 disk", "2 half"])])
def test_two_engines_live_side_by_side(on_ranks, tmp_path, world, names):
    equal_in_every_tier(on_ranks, world, side_by_side, tmp_path, names)


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("trapped")


class Trapped(Net):
    trap = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = block(h)
            if self.trap and number == 0:
                h = Trap.apply(h)
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def trapping(make: Maker) -> Any:
    torch.manual_seed(5 + rank())
    engine = make(Trapped(), gradient_accumulation_steps=2, gradient_clipping=0.3, **precision("bf16"))
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        engine.module.trap = number == 3
        loss = engine(x, y)
        if number == 3:
            with pytest.raises(ArithmeticError):
                engine.backward(loss)
            continue
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), engine.get_global_grad_norm()]
    assert engine.global_steps == 3
    return losses, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", FEWER)
def test_training_goes_on_after_an_exception_in_backward(on_ranks, tmp_path, world, names):
    equal_in_every_tier(on_ranks, world, trapping, tmp_path, names)


# -- who rests where --------------------------------------------------------------------------------------------


def rests(engine: onefold.Engine) -> list[tuple[str, str]]:
    """Of each run in its order: where states rest, and where parameters do."""
    runs = [run for unit in engine.state.schedule.units for run in unit.params]
    return [(run.spec.residency.states.value, run.spec.residency.parameters.value) for run in runs]


def placed(folder: str, asked: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    found = []
    for stage, keys, own in asked:
        aio = {}
        for section in keys.values():
            paths = section.get("nvme_path")
            if isinstance(paths, list):
                aio = {"aio": {"block_size": 4096}}  # small tensors are divided too
                section["nvme_path"] = [str(Path(folder, f"rank{rank()}", path)) for path in paths]
            elif paths is not None:
                section["nvme_path"] = str(Path(folder, f"rank{rank()}", paths))
        engine = start(net(depth=4), config(stage, zero_optimization=keys, onefold=own, **precision("bf16"), **aio))
        sizes = [run.layout.numel for unit in engine.state.schedule.units for run in unit.trained_params]
        planned = {tier.value: engine.model_memory.planned_bytes(tier) for tier in Tier}
        files = sorted(files_in(Path(folder, f"rank{rank()}")))
        trace = train(engine, 3)
        found.append((rests(engine), sizes, planned, files, (trace.losses, trace.norms, trace.weights)))
        engine.destroy()
    return found


@covering(stage=(3, more(1), more(2)), world=(2, more(1)), strength=1)
def test_ratio_is_the_share_of_parameters_whose_states_leave_the_device(on_ranks, tmp_path, world, stage):
    ratios = [0, 0.3, 0.7, 1]
    asked = [(stage, {}, {})] + [(stage, {"offload_optimizer": {**CPU, "ratio": ratio}}, {}) for ratio in ratios]
    for reference, *found in on_ranks(world, placed, str(tmp_path), asked):
        assert {states for states, _ in reference[0]} == {"device"}
        for ratio, (where, sizes, _, _, trace) in zip(ratios, found, strict=True):
            assert first_difference(trace, reference[4]) is None, ratio
            num_kept = [states for states, _ in where].count("device")
            # The first ones stay, as many as the rest of the ratio covers.
            assert [states for states, _ in where] == ["device"] * num_kept + ["host"] * (len(where) - num_kept)
            assert sum(sizes[:num_kept]) <= (1 - ratio) * sum(sizes)
            assert num_kept == len(sizes) or sum(sizes[: num_kept + 1]) > (1 - ratio) * sum(sizes)
        assert {states for states, _ in found[0][0]} == {"device"}
        assert {states for states, _ in found[-1][0]} == {"host"}


@covering(stage=(2, more(1), more(3)), world=(2, more(1)), strength=1)
def test_auto_fills_the_device_first_as_far_as_its_budget_goes(on_ranks, tmp_path, world, stage):
    auto = {"offload_optimizer": {**CPU, "ratio": "auto"}}
    everything = on_ranks(world, placed, str(tmp_path), [(stage, {}, {})])[0][0][2]["device"]
    needed = everything.total + 2 * everything.largest_slot
    budgets = [1e-9, needed * 0.8 / 1e9, (needed + 1) / 1e9]
    asked = [(stage, {}, {})] + [(stage, auto, {"device_memory": budget}) for budget in budgets]
    for reference, nothing, some, all_ in on_ranks(world, placed, str(tmp_path), asked):
        assert {states for states, _ in nothing[0]} == {"host"}
        assert {states for states, _ in all_[0]} == {"device"}
        assert [states for states, _ in some[0]] == sorted(states for states, _ in some[0])  # device before host
        assert {states for states, _ in some[0]} == {"device", "host"}
        assert some[2]["device"].total <= needed * 0.8
        for got in (nothing, some, all_):
            assert first_difference(got[4], reference[4]) is None


@covering(stage=(3, more(1), more(2)), world=(2, more(1)), strength=1)
def test_auto_spills_to_disk_what_the_host_has_no_room_for(on_ranks, tmp_path, world, stage):
    auto = {"offload_optimizer": {**nvme("swap"), "ratio": "auto"}}
    tiny = {"device_memory": 1e-9}
    on_host = on_ranks(world, placed, str(tmp_path), [(stage, {"offload_optimizer": dict(CPU)}, {})])[0][0][2]["host"]
    half = on_host.total * world * 0.7 / 1e9
    asked = [(stage, {}, {})]
    asked += [(stage, auto, {**tiny, "host_memory": room}) for room in (1e-9, half, 1.0)]
    asked += [(stage, auto, {"device_memory": 1.0, "host_memory": 1.0})]
    for reference, nothing, some, all_, above in on_ranks(world, placed, str(tmp_path), asked):
        assert {states for states, _ in nothing[0]} == {"nvme"}
        assert [states for states, _ in some[0]] == sorted(states for states, _ in some[0])  # host before nvme
        assert {states for states, _ in some[0]} == {"host", "nvme"}
        assert some[2]["host"].total * world <= half * 1e9
        assert {states for states, _ in all_[0]} == {"host"}
        assert {states for states, _ in above[0]} == {"device"}
        assert nothing[3]
        assert some[3]
        assert not all_[3]
        assert not above[3]
        for got in (nothing, some, all_, above):
            assert first_difference(got[4], reference[4]) is None


@pytest.mark.parametrize("world", [2, more(3)])
def test_max_in_cpu_keeps_the_first_on_the_host(on_ranks, tmp_path, world):
    """Counted in elements that one rank keeps."""
    shard = 2048  # of each unit of this model, at any of these numbers of ranks
    keys = {
        "offload_optimizer": nvme("states", max_in_cpu=2 * shard),
        "offload_param": nvme("parameters", max_in_cpu=3 * shard + 1),
    }
    asked = [(3, {}, {}), (3, keys, {})]
    for reference, (where, _, planned, files, trace) in on_ranks(world, placed, str(tmp_path), asked):
        assert [states for states, _ in where] == ["host"] * 2 + ["nvme"] * (len(where) - 2)
        assert [parameters for _, parameters in where] == ["host"] * 3 + ["nvme"] * (len(where) - 3)
        assert planned["nvme"].parameters == 2 * shard * (len(where) - 3)
        assert any("states" in path for path in files)
        assert any("parameters" in path for path in files)
        assert first_difference(trace, reference[4]) is None


@pytest.mark.parametrize("world", [1, more(2)])
def test_several_paths_share_the_tensors(on_ranks, tmp_path, world):
    keys = {"offload_optimizer": {**nvme("swap"), "nvme_path": ["a", "b", "c"]}, "offload_param": dict(CPU)}
    asked = [(3, {}, {}), (3, keys, {})]
    for reference, (_, _, planned, files, trace) in on_ranks(world, placed, str(tmp_path), asked):
        for drive in ("a", "b", "c"):
            assert sum(f"/{drive}/onefold-swap/" in path and path.endswith("/data") for path in files) == 1
        assert planned["nvme"].masters
        assert first_difference(trace, reference[4]) is None


# -- checkpoints ------------------------------------------------------------------------------------------------

DEVICE = {"device 1": 1, "device 2": 2, "device 3": 3}


def engine_in(folder: str, tier: str, model: nn.Module, **settings: Any) -> onefold.Engine:
    if tier in DEVICE:
        return start(model, config(DEVICE[tier], **settings))
    return Maker(str(Path(folder, f"swap{rank()}")), tier)(model, **settings)


def save_in(folder: str, tier: str, dtype: str) -> Any:
    engine = engine_in(folder, tier, net(), **precision(dtype))
    train(engine, 3)
    engine.save_checkpoint(str(Path(folder, tier)))
    kept = everything_of(engine)
    trace = train(engine, 2, seed=8)
    engine.destroy()
    return kept, (trace.losses, trace.norms, trace.weights)


def load_in(folder: str, source: str, tier: str, dtype: str, before: str) -> Any:
    engine = engine_in(folder, tier, net(seed=99), **precision(dtype))
    if before:
        train(engine, 2, seed=6)
    if before == "forward":
        engine(*batches(1, seed=3)[0])
    engine.load_checkpoint(str(Path(folder, source)))
    kept = everything_of(engine)
    for tier_ in (Tier.HOST, Tier.NVME):
        assert engine.model_memory.held_bytes(tier_).parameters == engine.model_memory.planned_bytes(tier_).parameters
    trace = train(engine, 2, seed=8)
    engine.destroy()
    return kept, (trace.losses, trace.norms, trace.weights)


def resume_everywhere(folder: str, sources: list[str], targets: list[str], dtype: str, before: str) -> list[str]:
    wrong = []
    for source in sources:
        saved, after = save_in(folder, source, dtype)
        for target in targets:
            loaded, resumed = load_in(folder, source, target, dtype, before)
            if (difference := first_difference(loaded, saved)) is not None:
                wrong.append(f"{source} -> {target}: other weights or states: {difference}")
            if (difference := first_difference(resumed, after)) is not None:
                wrong.append(f"{source} -> {target}: goes on differently: {difference}")
    return wrong


EVERYWHERE = ["device 2", "device 3", "2 cpu", "3 cpu cpu", "3 half cpu", "1 disk", "3 disk disk", "3 cpu disk"]


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize(
    ("sources", "targets", "dtype"),
    [
        (["3 disk disk"], ["device 2", "2 cpu", "3 deep"], "bf16"),
        more(["device 3"], ["1 disk", "3 cpu disk"], "bf16"),
        more(EVERYWHERE[:4], [*EVERYWHERE, "3 deep"], "bf16"),
        more(EVERYWHERE[4:], [*EVERYWHERE, "3 deep"], "bf16"),
        more(EVERYWHERE[::3], [*EVERYWHERE[1::2], "3 deep"], "fp32"),
        more(EVERYWHERE[1::3], [*EVERYWHERE[::2], "3 deep"], "fp16"),
    ],
)
@pytest.mark.parametrize("before", ["forward", more("")])
def test_a_checkpoint_of_any_tier_goes_on_in_any_other(on_ranks, tmp_path, world, sources, targets, dtype, before):
    for wrong in on_ranks(world, resume_everywhere, str(tmp_path), sources, targets, dtype, before):
        assert wrong == []


def save_while_the_host_steps(folder: str, tier: str, background: bool) -> Any:
    engine = engine_in(folder, tier, net(), **precision("bf16"))
    train(engine, 2)
    with host_held() as go:
        one_step(engine, *batches(1, seed=7)[0])
        timer = threading.Timer(0.3, go.set)
        timer.start()
        engine.save_checkpoint(str(Path(folder, "c")), background=background)
        assert go.is_set()
        timer.join()
    trace = train(engine, 2, seed=8)
    engine.wait_for_checkpoint()
    engine.destroy()
    loaded, resumed = load_in(folder, "c", tier, "bf16", "")
    reference = engine_in(folder, "device 2", net(), **precision("bf16"))
    train(reference, 2)
    one_step(reference, *batches(1, seed=7)[0])
    expected = everything_of(reference)
    reference.destroy()
    after = (trace.losses, trace.norms, trace.weights)
    return first_difference(loaded, expected), first_difference(resumed, after)


@covering(
    tier=("1 cpu", "3 cpu disk", "3 disk disk", more("3 cpu cpu"), more("2 disk")),
    background=(False, True),
    world=(2, 1),
    # Over several ranks step() waits for the host, where whole parameters are to be sent to all.
    where=lambda tier, world, **_: world == 1 or tier.startswith("3"),
    strength=1,
)
def test_a_save_right_after_step_holds_that_step(on_ranks, tmp_path, world, tier, background):
    for holds, resumes in on_ranks(world, save_while_the_host_steps, str(tmp_path), tier, background):
        assert holds is None
        assert resumes is None


@contextmanager
def slow_writer(seconds: float) -> Iterator[None]:
    """The first byte of a checkpoint is written only after a while."""
    from onefold.checkpoint.saving import rank_shard_writer

    writes = rank_shard_writer.write_shard

    def slow(*args: Any, **kwargs: Any) -> Any:
        threading.Event().wait(seconds)
        return writes(*args, **kwargs)

    with mock.patch.object(rank_shard_writer, "write_shard", slow):
        yield


def go_on_while_saving(folder: str, tier: str, meanwhile: str) -> Any:
    engine = engine_in(folder, tier, net(), **precision("bf16"))
    train(engine, 2)
    expected = everything_of(engine)
    named = dict(engine.module.named_parameters())
    with slow_writer(0.2):
        engine.save_checkpoint(str(Path(folder, "c")), background=True)
        if meanwhile == "steps":
            train(engine, 3, seed=5)
        elif meanwhile == "load_state_dict":
            engine.module.load_state_dict({name: torch.zeros_like(t) for name, t in expected[0].items()})
        elif meanwhile == "master":
            safe_set_full_fp32_param(named["blocks.1.up.weight"], torch.zeros(42, 21))
        elif meanwhile == "state":
            safe_set_full_optimizer_state(named["blocks.1.up.weight"], torch.zeros(42, 21), "exp_avg")
        elif meanwhile == "gathered":
            with onefold.zero.GatheredParameters([named["head.weight"]], modifier_rank=0), torch.no_grad():
                named["head.weight"].zero_()
        elif meanwhile == "destroy":
            engine.destroy()
        if meanwhile != "destroy":
            engine.wait_for_checkpoint()
            engine.destroy()
    loaded, resumed = load_in(folder, "c", "device 2", "bf16", "")
    reference = engine_in(folder, "device 2", net(), **precision("bf16"))
    train(reference, 2)
    trace = train(reference, 2, seed=8)
    reference.destroy()
    after = (trace.losses, trace.norms, trace.weights)
    return first_difference(loaded, expected), first_difference(resumed, after)


@covering(
    tier=("1 disk", "3 disk disk", "3 cpu cpu", "2 half"),
    meanwhile=("steps", "load_state_dict", "gathered", "destroy", more("master"), more("state")),
    world=(1, 2),
    strength=1,
)
def test_a_save_in_the_background_holds_the_state_at_the_save(on_ranks, tmp_path, world, tier, meanwhile):
    for holds, resumes in on_ranks(world, go_on_while_saving, str(tmp_path), tier, meanwhile):
        assert holds is None
        assert resumes is None
