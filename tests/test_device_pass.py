"""The paths that states below a GPU take, run by a CPU: streams and events do nothing, and copies are made at once.

What a GPU adds, its streams, its kernels and page-locked memory, is tested in `test_gpu_offload.py`. Here are bits,
bytes and errors of what passes through it, where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from models import first_difference, more
from test_gpu_offload import failing_pass, later_accumulation, run_tiers
from test_offload_cases import VARIANTS, measure
from test_states import ADAMW, FORMATS
from test_states import run_tiers as run_forms

from onefold.engine.core import Engine
from onefold.offload import host_memory, offload_memory, param_shard
from onefold.offload.bus import Bus
from onefold.optim.device_pass import DevicePass
from onefold.plan import Crossing, count_crossing


class Event:
    """Over as soon as it is there."""

    def __init__(self, **settings: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """Does nothing: what is put on it is done at once."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        pass


def planned_on_gpu(engine: Engine) -> Crossing:
    specs = [param.spec for unit in engine.state.schedule.units for param in unit.params]
    return count_crossing(specs, engine._complete(engine.plan), engine.batch.accumulation, device_casts=True)


@contextmanager
def below_a_gpu() -> Iterator[list[int]]:
    """Engines take the bus for one that crosses. Yields the elements of each chunk that passed through the device."""
    make, start, unpinned = Bus.__init__, DevicePass._start, host_memory.page_aligned
    passed: list[int] = []

    def crossing(self: Bus, device: torch.device, count: Callable[[str, int], None]) -> None:
        make(self, device, count)
        self.crosses, self._streams = True, {"down": Stream(), "up": Stream()}

    def counted(self: DevicePass, slot: Any, shard: Any, window: Any, start_: int, stop: int) -> Any:
        passed.append(stop - start_)
        return start(self, slot, shard, window, start_, stop)

    with ExitStack() as stack:
        for place, name, value in [
            (torch.cuda, "Event", Event),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "current_stream", lambda device=None: Stream()),
            (torch.cuda, "set_device", lambda device: None),
            (Bus, "__init__", crossing),
            (DevicePass, "_start", counted),
            (Engine, "planned_crossing", planned_on_gpu),
            *((module, "page_aligned", lambda num_bytes, *, pinned: unpinned(num_bytes, pinned=False))
              for module in (host_memory, offload_memory, param_shard)),
        ]:  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, value))
        yield passed


def simulated(case: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What a case returns, and the elements that have passed through the device."""
    with below_a_gpu() as passed:
        return case(*args), sum(passed)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize(("who", "dtype", "accumulation"), [
    ("both", "bf16", 1), ("device", "bf16", 2), more("device", "fp32", 1), more("host", "bf16", 1),
    more("both", "fp32", 2), more("device", "fp16", 1),
])  # fmt: skip
def test_every_tier_has_the_same_bits_whoever_steps(on_ranks, world, who, dtype, accumulation):
    for found, passed in on_ranks(world, simulated, run_tiers, dtype, accumulation, "exchange", who):
        assert (passed > 0) == (who != "host")
        losses, weights, *_ = found["2 cpu"]
        # Of one kind of processor: with one micro-step also those of states on the device.
        others = [name for name in found if accumulation == 1 or name != "device"]
        for name in others:
            theirs, other, *_ = found[name]
            assert theirs == losses, name
            assert first_difference(other, weights) is None, name


EXTRA = {
    "both": {"onefold": {"offloaded_step": "both"}},
    "host": {"onefold": {"offloaded_step": "host"}},
    "device": {"onefold": {"offloaded_step": "device"}},
    "device, split": {"onefold": {"offloaded_step": "device", "master_dtype": "bf16_int16"}},
    "delayed": {"onefold": {"delayed_host_step": True}},
    "delayed, split": {"onefold": {"delayed_host_step": True, "master_dtype": "bf16_int16"}},
    "own class": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}},
}


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), more(1, 2), more(2, 1)])
@pytest.mark.parametrize("name", EXTRA)
def test_bytes_that_cross_in_a_step_equal_the_plan(on_ranks, tmp_path, name, world, accumulation):
    for found, _ in on_ranks(world, simulated, measure, str(tmp_path), VARIANTS, "bf16", accumulation, EXTRA[name]):
        for variant, seen in found.items():
            assert seen["traffic"] == seen["crossing"], variant


def test_bytes_that_cross_follow_the_number_of_micro_steps(on_ranks):
    (((moved, planned), passed),) = on_ranks(1, simulated, later_accumulation)
    assert moved == planned
    assert passed


@pytest.mark.parametrize("name", ["int8, split", more("int8"), more("bf16"), more("int8, 8 bits")])
@pytest.mark.parametrize("world", [1, more(2)])
def test_states_in_fewer_bytes_pass_with_the_same_bits(on_ranks, tmp_path, world, name):
    for told, passed in on_ranks(world, simulated, run_forms, FORMATS[name], str(tmp_path), 1, ADAMW):
        assert told == []
        assert passed


def test_a_step_of_the_device_that_fails_is_told(on_ranks):
    ((told, _),) = on_ranks(1, simulated, failing_pass)
    *words, num_calls = told
    assert all("the fourth chunk" in line for line in words[:3])
    assert num_calls == "4", "nothing was stepped after it"
