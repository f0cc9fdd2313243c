"""What a program's main thread does, seen from another thread: whether it blocks inside torch.distributed, and where.

[Note: a rank that left no note]
A rank may wait in a collective of its own (a barrier, the reduction of a metric) while others wait for it in ours. It
wrote nothing down, so its stack has to speak. It counts as blocked only while its innermost frames are torch's own,
one of them in torch.distributed (or the frame is in the call of a `wait` that is no Python function, which is how one
waits for an asynchronous collective), the innermost frame stands at the same instruction, and the thread has used no
processor time: a loop of many quick collectives, a computation and a sleep are none of these.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = (os.path.join(_TORCH, "distributed") + os.sep, os.path.join(_TORCH, "futures") + os.sep)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Between a torch function and its caller.
_WRAPPERS = ("c10d_logger.py", "contextlib.py", "functools.py", "_contextlib.py")
# A thread that blocks uses no time at all; a signal that wakes it uses a little.
_BLOCKED_NANOSECONDS = 50_000
_PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}


@dataclass(frozen=True)
class Call:
    """A call inside torch.distributed that has not returned."""

    what: str
    group: dist.ProcessGroup | None
    """The group it is made on; None where that cannot be told, or where it is all ranks'."""
    ranks: tuple[int, ...] | None
    """Whom it may wait for; None: all ranks."""


class MainThread:
    """Looks at the main thread again and again, and knows since when it blocks in one call."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since = 0.0
        self._used = 0
        self._call: Call | None = None

    def look(self, patience: float) -> Call | None:
        """The call in which it has blocked for that long, if any."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not _inside_distributed(frame):
            self._place = self._call = None
            return None
        place, used, now = (id(frame), frame.f_lasti), _processor_time(), time.monotonic()
        if place != self._place or used - self._used > _BLOCKED_NANOSECONDS:
            self._place, self._since, self._call = place, now, None
        self._used = used
        if now - self._since < patience:
            return None
        if self._call is None:
            self._call = _describe(frame)
        return self._call


def _processor_time() -> int:
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return time.clock_gettime_ns(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _inside_distributed(frame: FrameType) -> bool:
    if not _is_torchs(frame):
        return _waits(frame)
    inner: FrameType | None = frame
    while inner is not None and _is_torchs(inner) and not inner.f_code.co_filename.startswith(_DISTRIBUTED):
        inner = inner.f_back
    return inner is not None and _is_torchs(inner)


def _is_torchs(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_TORCH) or name.endswith(_WRAPPERS)


def _waits(frame: FrameType) -> bool:
    """Whether the frame is in a call `something.wait(...)`, of something that is not written in Python."""
    code = frame.f_code
    if "wait" not in code.co_names:
        return False
    found = [step for step in dis.get_instructions(code) if step.offset <= frame.f_lasti]
    call = found[-1].positions if found else None
    if call is None or call.lineno is None:
        return False
    start = (call.lineno, call.col_offset)
    places = [step.positions for step in found if step.argval == "wait"]
    return any(where is not None and (where.lineno, where.col_offset) == start for where in places)


def _describe(frame: FrameType) -> Call:
    outer: FrameType | None = frame
    function: FrameType | None = None
    while outer is not None and _is_torchs(outer):
        if outer.f_code.co_filename.startswith(_DISTRIBUTED) and not outer.f_code.co_filename.endswith(_WRAPPERS):
            function = outer
        outer = outer.f_back
    name = f"torch.distributed.{function.f_code.co_name}" if function is not None else "wait"
    where = ""
    if outer is not None:
        where = f" at {outer.f_code.co_filename}:{outer.f_lineno}"
        caller: FrameType | None = outer
        while caller is not None and (caller.f_code.co_filename.startswith(_PACKAGE) or _is_torchs(caller)):
            caller = caller.f_back
        if caller is not None and caller is not outer:
            where += f", called from {caller.f_code.co_filename}:{caller.f_lineno}"
    group, ranks = _whom(function)
    return Call(f"its own {name}(){where}", group, ranks)


def _whom(function: FrameType | None) -> tuple[dist.ProcessGroup | None, tuple[int, ...] | None]:
    given: dict[str, Any] = dict(function.f_locals) if function is not None else {}
    group = given.get("group")
    group = group if isinstance(group, dist.ProcessGroup) else None
    peer = given.get(_PEERS.get(function.f_code.co_name, "")) if function is not None else None
    if isinstance(peer, int):
        return group, (peer,)
    return group, tuple(dist.get_process_group_ranks(group)) if group is not None else None
