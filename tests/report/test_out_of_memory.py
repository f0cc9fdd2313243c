"""Errors of memory that explain: the account, the remedies by arithmetic, and what an engine adds to an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from models import Net, batches, config, first_difference, net, start, train
from torch import nn

from onefold.config import load_config
from onefold.offload.host_memory import HostShortage
from onefold.plan import (
    FlatParamSpec,
    Layout,
    ModelBytes,
    StateSpec,
    assign_tiers,
    count_bytes,
    make_plan,
    plan_with_less,
)
from onefold.plan.device_cache import assign_device_cache
from onefold.report.out_of_memory import (
    DeviceAccount,
    Price,
    RunFacts,
    advise,
    asked_bytes,
    explain,
    needed_bytes,
)

GB = 10**9
WORLD = 4


def units(num: int = 6, size: int = 1 << 24) -> list[list[FlatParamSpec]]:
    layout = Layout.of([("weight", (size,), 0)], WORLD)
    states = StateSpec(("exp_avg", "exp_avg_sq"))
    spec = FlatParamSpec(layout, torch.bfloat16, trainable=True, persistent=False, state_spec=states)
    return [[spec] for _ in range(num)]


def facts(
    stage: int, micro_batch: int = 4, offload: dict[str, Any] | None = None, own: dict[str, Any] | None = None,
    *, takes_formats: bool = False, **more: Any,
) -> RunFacts:  # fmt: skip
    zero = {"stage": stage, **(offload or {})}
    base = {"train_micro_batch_size_per_gpu": micro_batch, "bf16": {"enabled": True}, "onefold": own or {}}
    settings = load_config({**base, "zero_optimization": zero})
    less = plan_with_less(settings, WORLD, takes_formats=takes_formats)
    plans = {"now": make_plan(settings, WORLD), **less}
    return RunFacts(plans.pop("now"), units(), plans, micro_batch, accumulation=1, **more)


def account(**more: Any) -> DeviceAccount:
    held = ModelBytes(parameters=2 * GB, gradients=GB, masters=GB, states=2 * GB, largest_slot=0)
    base: dict[str, Any] = {"total": 20 * GB, "limit": 20 * GB, "free": 2 * GB, "reserved": 16 * GB}
    return DeviceAccount(**{**base, "allocated": 15 * GB, "held": held, "unsharded": 0, "slots": 0, **more})


sizes = st.integers(0, 10**9)


@given(sizes, sizes, sizes, sizes, sizes, sizes, sizes, sizes, sizes, sizes)
def test_the_account_adds_up_to_the_device(a, b, c, d, unsharded, slots, activations, unused, others, free):
    """Every byte of the device has one line."""
    held = ModelBytes(a, b, c, d, largest_slot=0)
    allocated = held.total + unsharded + slots + activations
    total = allocated + unused + others + free
    found = DeviceAccount(total, total, free, allocated + unused, allocated, held, unsharded, slots)
    assert (found.activations, found.unused, found.others) == (activations, unused, others)
    assert len(found.lines()) == sum(map(bool, (a, b, c, d, unsharded, slots, activations, unused, others, free)))


def test_a_process_that_may_have_less_says_so():
    assert not any("limit of this process" in line for line in account().lines())
    assert any("10.00 GB  limit of this process" in line for line in account(limit=10 * GB).lines())


@pytest.mark.parametrize(("stage", "num"), [(0, 5), (1, 4), (2, 3), (3, 2)])
def test_a_remedy_of_the_plan_frees_what_its_arithmetic_says(stage, num):
    run = facts(stage)
    remedies = {remedy.change: remedy for remedy in advise(account(limit=GB, total=GB), run)}
    assert len(run.with_less) == num
    specs = [spec for unit in run.units for spec in unit]
    assert count_bytes(specs, run.plan).total < needed_bytes(run.units, run.plan)
    for above in range(stage + 1, 4):
        plan = run.with_less[f"zero_optimization.stage {above}"]
        frees = needed_bytes(run.units, run.plan) - needed_bytes(run.units, plan)
        found = remedies.get(f"zero_optimization.stage {above} instead of {stage}")
        assert (found.frees if found else 0) == (frees if frees > 0 else 0)
        assert found is None or found.cost is Price.TRAFFIC
    below = [remedy for change, remedy in remedies.items() if "offload_optimizer" in change]
    assert below
    assert all(remedy.cost is Price.BUS for remedy in below)
    # 16-bit parameters with masters and two moments in fp32: 12 bytes a parameter go, and the reduced gradient's 4.
    if stage == 2:
        offloaded = remedies["zero_optimization.offload_optimizer.device cpu"]
        assert offloaded.frees == 16 * sum(spec.layout.total for spec in specs) // WORLD


def test_what_is_offloaded_already_is_not_offered():
    run = facts(3, offload={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})
    assert run.with_less == {}
    assert [remedy.change for remedy in advise(account(), run) if "zero_optimization" in remedy.change] == []


def test_the_device_cache_is_offered_with_its_bytes():
    run = facts(3, offload={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})
    flat = assign_tiers([spec for unit in run.units for spec in unit], run.plan)
    with_cache = assign_device_cache(flat, replace(run.plan, accumulates=True), GB)
    run = replace(run, plan=replace(run.plan, accumulates=True), units=[[spec] for spec in with_cache])
    (found,) = [remedy for remedy in advise(account(limit=GB, total=GB), run) if "device_cache" in remedy.change]
    # The sum of the gradient has 4 bytes, the parameter 2.
    assert (found.frees, found.cost) == (6 * sum(spec.layout.total for spec in flat) // WORLD, Price.BUS)
    assert "device_cache" not in str(advise(account(limit=GB, total=GB), facts(3)))


@pytest.mark.parametrize(("stage", "of_masters"), [(2, 2), (3, 0)])
def test_fewer_bytes_are_offered_to_optimizers_that_take_them(stage, of_masters):
    """int8: 8 bytes of two moments become 2 and 1/32. A split master saves where weights are held anyway."""
    run = facts(stage, takes_formats=True)
    numel = sum(spec.layout.total for unit in run.units for spec in unit) // WORLD
    found = {remedy.change: remedy for remedy in advise(account(limit=GB, total=GB), run)}
    states = found["onefold.state_dtype int8"]
    assert (states.frees, states.cost) == (6 * numel - numel // 32, Price.ROUNDING)
    masters = found.get("onefold.master_dtype bf16_int16")
    assert (masters.frees if masters else 0) == of_masters * numel
    assert not any("onefold." in change for change in facts(stage).with_less)
    own = {"state_dtype": "int8", "master_dtype": "bf16_int8"}
    assert not any("onefold." in change for change in facts(stage, own=own, takes_formats=True).with_less)


def test_remedies_are_listed_by_what_they_free_and_then_by_their_cost():
    remedies = advise(account(limit=GB, total=GB), facts(1))
    order = [(-remedy.frees, remedy.cost) for remedy in remedies]
    assert order == sorted(order)
    assert len(remedies) > 4


def changes(account: DeviceAccount, run: RunFacts) -> str:
    return "\n".join(map(str, advise(account, run)))


def test_activations_are_freed_by_smaller_batches_and_by_computing_them_again():
    found = changes(account(), facts(3, micro_batch=6))
    assert "about 4.50 GB  train_micro_batch_size_per_gpu 3 with gradient_accumulation_steps 2" in found
    assert "up to 7.50 GB  activation checkpointing" in found
    assert "up to 9.00 GB  onefold.tiled_loss true" in found
    assert "up to 9.00 GB  activation_checkpointing.cpu_checkpointing true" in found
    assert "train_micro_batch_size_per_gpu" not in changes(account(), facts(3, micro_batch=1))
    assert "train_micro_batch_size_per_gpu 1 with gradient_accumulation_steps 5" in changes(
        account(), facts(3, micro_batch=5)
    )


def test_a_reserve_that_is_not_used_is_named():
    assert "expandable_segments" in changes(account(), facts(3))
    assert "expandable_segments" not in changes(account(allocated=16 * GB), facts(3))
    assert "expandable_segments" not in changes(account(), facts(3, has_expandable_segments=True))
    # A little of it, and yet more than was asked for.
    little = account(total=80 * GB, limit=80 * GB, reserved=16 * GB)
    assert "expandable_segments" not in changes(little, facts(3))
    assert "expandable_segments" in changes(little, facts(3, asked=GB // 2))


def test_units_that_wait_unsharded_are_named():
    largest = 2 * units()[0][0].layout.total
    assert "stage3_max_live_parameters" not in changes(account(unsharded=largest), facts(3))
    found = advise(account(unsharded=largest + GB), facts(3))
    (remedy,) = [remedy for remedy in found if "stage3_max_live_parameters" in remedy.change]
    assert remedy.frees == GB
    assert f"stage3_max_live_parameters {units()[0][0].layout.total}" in remedy.change


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity", 5 << 29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; ...)", 20 << 20),
        ("Tried to allocate 512 bytes", 512),
        ("something else", None),
    ],
)
def test_what_was_asked_for_is_read_from_torchs_words(text, expected):
    assert asked_bytes(text) == expected


def test_the_explanation_names_place_bytes_and_remedies():
    run = facts(2, asked=GB)
    text = explain("rank 3, in the forward of unit a.b", "cuda:1", account(), advise(account(), run), GB)
    assert text.startswith(
        "onefold: rank 3, in the forward of unit a.b: 1.00 GB were requested. Memory in use on cuda:1"
    )
    for words in ("2.00 GB  parameters", "9.00 GB  activations", "2.00 GB  other processes", "stage 3 instead of 2"):
        assert words in text
    assert "larger device" in explain("", "", account(), [], None)


# -- an engine's errors ------------------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ctx.error


class Hungry(nn.Module):
    """A block that runs out of memory when it is told to."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.fails_in = ""
        self.error: Exception = RuntimeError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise self.error
        return Failing.apply(self.block(x), self.error) if self.fails_in == "backward" else self.block(x)


def hungry() -> Net:
    model = net()
    model.blocks[1] = Hungry(model.blocks[1])
    return model


ERRORS = {"device": torch.OutOfMemoryError, "host": HostShortage, "memory": MemoryError, "other": RuntimeError}


def caught(kind: str, phase: str, stage: int) -> tuple[str, bool, str | None]:
    """What the error says, whether it is the one that was raised, and where training parts from one without it."""
    plain = train(start(hungry(), config(stage)), 3)
    model = hungry()
    engine = start(model, config(stage, onefold={"units": ["Hungry", "Block"]}))
    (x, y), *_ = batches(1)
    raised = ERRORS[kind]("Tried to allocate 1.00 GiB")
    model.blocks[1].fails_in, model.blocks[1].error = phase, raised
    try:
        engine.backward(engine(x, y))
    except (RuntimeError, MemoryError) as error:
        found = error
    model.blocks[1].fails_in = ""
    return str(found), found is raised, first_difference(train(engine, 3), plain)


@covering(stage=(1, 3), phase=("forward", "backward"), kind=("device", "memory", "host"), strength=1)
def test_an_error_of_memory_says_where_and_training_goes_on(on_ranks, kind, phase, stage):
    for number, (text, same, difference) in enumerate(on_ranks(2, caught, kind, phase, stage)):
        assert same
        assert text.startswith("Tried to allocate")
        assert f"rank {number}, in the {phase}" in text
        assert text.count("Memory in use on this host") == 1
        assert "available" in text
        assert "resident in this process" in text
        if phase == "forward" or stage == 3:
            assert "unit blocks.1" in text
        assert difference is None


def test_other_errors_stay_as_they_are(on_ranks):
    for text, same, difference in on_ranks(2, caught, "other", "forward", 3):
        assert same
        assert text == "Tried to allocate 1.00 GiB"
        assert difference is None


def in_the_step() -> str:
    """An optimizer of the user's own that has no memory left."""

    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise MemoryError("no room")

    settings = {key: value for key, value in config(0).items() if key != "optimizer"}
    model = net()
    engine = start(model, settings, optimizer=Greedy(model.parameters(), lr=0.1))
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y))
    with pytest.raises(MemoryError) as found:
        engine.step()
    return str(found.value)


def test_the_step_is_named(on_ranks):
    text = on_ranks(1, in_the_step)[0]
    assert text.startswith("no room\nonefold: rank 0, in the step. ")


def offloaded() -> str:
    model = hungry()
    engine = start(model, config(2, zero_optimization={"offload_optimizer": {"device": "cpu"}}))
    train(engine, 1)
    model.blocks[1].fails_in, model.blocks[1].error = "forward", HostShortage("no room")
    (x, y), *_ = batches(1)
    with pytest.raises(HostShortage) as found:
        engine(x, y)
    return str(found.value)


def test_what_is_offloaded_is_named_with_the_keys_that_move_it(on_ranks):
    for text in on_ranks(2, offloaded):
        assert "of it offloaded optimizer states" in text
        assert "offload_optimizer.ratio" in text
