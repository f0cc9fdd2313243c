"""The paths that states below a GPU take, run by a CPU. Copies over the bus are made as late as they may be: when the
host waits for them, or another stream is ordered behind them. So whoever does not wait reads something else.

What a GPU adds, its own streams and kernels and page-locked memory, is tested in `test_gpu_offload.py`. Here are bits,
bytes and errors of what passes through it, where there is none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from models import config, first_difference, more, net, precision, start, train, weights_of
from test_accumulation import KINDS
from test_accumulation import run as run_accumulation
from test_gpu_offload import failing_pass, later_accumulation, run_tiers
from test_muon import run_tiers as run_matrices
from test_offload_cases import VARIANTS, measure
from test_states import ADAMW, FORMATS
from test_states import run_tiers as run_forms

import onefold
from onefold.engine.model_memory import ModelMemory
from onefold.offload import disk_shard, host_memory, offload_memory
from onefold.offload.bus import Bus, CopyEvent, Pairs
from onefold.offload.host_shard import HostShard
from onefold.optim.gpu_stream import GpuStream
from onefold.plan import OffloadTraffic, count_offload_traffic

LOCK = threading.RLock()


class Stream:
    """What is put on it is done at once, except on a late one: there when somebody waits for it."""

    def __init__(self, device: Any = None, *, priority: int = 0, is_late: bool = False) -> None:
        self.is_late, self.num_done, self._waiting = is_late, 0, deque[Callable[[], Any]]()

    @property
    def num_put(self) -> int:
        return self.num_done + len(self._waiting)

    def put(self, work: Callable[[], Any]) -> None:
        with LOCK:
            self._waiting.append(work)
            if not self.is_late:
                self.run(self.num_put)

    def run(self, until: int) -> None:
        with LOCK:
            while self.num_done < until:
                self._waiting.popleft()()
                self.num_done += 1

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        self.run(self.num_put)


class Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self._stream, self._until = Stream(), 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current()
        self._until = self._stream.num_put

    def synchronize(self) -> None:
        self._stream.run(self._until)


COMPUTE = Stream()
CURRENT = threading.local()


def current(device: Any = None) -> Stream:
    return getattr(CURRENT, "stream", COMPUTE)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, CURRENT.stream = current(), stream
    try:
        yield
    finally:
        CURRENT.stream = before


def copy_late(bus: Bus, way: str, pairs: Pairs, after: Event) -> CopyEvent:
    stream, arrived = bus._streams[way], Event()
    bus.count(way, sum(source.nbytes for source, _ in pairs))
    stream.wait_event(after)
    stream.put(lambda: [target.copy_(source) for source, target in pairs])
    arrived.record(stream)
    return CopyEvent(arrived)


def compute_late(bus: Bus, compute: Any, source: Any, target: Any, after: list[CopyEvent]) -> CopyEvent:
    stream, arrived = bus._streams["down"], Event()
    bus.count("down", source.nbytes)
    for event in after:
        stream.wait_event(event.recorded)
    stream.put(compute)
    stream.put(lambda: target.copy_(source))
    arrived.record(stream)
    return CopyEvent(arrived)


def planned_on_gpu(memory: ModelMemory) -> OffloadTraffic:
    state = memory._state
    specs = [param.spec for unit in state.schedule.units for param in unit.params]
    return count_offload_traffic(specs, memory.plan, state.window.batch.accumulation, device_casts=True)


@contextmanager
def below_a_gpu() -> Iterator[list[int]]:
    """Engines take the bus for one that crosses. Yields the elements of each chunk that passed through the device."""
    make, start, unpinned = Bus.__init__, GpuStream._launch, host_memory.page_aligned
    passed: list[int] = []

    def crossing(self: Bus, device: torch.device, count: Callable[[str, int], None]) -> None:
        make(self, device, count)
        self.crosses, self._streams = True, {way: Stream(is_late=True) for way in ("down", "up")}

    def counted(self: GpuStream, slot: Any, shard: Any, window: Any, start_: int, stop: int) -> Any:
        passed.append(stop - start_)
        return start(self, slot, shard, window, start_, stop)

    with ExitStack() as stack:
        for place, name, value in [
            (torch.cuda, "Event", Event),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", on_stream),
            (torch.cuda, "current_stream", current),
            (torch.cuda, "set_device", lambda device: None),
            (Bus, "__init__", crossing),
            (Bus, "_copy", copy_late),
            (Bus, "compute_down", compute_late),
            (GpuStream, "_launch", counted),
            (ModelMemory, "planned_offload_traffic", planned_on_gpu),
            *((module, "page_aligned", lambda num_bytes, *, pinned: unpinned(num_bytes, pinned=False))
              for module in (host_memory, offload_memory, disk_shard)),
        ]:  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, value))
        yield passed


def simulated(case: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What a case returns, and the elements that have passed through the device."""
    with below_a_gpu() as passed:
        return case(*args), sum(passed)


def test_a_second_gather_waits_for_the_cast_of_the_first():
    with below_a_gpu():
        shard = HostShard(torch.zeros(8, dtype=torch.bfloat16), Bus(torch.device("cpu"), lambda way, num_bytes: None))
        shard.stale_behind(torch.ones(8))
        first, second = (torch.zeros(8, dtype=torch.bfloat16) for _ in range(2))
        shard.copy_to(first, is_overwritten=False)
        assert not shard.values.any(), "it is late"
        shard.copy_to(second, is_overwritten=False)
        assert torch.equal(first, second)


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize(("who", "dtype", "accumulation"), [
    more("both", "bf16", 1), ("device", "bf16", 1), more("device", "bf16", 2), more("device", "fp32", 1),
    more("host", "bf16", 1), more("both", "fp32", 1), more("both", "fp32", 2), more("device", "fp16", 1),
])  # fmt: skip
def test_every_tier_has_the_same_bits_whoever_steps(on_ranks, world, who, dtype, accumulation):
    for found, passed in on_ranks(world, simulated, run_tiers, dtype, accumulation, "exchange", who):
        assert (passed > 0) == (who != "host")
        losses, weights, *_ = found["2 cpu"]
        for name, (theirs, other, *_) in found.items():
            assert theirs == losses, name
            assert first_difference(other, weights) is None, name


ACCUMULATED = [("device", "overflow")]
OTHERS = [(who, kind) for who in ("device", "both", "host") for kind in KINDS if (who, kind) not in ACCUMULATED]


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize(("who", "kind"), [*ACCUMULATED, *(more(*case) for case in OTHERS)])
def test_accumulation_has_the_bits_of_no_offload_and_the_bytes_of_the_plan(on_ranks, tmp_path, world, who, kind):
    for told, _ in on_ranks(world, simulated, run_accumulation, kind, str(tmp_path), who):
        assert told == []


EXTRA = {
    "both": {"onefold": {"offloaded_step": "both"}},
    "host": {"onefold": {"offloaded_step": "host"}},
    "device": {"onefold": {"offloaded_step": "device"}},
    "device, split": {"onefold": {"offloaded_step": "device", "master_dtype": "bf16_int16"}},
    "both, cached": {"onefold": {"offloaded_step": "both", "device_cache": 1}},
    "host, cached": {"onefold": {"offloaded_step": "host", "device_cache": 1}},
    "device, partly cached": {"onefold": {"offloaded_step": "device", "device_cache": 5e-5}},
    "delayed, cached": {"onefold": {"delayed_host_step": True, "device_cache": 1}},
    "delayed": {"onefold": {"delayed_host_step": True}},
    "delayed, split": {"onefold": {"delayed_host_step": True, "master_dtype": "bf16_int16"}},
    "own class": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}},
}
QUICK = ("both", "host, cached", "device, partly cached", "delayed, split", "own class")


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), more(1, 2), more(2, 1)])
@pytest.mark.parametrize("name", [name if name in QUICK else more(name) for name in EXTRA])
def test_bytes_that_cross_in_a_step_equal_the_plan(on_ranks, tmp_path, name, world, accumulation):
    for found, _ in on_ranks(world, simulated, measure, str(tmp_path), VARIANTS, "bf16", accumulation, EXTRA[name]):
        for variant, seen in found.items():
            assert seen["traffic"] == seen["crossing"], variant


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), more(1, 2), more(2, 1)])
@pytest.mark.parametrize("own", [
    more({"offloaded_step": "both", "nonfinite_gradients": "ignore"}),
    more({"offloaded_step": "device", "nonfinite_gradients": "ignore", "device_cache": 1}),
    more({"offloaded_step": "both"}), {"offloaded_step": "device", "device_cache": 1},
])  # fmt: skip
def test_bytes_that_cross_with_a_step_in_backward_equal_the_plan(on_ranks, tmp_path, own, world, accumulation):
    names = ["3 cpu cpu", "3 half cpu", "3 cpu disk"]  # on a CPU, others wait for the end of the backward
    keys = {"gradient_clipping": 1e6, "onefold": {"step_in_backward": True, **own}}
    if "nonfinite_gradients" in own:
        keys["gradient_clipping"] = 0.0
    for found, _ in on_ranks(world, simulated, measure, str(tmp_path), names, "bf16", accumulation, keys):
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


@pytest.mark.parametrize("world", [1, more(2)])
@pytest.mark.parametrize("accumulation", [1, more(2)])
def test_whole_matrices_below_a_gpu_have_the_same_bits(on_ranks, tmp_path, world, accumulation):
    results = on_ranks(world, simulated, run_matrices, "bf16", str(tmp_path), accumulation)
    for (traces, crossings), passed in results:
        assert passed, "vectors and embeddings"
        for name, trace in traces.items():
            assert first_difference(trace, traces["host"]) is None, name
        for name, (moved, planned) in crossings.items():
            assert moved == planned, name


def load_over_cache(folder: str) -> list[str]:
    """Weights that are loaded from files replace cached copies."""
    keys = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings = config(3, zero_optimization=keys, onefold={"device_cache": 1}, **precision("bf16"))
    engine = start(net(), settings)
    engine.save_16bit_model(folder)
    saved = weights_of(engine.module)
    train(engine, 2)
    onefold.zero.load_safetensors(engine.module, folder)
    difference = first_difference(weights_of(engine.module), saved)
    engine.destroy()
    return [difference] if difference is not None else []


def test_weights_that_are_loaded_replace_cached_ones(on_ranks, tmp_path):
    ((told, _),) = on_ranks(1, simulated, load_over_cache, str(tmp_path))
    assert told == []


def test_a_step_of_the_device_that_fails_is_told(on_ranks):
    ((told, _),) = on_ranks(1, simulated, failing_pass)
    *words, num_calls = told
    assert all("the fourth chunk" in line for line in words[:3])
    assert num_calls == "4", "nothing was stepped after it"
