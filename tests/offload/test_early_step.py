"""The final step under the backward: the bits of a step after it, and an error for everything that comes too late.

Speculative steps are tested in `test_speculation.py`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from models import batches, config, first_difference, more, net, precision, start, weights_of
from test_device_pass import simulated
from test_offload import states_of, variants

from onefold.config import ConfigError
from onefold.optim.offloaded_step import OffloadedStep
from onefold.utils import safe_get_full_fp32_param, safe_set_full_grad

SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
# On a CPU, steps of unsharded parameters compare them with their masters, and wait for `step`.
STEPPED = ["3 cpu cpu", "3 half cpu", "3 cpu disk"]


def make(folder: str, name: str, accumulation: int = 1, *, early: bool = True, **more_of_config: Any) -> Any:
    stage, keys = variants(folder)[name]
    own = {"step_in_backward": early, "nonfinite_gradients": "ignore", **more_of_config.pop("onefold", {})}
    settings = config(
        stage,
        zero_optimization=keys,
        gradient_accumulation_steps=accumulation,
        onefold=own,
        **precision("bf16"),
        **more_of_config,
    )
    return start(net(), settings)


def run_both(folder: str, names: list[str], accumulation: int, own: dict[str, Any]) -> dict[str, Any]:
    """Losses, weights, masters and states with and without, and the number of shards stepped in a backward."""
    found: dict[str, Any] = {}
    for name in names:
        for early in (False, True):
            with mock.patch.object(OffloadedStep, "start_early", autospec=True, side_effect=START_EARLY) as started:
                engine = make(folder, name, accumulation, early=early, onefold=own, scheduler=SCHEDULER)
                losses = []
                for number, (x, y) in enumerate(batches(4 * accumulation)):
                    if number == 2 * accumulation:
                        engine.module.blocks[1].up.weight.requires_grad_(False)
                    engine.backward(loss := engine(x, y))
                    losses.append(loss.item())
                    if number % 3 == 0:
                        with torch.no_grad():  # weights are the old ones until the step
                            losses.append(engine(x, y).item())
                    engine.step()
            found[name, early] = losses, weights_of(engine.module), states_of(engine), started.call_count
            engine.destroy()
    return found


START_EARLY = OffloadedStep.start_early


def check(results: list[dict[str, Any]]) -> None:
    for found in results:
        for (name, early), (losses, weights, states, num_started) in found.items():
            assert (num_started > 0) == early, name
            if early:
                theirs = found[name, False]
                assert losses == theirs[0], name
                assert first_difference(weights, theirs[1]) is None, name
                assert first_difference(states, theirs[2]) is None, name


@pytest.mark.parametrize(("world", "accumulation"), [(1, 2), more(1, 1), more(2, 1), more(2, 3)])
def test_bits_are_those_of_a_step_after_the_backward(on_ranks, tmp_path, world, accumulation):
    check(on_ranks(world, run_both, str(tmp_path), STEPPED, accumulation, {}))


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), more(1, 3), more(2, 1)])
@pytest.mark.parametrize("own", [
    {"offloaded_step": "both"}, more({"offloaded_step": "device"}), more({"offloaded_step": "host"}),
    {"offloaded_step": "both", "device_cache": 1}, more({"offloaded_step": "device", "device_cache": 1e-4}),
    more({"offloaded_step": "device", "state_dtype": "int8"}),
])  # fmt: skip
def test_bits_below_a_gpu_are_those_of_a_step_after_the_backward(on_ranks, tmp_path, world, accumulation, own):
    results = on_ranks(world, simulated, run_both, str(tmp_path), STEPPED, accumulation, own)
    check([found for found, _ in results])


def one_backward(folder: str, name: str = "3 cpu cpu") -> Any:
    engine = make(folder, name)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    return engine


def change_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.step()


def freeze(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.requires_grad_(False)
    engine.step()


def another_backward(engine: Any) -> None:
    x, y = batches(1)[0]
    engine.backward(engine(x, y))


def write_gradient(engine: Any) -> None:
    parameter = next(engine.module.parameters())
    safe_set_full_grad(parameter, torch.zeros(parameter.ds_shape if hasattr(parameter, "ds_shape") else 1))


LATE = {
    "rate": (change_rate, "param_groups changed between backward and step"),
    "frozen": (freeze, "were frozen between backward and step"),
    "backward": (another_backward, "another backward between backward and step"),
    "master": (lambda engine: safe_get_full_fp32_param(next(engine.module.parameters())), "access to master weights"),
    "zero_grad": (lambda engine: engine.zero_grad(), "dropping gradients between backward and step"),
    "gradient": (write_gradient, "access to master weights, optimizer states or gradients"),
}


def act_late(folder: str, act: str) -> str:
    engine = one_backward(folder)
    with pytest.raises(RuntimeError) as caught:
        LATE[act][0](engine)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("act", LATE)
def test_what_comes_too_late_is_refused_by_name(on_ranks, tmp_path, act):
    for told in on_ranks(1, act_late, str(tmp_path), act):
        assert LATE[act][1] in told
        assert "step_in_backward" in told


def raise_in_backward(folder: str) -> str:
    engine = make(folder, "3 cpu cpu")
    x, y = batches(1)[0]

    def fail(gradient: Any) -> None:
        raise ValueError("of the user")

    engine.module.blocks[0].register_full_backward_hook(lambda *_: fail(None))
    with pytest.raises(ValueError, match="of the user"):
        engine.backward(engine(x, y))
    with pytest.raises(RuntimeError) as caught:
        engine(x, y)
    engine.destroy()
    return str(caught.value)


def abort_before_any_step(folder: str) -> list[str | None]:
    """A backward that raises before a shard is stepped changes nothing, also not in SGD's first step."""
    found = []
    for early in (False, True):
        engine = make(
            folder, "3 cpu cpu", early=early, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        )
        x, y = batches(1)[0]
        loss = engine(x, y)
        hook = loss.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        hook.remove()
        for x, y in batches(3):
            engine.backward(engine(x, y))
            engine.step()
        found.append(weights_of(engine.module))
        engine.destroy()
    return [first_difference(*found)]


def test_a_backward_that_raises_at_once_changes_nothing(on_ranks, tmp_path):
    assert on_ranks(1, abort_before_any_step, str(tmp_path)) == [[None]]


def test_after_an_error_in_such_a_backward_the_engine_refuses_to_go_on(on_ranks, tmp_path):
    for told in on_ranks(1, raise_in_backward, str(tmp_path)):
        assert "step_in_backward" in told
        assert "Load a checkpoint" in told


def refuse(folder: str, keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make(folder, "2 cpu", **keys)
    return str(caught.value)


@pytest.mark.parametrize(("keys", "told"), [
    ({"onefold": {"delayed_host_step": True}}, "delayed_host_step"),
    ({"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}, "RMSprop"),
])  # fmt: skip
def test_configs_that_step_otherwise_are_refused(on_ranks, tmp_path, keys, told):
    for message in on_ranks(1, refuse, str(tmp_path), keys):
        assert told in message
        assert "step_in_backward" in message
