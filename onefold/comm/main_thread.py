"""Finds the torch.distributed call in which the main thread blocks, from another thread.

[Note: calls of the user's program]
A rank may wait in a collective of the user's program (a barrier, the reduction of a metric) while others wait for it in
the engine's. Such a call records nothing, so the detector reads the stack of the main thread. The thread counts as
blocked if all of this holds for the detector's patience:

* The innermost Python frames are torch's, one of them in torch.distributed. Or the innermost frame is the user's and
  the expression that it evaluates is a call of `wait`: `work.wait()` of an asynchronous collective has no Python frame.
* The innermost frame has not moved.
* The thread has used no processor time.

A loop of many quick collectives, a computation and a sleep each fail one of these tests. The expression is read from
the source file, by the positions that tracebacks use for their carets; without a source file `wait` is not found.
"""

from __future__ import annotations

import ast
import inspect
import linecache
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
# Files of frames that stand between a torch function and its caller.
_WRAPPERS = ("c10d_logger.py", "contextlib.py", "functools.py", "_contextlib.py")
# A blocked thread uses no time at all; a signal that wakes it uses a little.
_BLOCKED_NANOSECONDS = 50_000
# The argument that names the other rank, by function.
_PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}


@dataclass(frozen=True)
class BlockedCall:
    """A call inside torch.distributed that has not returned."""

    what: str
    group: dist.ProcessGroup | None
    """The group it is made on; None if it is unknown, or the default group."""
    ranks: tuple[int, ...] | None
    """The ranks that it may wait for; None for all ranks."""


class MainThreadProbe:
    """Samples the main thread, and remembers since when it has blocked in one call."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since = 0.0
        self._used = 0
        self._call: BlockedCall | None = None

    def find_blocked_call(self, patience: float) -> BlockedCall | None:
        """Return the call in which the main thread has blocked for `patience` seconds, if any."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not _is_inside_distributed(frame):
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
    """Return the processor time that the main thread has used, in nanoseconds."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return time.clock_gettime_ns(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _is_inside_distributed(frame: FrameType) -> bool:
    if not _is_torchs(frame):
        return _calls_wait(frame)
    inner: FrameType | None = frame
    while inner is not None and _is_torchs(inner) and not inner.f_code.co_filename.startswith(_DISTRIBUTED):
        inner = inner.f_back
    return inner is not None and _is_torchs(inner)


def _is_torchs(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_TORCH) or name.endswith(_WRAPPERS)


def _calls_wait(frame: FrameType) -> bool:
    """Return whether the frame evaluates a call `something.wait(...)`, of a function that is not written in Python."""
    if "wait" not in frame.f_code.co_names:
        return False
    try:
        expression = ast.parse(f"({_current_expression(frame)})", mode="eval").body
    except SyntaxError:
        return False
    function = expression.func if isinstance(expression, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name == "wait"


def _current_expression(frame: FrameType) -> str:
    """Return the source text of the expression that a frame evaluates; empty if there is no source."""
    found = inspect.getframeinfo(frame, context=0)
    place = found.positions
    if place is None or place.lineno is None or place.end_lineno is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(found.filename)[place.lineno - 1 : place.end_lineno]]
    if len(lines) != place.end_lineno - place.lineno + 1:
        return ""
    lines[-1] = lines[-1][: place.end_col_offset]  # columns count bytes
    lines[0] = lines[0][place.col_offset :]
    return b"".join(lines).decode()


def _describe(frame: FrameType) -> BlockedCall:
    """Return the outermost torch.distributed function on the stack, with the file and line of the user's call."""
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
    group, ranks = _find_participants(function)
    return BlockedCall(f"its own {name}(){where}", group, ranks)


def _find_participants(
    function: FrameType | None,
) -> tuple[dist.ProcessGroup | None, tuple[int, ...] | None]:
    """Return the group and the ranks of a call, from its arguments."""
    given: dict[str, Any] = dict(function.f_locals) if function is not None else {}
    group = given.get("group")
    group = group if isinstance(group, dist.ProcessGroup) else None
    peer = given.get(_PEERS.get(function.f_code.co_name, "")) if function is not None else None
    if isinstance(peer, int):
        return group, (peer,)
    return group, tuple(dist.get_process_group_ranks(group)) if group is not None else None
