"""The Python stacks of all threads, and what a thread is doing according to its stack."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_LOADERS = (os.path.join(_TORCH, "utils", "data") + os.sep, os.path.join(_PACKAGE, "loader.py"))
_BETWEEN_RANKS = os.path.join(_PACKAGE, "comm") + os.sep
_CHECKPOINTS = os.path.join(_PACKAGE, "checkpoint") + os.sep


@dataclass(frozen=True)
class ThreadPlace:
    """Where a thread is."""

    operation: str
    """The operation of a known part of the program, or an empty string."""
    line: str
    """The innermost line of the program itself, or an empty string."""
    waits_for_ranks: bool = False


def place_of(frame: FrameType | None) -> ThreadPlace:
    """Return what the stack with this innermost frame does. The innermost known part of the program decides."""
    operation, line, waits = "", "", False
    is_known = False
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_known:
            is_known = True
            if name.startswith(_BETWEEN_RANKS):
                waits = True
            elif name.startswith(_LOADERS):
                operation = "the data loader's next batch"
            elif name.startswith(_CHECKPOINTS):
                operation = "a checkpoint"
            else:
                is_known = False
        if not line and _is_of_program(name):
            line = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ThreadPlace(operation, line, waits)


def _is_of_program(name: str) -> bool:
    """Return whether a file is part of neither onefold, nor torch, nor Python."""
    is_pythons = name.startswith(("<frozen", _LIBRARY)) and not name.startswith(_INSTALLED)
    return not is_pythons and not name.startswith((_PACKAGE, _TORCH))


def format_stacks() -> str:
    """Return the Python stacks of all threads of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, names.get(item[0], "")))
    return "\n".join(
        f"thread {names.get(ident, 'without a name')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != threading.get_ident()
    )
