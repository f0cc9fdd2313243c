"""The parts of the hang detector, in one process: what is published, blocked calls, and torch's NCCL switches."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import onefold
from onefold.comm import main_thread, mesh
from onefold.comm.guard import Guard, PassProgress, RankActivity, Wait
from onefold.comm.hang_detector import _PeriodicThread

# -- what is published -------------------------------------------------------------------------------------------


def test_a_request_counts_in_its_own_pass_only():
    """The detector may read a request of one pass and deliver it when the next has begun."""
    passes = Guard()
    passes.begin_pass()
    read_before = passes.progress.pass_number
    passes.begin_pass()
    passes.deliver_request(read_before)
    assert not passes.divergence_requested
    passes.deliver_request(passes.progress.pass_number)
    assert passes.divergence_requested
    passes.answer_request()
    assert not passes.divergence_requested
    assert passes.saw_request(passes.progress.pass_number)  # other ranks may still count on that
    passes.begin_pass()
    assert not passes.divergence_requested


def test_a_pass_begins_without_launches_of_the_last():
    passes = Guard()
    passes.number_passes_from(1000)
    passes.record_launches(7)
    taken = passes.progress
    passes.begin_pass()
    assert (taken, passes.progress) == (PassProgress(1000, 7), PassProgress(1001, 0))


def wait(what: str, *, launches: bool = False) -> Wait:
    return Wait(SimpleNamespace(), what, launches=launches)


def test_the_innermost_wait_is_published():
    activity, outer, inner = RankActivity(), wait("the step"), wait("gather of 0", launches=True)
    assert activity.snapshot().wait is None
    activity.begin_wait(outer)
    activity.begin_wait(inner)
    now = activity.snapshot()
    assert now.wait is inner
    assert (now.num_waits, now.num_launched, now.last_launch) == (2, 1, "gather of 0")
    activity.end_wait(inner)
    assert activity.snapshot().wait is outer
    activity.end_wait(outer)
    assert activity.snapshot().wait is None


def test_a_wait_that_has_ended_does_not_come_back():
    """Waits of two threads overlap: the first to begin ends first."""
    activity, first, second = RankActivity(), wait("a"), wait("b")
    activity.begin_wait(first)
    activity.begin_wait(second)
    activity.end_wait(first)
    activity.end_wait(second)
    assert activity.snapshot().wait is None


# -- blocked calls -----------------------------------------------------------------------------------------------

Block = Callable[[threading.Lock, SimpleNamespace], object]


def in_one_line(lock: threading.Lock, work: SimpleNamespace) -> object:
    return [work.wait()]


def in_several_lines(lock: threading.Lock, work: SimpleNamespace) -> object:
    return (
        work
        .wait(
            True
        )
    )  # fmt: skip


def beside_a_wait(lock: threading.Lock, work: SimpleNamespace) -> object:
    return lock.acquire(), work.wait


def as_an_argument(lock: threading.Lock, work: SimpleNamespace) -> object:
    return lock.acquire(bool(work.wait))


def without_source() -> Block:
    names: dict[str, Block] = {}
    exec("def block(lock, work):\n    work.wait()", names)
    return names["block"]


@pytest.mark.parametrize(
    ("block", "waits"),
    [(in_one_line, True), (in_several_lines, True), (beside_a_wait, False), (as_an_argument, False)],
)
def test_a_wait_that_is_not_written_in_python_is_found_by_its_source(block, waits):
    assert calls_wait(block) == waits


def test_a_wait_without_source_is_not_taken_for_one():
    assert not calls_wait(without_source())


def calls_wait(block: Block) -> bool:
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=block, args=(lock, SimpleNamespace(wait=lock.acquire)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while sys._current_frames()[thread.ident or 0].f_code is not block.__code__ and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # until it blocks
    try:
        return main_thread._calls_wait(sys._current_frames()[thread.ident or 0])
    finally:
        lock.release()
        thread.join(10)


# -- torch's NCCL switches ---------------------------------------------------------------------------------------

SWITCHES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def switches_after_init(**given: str) -> dict[str, str]:
    """The switches in the environment after `init_distributed` on a machine with a GPU, which makes no group here."""
    with (
        mock.patch.dict(os.environ, {}, clear=False),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(mesh.dist, "is_initialized", return_value=False),
        mock.patch.object(mesh.dist, "init_process_group"),
        mock.patch.object(mesh, "world_detector"),
    ):
        for name in ("RANK", "WORLD_SIZE", *SWITCHES):
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in given.items() if name in SWITCHES})
        options = {name: value for name, value in given.items() if name not in SWITCHES}
        onefold.init_distributed(**options)
        return {name: os.environ[name] for name in SWITCHES if name in os.environ}


def test_torchs_switches_are_off_by_default_and_untouched_with_the_key():
    assert switches_after_init() == dict.fromkeys(SWITCHES, "0")
    assert switches_after_init(nccl_error_handling="onefold") == dict.fromkeys(SWITCHES, "0")
    assert switches_after_init(nccl_error_handling="torch") == {}


def test_switches_that_the_user_has_set_stay():
    assert switches_after_init(TORCH_NCCL_ASYNC_ERROR_HANDLING="3", TORCH_FR_BUFFER_SIZE="20") == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": "20",
    }


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("section", [{}, {"nccl_error_handling": "torch"}])
def test_the_key_is_read_before_the_process_group_is_made(section):
    expected = section.get("nccl_error_handling", "onefold")
    settings = {"train_batch_size": 1, "onefold": section}
    for name, make in {
        "onefold.start": lambda: onefold.initialize(model=nn.Linear(2, 2), config=settings),
        "onefold.zero": lambda: onefold.zero.Init(config_dict_or_path=settings),
    }.items():
        with mock.patch(f"{name}.init_distributed", side_effect=StoppedError) as init, pytest.raises(StoppedError):
            make()
        assert init.call_args.kwargs["nccl_error_handling"] == expected


def test_a_thread_that_is_being_started_can_be_stopped():
    """An engine is closed while the thread restarts itself, because a wait has begun."""
    calls: list[str] = []
    periodic = _PeriodicThread("onefold-test", RankActivity(), lambda: calls.append("work"), lambda: True)
    start, started = threading.Thread.start, []

    def stop_before(thread: threading.Thread) -> None:
        periodic.stop()
        started.append(thread)
        start(thread)

    with mock.patch.object(threading.Thread, "start", stop_before):
        periodic.start()
    started[0].join(5)
    assert not started[0].is_alive()
    assert calls == []
