"""Speculative steps under the backward: the bits of a step after it, whether the assumption was right or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import batches, config, first_difference, more, net, precision, start, weights_of
from test_device_pass import simulated
from test_offload import states_of, variants
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.optim.early_step import EarlyStep
from onefold.plan import Tier
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

# On a CPU, steps of unsharded parameters compare them with their masters, and wait for `step`.
STEPPED = ["3 cpu cpu", "3 half cpu", "3 cpu disk"]
# Of the weight that tests write.
SHAPE = (42, 21)
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10}}


def make(folder: str, name: str, dtype: str, *, early: bool, own: dict[str, Any], **keys: Any) -> onefold.Engine:
    stage, offload = variants(folder)[name]
    own = {"step_in_backward": early, **own}
    offload = {"reduce_bucket_size": 2000, **offload}  # units are reduced one by one
    settings = config(stage, zero_optimization=offload, onefold=own, **{**precision(dtype), **keys})
    return start(net(depth=6), settings)


def early_step_of(engine: onefold.Engine) -> EarlyStep | None:
    return engine.state.step._early


def run(engine: onefold.Engine, num_steps: int, accumulation: int) -> list[Any]:
    """Losses and norms. Norms are about 0.1 for two steps, then 1.2 for two steps. One loss is infinite.

    Some backwards have an evaluation before their step.
    """
    found: list[Any] = []
    for number, (x, y) in enumerate(batches(num_steps * accumulation)):
        loss = engine(x, y) * (0.1 if number // accumulation % 4 < 2 else 1.0)
        if number == 5 * accumulation:
            loss = loss * float("inf")
        engine.backward(loss)
        if number % 3 == 0:
            with torch.no_grad():  # weights are the old ones until the step
                found.append(engine(x, y).item())
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm()]
    return found


def compare(
    folder: str,
    dtype: str,
    accumulation: int,
    own: dict[str, Any],
    keys: dict[str, Any],
    names: Sequence[str] = STEPPED,
) -> list[str | None]:
    """The first difference of each variant with the same run without. Half of the steps are clipped."""
    told: list[str | None] = []
    keys = {"gradient_accumulation_steps": accumulation, "scheduler": SCHEDULER, "gradient_clipping": 0.5, **keys}
    own = {"nonfinite_gradients": "skip", **own}
    for name in names:
        results = []
        for early in (False, True):
            engine = make(folder, name, dtype, early=early, own=own, **keys)
            seen = run(engine, 12, accumulation)
            results.append((seen, weights_of(engine.module), states_of(engine)))
            if early:
                step = early_step_of(engine)
                assert step is not None
                assert step.num_used > 0, (name, seen)
                assert step.num_discarded > 0, (name, seen)
            held, planned = engine.model_memory.held_bytes(Tier.HOST), engine.model_memory.planned_bytes(Tier.HOST)
            assert (held.masters, held.states) == (planned.masters, planned.states)
            engine.destroy()
        told.append(first_difference(results[1], results[0], f"{name}: "))
    return told


CASES = {
    "bf16": ("bf16", {}, {}),
    "fp16": ("fp16", {}, {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}),
    "int8 states": ("bf16", {"state_dtype": "int8", "int8_min_numel": 0}, {}),
    "momentum": ("bf16", {}, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
}


@pytest.mark.parametrize(("world", "accumulation"), [(1, 2), more(1, 1), more(2, 1)])
@pytest.mark.parametrize(
    "case", [more(name) if name in ("momentum", "bf16", "int8 states") else name for name in CASES]
)
def test_bits_are_those_of_a_step_after_the_backward(on_ranks, tmp_path, world, accumulation, case):
    dtype, own, keys = CASES[case]
    for told in on_ranks(world, compare, str(tmp_path), dtype, accumulation, own, keys):
        assert not any(told), told


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), more(1, 3), more(2, 1)])
@pytest.mark.parametrize("own", [
    {"offloaded_step": "both", "device_cache": 1}, more({"offloaded_step": "device"}), more({"offloaded_step": "host"}),
    more({"offloaded_step": "device", "device_cache": 1e-4}), more({"offloaded_step": "device", "state_dtype": "int8"}),
])  # fmt: skip
def test_bits_below_a_gpu_are_those_of_a_step_after_the_backward(on_ranks, tmp_path, world, accumulation, own):
    for told, _ in on_ranks(world, simulated, compare, str(tmp_path), "bf16", accumulation, own, {}):
        assert not any(told), told


def change_rate(engine: onefold.Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5


def freeze(engine: onefold.Engine) -> None:
    engine.module.blocks[1].up.weight.requires_grad_(False)


def another_backward(engine: onefold.Engine) -> None:
    x, y = batches(1, seed=3)[0]
    engine.backward(engine(x, y))


def zero_grad(engine: onefold.Engine) -> None:
    engine.zero_grad()
    another_backward(engine)


def write_gradient(engine: onefold.Engine) -> None:
    parameter = engine.module.blocks[1].up.weight
    safe_set_full_grad(parameter, torch.full(SHAPE, 0.25))


def write_master(engine: onefold.Engine) -> None:
    parameter = engine.module.blocks[1].up.weight
    safe_set_full_fp32_param(parameter, torch.full(SHAPE, 0.25))


def read_master(engine: onefold.Engine) -> None:
    safe_get_full_fp32_param(engine.module.blocks[1].up.weight)


def write_weight(engine: onefold.Engine) -> None:
    parameter = engine.module.blocks[1].up.weight
    with onefold.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.fill_(0.25)


def write_state(engine: onefold.Engine) -> None:
    safe_set_full_optimizer_state(engine.module.blocks[1].up.weight, torch.full(SHAPE, 0.125), "exp_avg")


def fail_in_backward(engine: onefold.Engine) -> None:
    """A backward that raises after most shards were stepped."""
    x, y = batches(1, seed=4)[0]
    engine.step()

    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    hook = engine.module.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        engine.backward(engine(x, y))
    hook.remove()
    another_backward(engine)


BETWEEN: dict[str, Callable[[onefold.Engine], None]] = {
    act.__name__: act
    for act in (
        change_rate, freeze, another_backward, zero_grad, write_gradient, write_master, read_master, write_weight,
        write_state, fail_in_backward,
    )
}  # fmt: skip


def act_between(folder: str, name: str, own: dict[str, Any], tiers: str = "3 cpu cpu") -> list[str | None]:
    """What differs if the program acts between a backward and its step."""
    results = []
    for early in (False, True):
        engine = make(folder, tiers, "bf16", early=early, own=own, gradient_clipping=1e6)
        seen: list[Any] = []
        for number, (x, y) in enumerate(batches(6)):
            engine.backward(loss := engine(x, y))
            if number in (2, 4):
                BETWEEN[name](engine)
            engine.step()
            seen += [loss.item(), engine.get_global_grad_norm()]
        results.append((seen, weights_of(engine.module), states_of(engine)))
        if early:
            step = early_step_of(engine)
            assert step is not None
            assert step.num_used > 0
            assert (step.num_discarded == 0) == (name == "read_master")
        engine.destroy()
    return [first_difference(results[1], results[0])]


@pytest.mark.parametrize("name", BETWEEN)
def test_the_program_may_act_between_a_backward_and_its_step(on_ranks, tmp_path, name):
    assert on_ranks(1, act_between, str(tmp_path), name, {}) == [[None]]


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("name", ["write_gradient", *(more(name) for name in BETWEEN if name != "write_gradient")])
def test_the_program_may_act_between_a_backward_and_its_step_below_a_gpu(on_ranks, tmp_path, world, name):
    own = {"offloaded_step": "device", "device_cache": 1}
    for told, _ in on_ranks(world, simulated, act_between, str(tmp_path), name, own):
        assert told == [None]


def limit_memory(folder: str) -> list[tuple[int, int, str]]:
    """Stepped shards in one backward, and bytes of masters on the host, for several limits of host memory."""
    found = []
    for host_memory in (None, 0.0006, 0.0003):
        engine = make(folder, "3 cpu cpu", "bf16", early=True, own={"host_memory": host_memory}, gradient_clipping=1e6)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        engine.step()
        step = early_step_of(engine)
        assert step is not None
        held, planned = engine.model_memory.held_bytes(Tier.HOST), engine.model_memory.planned_bytes(Tier.HOST)
        assert (held.masters, held.states) == (planned.masters, planned.states)
        found.append((step.num_used, held.total, engine.describe()))
        engine.destroy()
    return found


def test_as_many_units_are_stepped_early_as_have_memory_for_second_states(on_ranks, tmp_path):
    ((all_units, all_bytes, told), (some, some_bytes, told_less), (none, no_bytes, _)) = on_ranks(
        1, limit_memory, str(tmp_path)
    )[0]
    assert all_units > some > none == 0
    assert all_bytes > 600_000 >= some_bytes > no_bytes
    assert "speculatively" in told
    assert told != told_less


class RunsTwice(nn.Module):
    """A block that two reentrant checkpoints run: its second gradient comes after the first is reduced and stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(depth=4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.net.embed(x)
        for index in (0, 1, 2, 0, 3, 1):
            h = checkpoint(self.net.blocks[index], h, use_reentrant=True)
        return F.cross_entropy(self.net.head(h).float().flatten(0, 1), y.flatten())


def late_gradients(folder: str) -> list[str | None]:
    results = []
    stage, offload = variants(folder)["3 cpu cpu"]
    for early in (False, True):
        settings = config(
            stage,
            zero_optimization={"reduce_bucket_size": 2000, **offload},
            onefold={"step_in_backward": early},
            **{**precision("bf16"), "gradient_clipping": 1e6},
        )
        engine = start(RunsTwice(), settings)
        losses = []
        for x, y in batches(4):
            engine.backward(loss := engine(x, y))
            engine.step()
            losses.append(loss.item())
        results.append((losses, weights_of(engine.module)))
        if early:
            step = early_step_of(engine)
            assert step is not None
            assert step.num_discarded > 0
            assert step.num_used > 0
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_a_gradient_that_comes_late_discards_the_step_of_its_shard(on_ranks, tmp_path):
    assert on_ranks(1, late_gradients, str(tmp_path)) == [[None]]


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}}


def change_boundary(folder: str) -> list[str | None]:
    """A last backward turns out not to be the last one, after its shards were stepped."""
    results = []
    for early in (False, True):
        own = {"offloaded_step": "device", "device_cache": 1}
        engine = make(folder, "3 cpu cpu", "bf16", early=early, own=own, gradient_clipping=1e6)
        for number, (x, y) in enumerate(batches(6)):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x, y))
            if number == 3:
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(x, y))
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(engine(x, y))
            engine.step()
        results.append(weights_of(engine.module))
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_a_backward_may_follow_the_last_one(on_ranks, tmp_path):
    ((told, _),) = on_ranks(1, simulated, change_boundary, str(tmp_path))
    assert told == [None]


def resume_after_a_skipped_step(folder: str) -> list[str | None]:
    """SGD creates its momentum in the first step that is applied, also if a checkpoint lies between."""
    results = []
    for early in (False, True):
        keys = {"early": early, "own": {"nonfinite_gradients": "skip"}, "gradient_clipping": 1e6, "optimizer": SGD}
        engine = make(folder, "3 cpu cpu", "bf16", **keys)
        data = batches(4)
        engine.backward(engine(*data[0]) * float("inf"))
        engine.step()
        assert engine.skipped_steps == 1
        engine.save_checkpoint(f"{folder}/{early}")
        engine.destroy()
        engine = make(folder, "3 cpu cpu", "bf16", **keys)
        engine.load_checkpoint(f"{folder}/{early}")
        for x, y in data[1:]:
            engine.backward(engine(x, y))
            engine.step()
        results.append(weights_of(engine.module))
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_a_step_that_was_not_applied_creates_no_states(on_ranks, tmp_path):
    assert on_ranks(1, resume_after_a_skipped_step, str(tmp_path)) == [[None]]


def load_instead_of_a_step(folder: str) -> list[str | None]:
    """A checkpoint is loaded between a backward and its step, and the next step needs states that do not exist yet."""
    results = []
    for early in (False, True):
        optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.0}}
        engine = make(folder, "3 cpu cpu", "bf16", early=early, own={}, gradient_clipping=1e6, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(5)):
            engine.backward(engine(x, y))
            if number == 1:
                engine.load_checkpoint(folder)
                engine.optimizer.param_groups[0]["momentum"] = 0.9
                continue
            engine.step()
            if number == 0:
                engine.save_checkpoint(folder)
        held, planned = engine.model_memory.held_bytes(Tier.HOST), engine.model_memory.planned_bytes(Tier.HOST)
        assert (held.masters, held.states) == (planned.masters, planned.states)
        results.append(weights_of(engine.module))
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_a_checkpoint_may_be_loaded_instead_of_a_step(on_ranks, tmp_path):
    assert on_ranks(1, load_instead_of_a_step, str(tmp_path)) == [[None]]


def read_on_another_thread(folder: str) -> list[str | None]:
    """A thread synchronizes the masters all the time, as one that copies them for a checkpoint does."""
    results, errors = [], []
    for early in (False, True):
        own = {"offloaded_step": "both", "device_cache": 1}
        engine = make(folder, "3 cpu cpu", "bf16", early=early, own=own, gradient_clipping=0.5)
        stops = threading.Event()

        def synchronize(engine: onefold.Engine = engine, stops: threading.Event = stops) -> None:
            try:
                while not stops.wait(0.001):
                    engine.state.step.sync_masters()
            except BaseException as error:
                errors.append(repr(error))

        thread = threading.Thread(target=synchronize)
        if early:
            thread.start()
        seen = run(engine, 16, 1)
        stops.set()
        if early:
            thread.join()
        results.append((seen, weights_of(engine.module)))
        engine.destroy()
    return [first_difference(results[1], results[0]), *errors]


def test_another_thread_may_read_masters(on_ranks, tmp_path):
    ((told, _),) = on_ranks(1, simulated, read_on_another_thread, str(tmp_path))
    assert told == [None]


def hold_a_state(folder: str) -> list[str | None]:
    """The program holds a state of one shard, and writes to it between each backward and its step."""
    results = []
    for early in (False, True):
        engine = make(folder, "3 cpu cpu", "bf16", early=early, own={}, gradient_clipping=1e6)
        step = engine.state.step
        for x, y in batches(4):
            engine.backward(engine(x, y))
            step.expose(step.stores[1])
            step.stores[1].states["exp_avg"].tensor.fill_(0.125)
            engine.step()
        results.append(weights_of(engine.module))
        if early:
            found = early_step_of(engine)
            assert found is not None
            assert found.num_used == 0
            for x, y in batches(2):
                engine.backward(engine(x, y))
                engine.step()
            assert found.num_used == 2 * (len(step.stores) - 1)
        engine.destroy()
    return [first_difference(results[1], results[0])]


def test_shards_whose_states_the_program_holds_wait_for_the_step(on_ranks, tmp_path):
    assert on_ranks(1, hold_a_state, str(tmp_path)) == [[None]]
