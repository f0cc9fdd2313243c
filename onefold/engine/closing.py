"""The end of an engine: by `close`, by `del`, or by the garbage collector."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import torch

from onefold.checkpoint.saving.saver import LINGER
from onefold.engine.offload_states import reload_states
from onefold.engine.reporting import StepReports
from onefold.engine.saving import Saving
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.offload.offload_memory import OffloadMemory
from onefold.runtime import Hooks, ParamHandle


def close_engine(
    state: TrainState,
    saving: Saving,
    hooks: Hooks,
    handles: list[ParamHandle],
    memory: OffloadMemory | None,
    reports: StepReports | None,
    *,
    lingers: bool = True,
) -> None:
    """The engine goes. What is in flight arrives first: other ranks count on it, and so does the model. `lingers`: rank
    0 may still be about to save, and gets this rank's part.
    """
    if threading.current_thread().name.startswith("onefold-"):
        # The garbage collector runs on one of the threads that are waited for below.
        given = (state, saving, hooks, handles, memory, reports)
        threading.Thread(target=_close_beside, args=given, name="closing-onefold").start()
        return
    if lingers and not _collecting and not sys.is_finalizing() and not hasattr(sys, "last_value"):
        saving.linger(LINGER)
    saving.stop()
    if reports is not None:
        reports.close()
    schedule = state.schedule
    try:
        try:
            schedule.wait_for_step()
        except Exception as error:  # whatever a user's optimizer raised on the host, or a disk: the engine goes
            logger.warning(
                "the engine goes after a step that failed, and leaves weights of no step: %s: %s",
                type(error).__name__,
                error,
            )
            schedule.abandon_step()
            if memory is not None:
                memory.drain()  # what did not fail may still be under way
        hooks.remove()
        reload_states(state, ("hp_params", "lp_params"), non_blocking=False)
        schedule.reshard_all()
        for handle in handles:
            try:
                handle.stand_alone()
            except OSError as error:  # of a disk: what rested there cannot be read any more, and says so when it is
                logger.error("weights that rested on a disk are lost with the engine: %s", error)
            except RuntimeError as error:  # of a device that has failed
                logger.error("weights could not be kept when the engine went: %s", error)
        handles.clear()
    finally:
        if memory is not None:
            memory.close()
        schedule.order.agreement.guard.close()  # after the last wait, which would be watched for a while longer


def _close_beside(state: TrainState, *rest: Any) -> None:
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)  # a new thread begins with the first GPU
    close_engine(state, *rest, lingers=False)


# Whether the garbage collector runs, in which nobody should wait for other ranks.
_collecting = False


def _see_collection(phase: str, info: Any) -> None:
    global _collecting
    _collecting = phase == "start"


gc.callbacks.append(_see_collection)

_pauses: set[int] = set()


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
    if number in _pauses:
        _pauses.remove(number)
        if not _pauses:
            gc.enable()
