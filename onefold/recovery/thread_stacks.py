"""The Python stacks of all threads, and what a thread is doing according to its stack."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_LOADERS = (os.path.join(_TORCH, "utils", "data") + os.sep, os.path.join(_PACKAGE, "loader.py"))
_BETWEEN_RANKS = os.path.join(_PACKAGE, "comm") + os.sep
_CHECKPOINT = "a checkpoint"
_CHECKPOINTS = os.path.join(_PACKAGE, "checkpoint") + os.sep


@dataclass(frozen=True)
class ThreadPlace:
    """Where a thread is."""

    operation: str
    """The operation of a known part of the program, or an empty string."""
    line: str
    """The innermost line of the program itself, or an empty string."""
    waits_for_ranks: bool = False
    waits_for_save: bool = False
    """The thread waits for the thread that saves in the background."""


def place_of(frame: FrameType | None) -> ThreadPlace:
    """Return what the stack with this innermost frame does. The innermost known part of the program decides."""
    operation, line, waits = "", "", False
    waits_for_thread = frame is not None and frame.f_code.co_filename == threading.__file__
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
                operation = _CHECKPOINT
            else:
                is_known = False
        if not line and _is_of_program(name):
            line = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ThreadPlace(operation, line, waits, waits_for_thread and operation == _CHECKPOINT)


def save_waits_for_ranks(frames: Mapping[int, FrameType]) -> bool:
    """Return whether the thread that saves in the background waits for other ranks. `frames`: of all threads."""
    savers = [thread.ident for thread in threading.enumerate() if thread.name == "onefold-save"]
    return any(place_of(frames.get(ident or 0)).waits_for_ranks for ident in savers)


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
