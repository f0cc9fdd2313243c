"""Close an engine: by `engine.close()`, by `del engine`, or when the garbage collector finds it.

[Note: which thread closes an engine]
Python runs the finalizer of an unreachable engine on whichever thread happens to collect garbage. That may be a thread
of the engine itself, which closing waits for, or a thread with another current GPU. So the finalizer closes the engine
on the thread that made it, where `del engine` runs, and otherwise on a new thread with the device of the engine.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.saving.save_coordinator import LINGER
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.compiled_units import CompiledUnits
from onefold.engine.job_stop import JobStop
from onefold.engine.offloaded_states import OffloadedStates
from onefold.engine.peer_copies import PeerCopies
from onefold.engine.stall_guard import StallGuard
from onefold.engine.step_reports import EngineReports
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.runtime import Hooks, ParamHandle


@dataclass
class EngineParts:
    """The parts of an engine that outlive it until they are closed. None of them refers to the engine."""

    state: TrainState
    saver: CheckpointSaver
    hooks: Hooks
    handles: list[ParamHandle]
    offloaded: OffloadedStates
    reports: EngineReports
    compiled: CompiledUnits
    stop: JobStop
    stalls: StallGuard
    copies: PeerCopies
    creator: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that made the engine."""

    def close(self) -> None:
        """Finish what is in flight, remove all hooks and leave the parameters with the model.

        What is in flight is finished first, because other ranks and the model need it.
        """
        self.stop.close()
        self.copies.close()
        self.saver.stop()
        self.reports.close()
        schedule = self.state.schedule
        try:
            self._finish_step()
            self.hooks.remove()
            self.offloaded.reload(("hp_params", "lp_params"), non_blocking=False)
            schedule.reshard_all()
            for handle in self.handles:
                try:
                    handle.stand_alone()
                except OSError as error:  # of a disk; reading such a parameter raises
                    logger.error("weights on a disk cannot be read while the engine is closed: %s", error)
                except RuntimeError as error:  # of a device that has failed
                    logger.error("weights cannot be restored while the engine is closed: %s", error)
            self.handles.clear()
        finally:
            self.compiled.restore()
            while self.state.replacements:
                self.state.replacements.pop().remove()
            self.state.sequence.close()
            self.state.experts.close()
            self.state.fp8.close()
            if schedule.memory is not None:
                schedule.memory.close()
            self.stalls.close()
            schedule.guard.close()  # last, because the guard watches the waits above

    def _finish_step(self) -> None:
        """Wait for the last step. If it failed, log its error and drop it."""
        schedule = self.state.schedule
        try:
            schedule.wait_for_step()
        except Exception as error:  # of a user's optimizer on the host, or of a disk
            logger.warning(
                "the engine is closed after a failed step, so only some of its weights are updated: %s: %s",
                type(error).__name__,
                error,
            )
            schedule.abandon_step()
            if schedule.memory is not None:
                schedule.memory.drain()  # parts of the step that did not fail may still run

    def close_on_engine_device(self) -> None:
        """Close on a new thread, which must set the engine's device: threads start with the first GPU."""
        if self.state.device.type == "cuda":
            torch.cuda.set_device(self.state.device)
        self.close()


def close_unreachable(parts: EngineParts) -> None:
    """Close the parts of an engine that is no longer reachable. This is the finalizer of `Engine`."""
    if threading.current_thread() is not parts.creator:
        threading.Thread(target=parts.close_on_engine_device, name="onefold-close").start()
        return
    # Rank 0 may be about to save a last time. Wait for that after `del engine`, but not inside the garbage collector,
    # and not after an error.
    if not _is_collecting and not sys.is_finalizing() and not hasattr(sys, "last_value"):
        parts.saver.linger(LINGER)
    parts.close()


# -- the engine of a model --------------------------------------------------------------------------------------

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The open engine of each model. A second `initialize` on a model closes the first engine."""


def register_engine(model: nn.Module, engine: Any) -> None:
    """Record the engine of a model."""
    _engines[model] = weakref.ref(engine)
    _watch_collector()


def close_engine_of(model: nn.Module) -> None:
    """Close the engine that a model already has."""
    reference = _engines.pop(model, None)
    previous = reference() if reference is not None else None
    if previous is not None:
        logger.info("the earlier engine of the model is closed and its states are freed")
        previous.close()


# -- Python's garbage collector ---------------------------------------------------------------------------------

_is_collecting = False
"""Whether the garbage collector runs."""


def _watch_collector() -> None:
    """Set `_is_collecting` while the garbage collector runs. Each engine calls this when it is registered."""
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)


def _note_collection(phase: str, info: Any) -> None:
    global _is_collecting
    _is_collecting = phase == "start"


_pauses: set[int] = set()
"""Engines that keep the garbage collector off, by `id`."""


def pause_collector(engine: Any) -> weakref.finalize[..., Any]:
    """Collect once and turn Python's garbage collector off until every engine that paused it is closed.

    A collector that the program itself has turned off stays off.
    """
    number = id(engine)
    if gc.isenabled():
        gc.collect()
        gc.disable()
        _pauses.add(number)
    elif _pauses:
        _pauses.add(number)
    return weakref.finalize(engine, _resume_collector, number)


def _resume_collector(number: int) -> None:
    """Turn the garbage collector on if no other engine keeps it off."""
    if number in _pauses:
        _pauses.remove(number)
        if not _pauses:
            gc.enable()
