"""Offload: bytes and traffic equal the plan's, and whatever a user does gives the bits of an engine without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import batches, config, more, net, precision, rank, start, weights_of
from test_offload import variants
from torch import nn

import onefold
from onefold.optim.host import HostStep
from onefold.plan import Tier
from onefold.tier.lower import read
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
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
        changed = not same(before, below(engine)) or not same(weights, weights_of(engine.module))
        assert changed is not skipped[-1]
        if skipped[-1]:
            assert engine.ledger.since(traffic).bytes("write") == 0
    assert any(skipped)
    assert not all(skipped)
    return losses, skipped, engine.loss_scale(), engine.skipped_steps, everything_of(engine)


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
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
    for x, y in batches(8):
        loss = engine(x, y)
        evaluate()  # between a forward and its backward
        engine.backward(loss)
        evaluate()
        engine.step()
        evaluate()  # while the host steps
        found.append(loss.item())
    return found, everything_of(engine)


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize("dtype", ["bf16", more("fp32")])
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


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize("dtype", ["bf16", more("fp32")])
def test_the_accumulation_count_may_change_at_run_time(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, counting_anew, tmp_path, names, dtype)


def widened(folder: str, tier: str) -> list[tuple[int, int]]:
    make = Maker(str(Path(folder, f"rank{rank()}")), tier)
    engine = make(net(), **precision("bf16"))
    found = []
    for accumulation in (1, 2, 2):
        engine.set_gradient_accumulation_steps(accumulation)
        for x, y in batches(accumulation):
            engine.backward(engine(x, y))
            if engine.is_gradient_accumulation_boundary():
                found.append((engine.held_bytes(Tier.HOST).gradients, engine.planned_bytes(Tier.HOST).gradients))
            engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("tier", [more("2 cpu"), "3 disk disk"])
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
@pytest.mark.parametrize("names", ALL)
def test_unused_parameters_count_as_zero(on_ranks, tmp_path, world, names):
    equal_in_every_tier(on_ranks, world, leaving_out, tmp_path, names)


def freezing(make: Maker, dtype: str) -> Any:
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1" not in name and "embed" not in name)
    engine = make(model, **precision(dtype))
    frozen = [run for unit in engine._units for run in unit.runs if not run.trainable]
    assert frozen
    wanted = {
        "none": Tier.DEVICE,
        "cpu": Tier.HOST,
        "nvme": Tier.NVME,
    }[make.keys.get("offload_param", {}).get("device", "none")]
    assert {run.rest.parameters for run in frozen} == {wanted}
    assert {run.rest.states for run in frozen} == {Tier.DEVICE}
    trace = train(engine, 4)
    engine.settle()
    for tier in Tier:
        assert engine.held_bytes(tier).parameters == engine.planned_bytes(tier).parameters
    return trace.losses, trace.norms, trace.weights


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize("dtype", [more("fp32"), "bf16"])
def test_frozen_parameters_rest_where_parameters_are_offloaded_to(on_ranks, tmp_path, world, names, dtype):
    equal_in_every_tier(on_ranks, world, freezing, tmp_path, names, dtype)


def tying(make: Maker, dtype: str) -> Any:
    engine = make(net(tied=True), gradient_accumulation_steps=2, **precision(dtype))
    trace = train(engine, 6)
    return trace.losses, trace.norms, trace.weights


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
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


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize(("dtype", "between"), [("bf16", "forward"), more("fp32", "forward"), more("bf16", "")])
def test_load_state_dict_then_training(on_ranks, tmp_path, world, names, dtype, between):
    equal_in_every_tier(on_ranks, world, loading_weights, tmp_path, names, dtype, between)


def accessing(make: Maker, dtype: str, between: str) -> Any:
    engine = make(net(), gradient_clipping=0.2, gradient_accumulation_steps=2, **precision(dtype))
    named = dict(engine.module.named_parameters())
    found: list[Any] = []
    for x, y in batches(4):
        engine.backward(engine(x, y))
        found += [safe_get_full_grad(named[name]) for name in ("blocks.1.up.weight", "embed.weight")]
        if engine.is_gradient_accumulation_boundary():
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


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
@pytest.mark.parametrize(("dtype", "between"), [("bf16", "forward"), more("fp32", "forward"), more("bf16", "")])
def test_masters_gradients_and_states_are_read_and_set_as_on_the_device(
    on_ranks, tmp_path, world, names, dtype, between
):
    equal_in_every_tier(on_ranks, world, accessing, tmp_path, names, dtype, between)


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
@pytest.mark.parametrize("names", ALL)
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
    engine.settle()
    for tier in (Tier.HOST, Tier.NVME):
        held, planned = engine.held_bytes(tier), engine.planned_bytes(tier)
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


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", [ON_HOST, more(["1 cpu", "3 cpu", "3 half cpu", "3 cpu disk", "3 params cpu"])])
@pytest.mark.parametrize("kind", list(INSTANCES))
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


@pytest.mark.slow
def test_torchs_own_optimizer_on_disk_steps_as_on_the_device_or_is_refused(on_ranks, tmp_path):
    text, left = on_ranks(1, refused_on_disk, str(tmp_path), "rmsprop")[0]
    if text:
        assert "RMSprop" in text
        assert left == []
    else:
        equal_in_every_tier(on_ranks, 1, of_instance, tmp_path, ["2 disk"], "rmsprop")


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


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("names", ALL)
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
            engine.settle()
    return losses, everything_of(engine)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("names", [["2 cpu", "3 disk disk"], more(["1 disk", "3 cpu cpu", "3 cpu", "2 half"])])
@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_a_step_uses_the_rates_of_the_moment_it_was_called(on_ranks, tmp_path, world, names, rate):
    equal_in_every_tier(on_ranks, world, scheduling, tmp_path, names, rate)
