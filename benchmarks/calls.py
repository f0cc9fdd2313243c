"""How often a stretch of a program calls torch.distributed, counted alike for all systems.

Every collective of every backend passes torch's dispatcher as an operation of `c10d`, whoever calls it: Python, DDP's
reducer, a hook in backward. The profiler lists them, in a tree, with their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity, profile, record_function

# What is called inside goes out together: NCCL makes one kernel of it. The dispatcher does not see where it begins and
# ends, so these get a range of their own; one inside another is part of it.
_TOGETHER = ("batch_isend_irecv", "_coalescing_manager")
_RANGE = "called together"


@dataclass
class Calls:
    """Of tensors on the device, and of what ranks tell each other between CPUs."""

    collectives: int = 0
    host_exchanges: int = 0


def count_calls(work: Callable[[], object], device: torch.device) -> Calls:
    """Do the work, and count this rank's calls in it. Groups that are started in one go are one call."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        _ranges(),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=every_thread) as found,
    ):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    calls = Calls()
    assert found.profiler is not None
    for event in found.profiler.kineto_results.experimental_event_tree():
        _count(event, device, calls)
    return calls


def _count(event: Any, device: torch.device, calls: Calls) -> None:
    if event.name != _RANGE and not event.name.startswith("c10d::"):
        for child in event.children:
            _count(child, device, calls)
        return
    tensors = list(_tensors(event))
    if all(_is_told(each, device) for each in tensors):
        calls.host_exchanges += bool(tensors)
    else:
        calls.collectives += 1


def _tensors(event: Any) -> Iterator[Any]:
    """What the operations of `c10d` here were given."""
    if not event.name.startswith("c10d::"):
        for child in event.children:
            yield from _tensors(child)
        return
    for each in event.extra_fields.inputs:
        for tensor in each if isinstance(each, list) else [each]:
            if hasattr(tensor, "device"):
                yield tensor


def _is_told(tensor: Any, device: torch.device) -> bool:
    """Beside a GPU the host's tensors are told from the device's; between CPUs, rows of whole numbers from values."""
    if tensor.device.type != "cpu":
        return False
    return device.type != "cpu" or tensor.dtype == torch.int64


@contextmanager
def _ranges() -> Iterator[None]:
    plain = {(module, name): getattr(module, name) for module in (dist, distributed_c10d) for name in _TOGETHER}
    for (module, name), function in plain.items():
        setattr(module, name, record_function(_RANGE)(function) if name == _TOGETHER[0] else _around(function))
    try:
        yield
    finally:
        for (module, name), function in plain.items():
            setattr(module, name, function)


def _around(manager: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def ranged(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with record_function(_RANGE), manager(*args, **kwargs) as entered:
            yield entered

    return ranged
