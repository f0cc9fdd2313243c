"""Signals of schedulers: all ranks stop after one step, with a checkpoint that resumes the run bit for bit."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stop_script
from covering import covering
from models import more
from processes import MarkedJob, marked_job, wait_until

pytestmark = pytest.mark.program

SCRIPT = str(Path(stop_script.__file__))
OnRanks = Callable[..., list[Any]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


def start(job: MarkedJob, **options: Any) -> subprocess.Popen[str]:
    given = json.dumps({"folder": str(job.folder), **options})
    return job.launch("--nproc", str(options.get("ranks", 2)), "--max-restarts", "2", SCRIPT, given)


def stop_to(job: MarkedJob, **keys: Any) -> dict[str, Any]:
    return {"save_to": str(job.folder / "saved"), **keys}


def wait_for_pids(job: MarkedJob, *ranks: int) -> list[int]:
    files = [job.folder / f"pid.{rank}" for rank in ranks]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def losses(folder: Path) -> list[list[str]]:
    """Return the losses of each rank."""
    return [file.read_text().split() for file in sorted(folder.glob("losses.*"))]


def run_to_the_end(on_ranks: OnRanks, folder: Path, options: dict[str, Any]) -> None:
    """Run the script on ranks that are there anyway."""
    on_ranks(options.get("ranks", 2), stop_script.main, {"folder": str(folder), **options})


@functools.cache
def straight_losses(on_ranks: OnRanks, options: str) -> list[list[str]]:
    """Return the losses of a run without a signal."""
    with tempfile.TemporaryDirectory() as folder:
        run_to_the_end(on_ranks, Path(folder), json.loads(options))
        return losses(Path(folder))


def check_resumed(on_ranks: OnRanks, job: MarkedJob, **options: Any) -> None:
    """Check that a second start continues from the checkpoint, with the losses of a run without a signal."""
    before = losses(job.folder)
    run_to_the_end(on_ranks, job.folder, options)
    assert losses(job.folder) == straight_losses(on_ranks, json.dumps(options))
    assert 0 < len(before[0]) < len(losses(job.folder)[0])


@covering(
    target=("all ranks", more("launcher"), more("one rank")),
    pause=("backward", more("accumulation"), more("forward"), more("save")),
    stage=(2, more(0), more(1), more(3)),
    strength=1,
    where=lambda target, pause, stage: stage == 2 or (target, pause) == ("one rank", "accumulation"),
)
def test_a_signal_saves_and_ends_the_job(
    on_ranks: OnRanks, job: MarkedJob, target: str, pause: str, stage: int
) -> None:
    options = {"stage": stage, "accumulation": 2 if pause == "accumulation" else 1}
    launcher = start(job, pause=pause, stop=stop_to(job), save_every_step=pause == "save", **options)
    pids = wait_for_pids(job, *((0,) if pause == "save" else (0, 1)))
    number = signal.SIGUSR1 if target == "launcher" else signal.SIGTERM
    for pid in {"launcher": [launcher.pid], "one rank": pids[-1:], "all ranks": pids}[target]:
        os.kill(pid, number)
    time.sleep(0.1)
    (job.folder / "go").touch()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, stderr
    last = 4 if pause == "save" else 3
    assert f"stopped by {number.name} after step {last}, saving to {job.folder}/saved" in stderr
    assert f"onefold: stopped by {number.name}; all ranks have ended" in stderr
    assert "restart" not in stderr
    assert "Traceback" not in stderr
    job.wait_until_gone(2)
    assert [len(each) for each in losses(job.folder)] == [last * options["accumulation"]] * 2
    check_resumed(on_ranks, job, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"config": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 23, "hysteresis": 1}}},
        {"config": {"managed_gradient_accumulation": False}},
        {"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    ],
    ids=["a step that is skipped", "the caller counts micro-steps", "offload"],
)
def test_other_steps_stop_too(on_ranks: OnRanks, job: MarkedJob, options: dict[str, Any]) -> None:
    launcher = start(job, pause="backward", stop=stop_to(job), **options)
    os.kill(wait_for_pids(job, 0, 1)[1], signal.SIGTERM)
    (job.folder / "go").touch()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM, stderr
    assert stderr.count("step skipped: overflow") == (3 if "fp16" in options["config"] else 0), "also the paused one"
    check_resumed(on_ranks, job, **options)


@pytest.mark.slow
def test_a_job_of_one_rank_stops_without_a_launcher(on_ranks: OnRanks, job: MarkedJob) -> None:
    def run(**options: Any) -> subprocess.Popen[str]:
        return job.start([sys.executable, SCRIPT, json.dumps({"folder": str(job.folder), **options})])

    process = run(pause="backward", stop=stop_to(job), accumulation=2)
    os.kill(wait_for_pids(job, 0)[0], signal.SIGUSR1)
    (job.folder / "go").touch()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, stderr
    assert run(accumulation=2).wait(60) == 0
    assert losses(job.folder) == straight_losses(on_ranks, json.dumps({"ranks": 1, "accumulation": 2}))


@pytest.mark.parametrize("second", [True, more(False)])
def test_a_rank_ends_at_a_second_signal_or_after_its_time(job: MarkedJob, second: bool) -> None:
    """Rank 1 hangs in its backward. Rank 0 waits for it in a collective, in which no signal handler of Python runs."""
    stop = stop_to(job, signals="SIGUSR2", seconds=20.0 if second else 1.5)
    launcher = start(job, pause="backward", pausing_ranks=[1], stop=stop)
    wait_for_pids(job, 1)
    pids = [pid for pid in job.pids() if pid != launcher.pid]
    for count in range(1 + second):
        time.sleep(1.2 * count)
        assert launcher.poll() is None
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
    _, stderr = launcher.communicate(timeout=10)
    assert launcher.returncode == 128 + signal.SIGUSR2, stderr
    reason = "a second signal has arrived" if second else "it has not stopped within 1.5 s"
    for rank in (0, 1):
        assert f"onefold: rank {rank} received SIGUSR2 and ends without a further save: {reason}\n" in stderr
    job.wait_until_gone(2)


@pytest.mark.slow
def test_the_launcher_kills_ranks_five_seconds_after_their_time(job: MarkedJob) -> None:
    launcher = start(job, pause="forward", stop=stop_to(job, seconds=1.0))
    for pid in wait_for_pids(job, 0, 1):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    launcher.terminate()
    assert launcher.wait(20) == 128 + signal.SIGTERM
    assert 5.5 < time.monotonic() - began < 12
    job.wait_until_gone(2)


@pytest.mark.slow
def test_a_program_may_save_and_exit_itself(on_ranks: OnRanks, job: MarkedJob) -> None:
    launcher = start(job, pause="forward", stop={"signals": ["SIGTERM"]})
    os.kill(wait_for_pids(job, 0, 1)[0], signal.SIGTERM)
    (job.folder / "go").touch()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM, stderr
    assert (job.folder / "own" / "latest").read_text() == "global_step3"
    check_resumed(on_ranks, job)


@pytest.mark.slow
def test_data_loader_workers_survive_sigusr1(job: MarkedJob) -> None:
    """A scheduler may send a signal to all processes of a job."""
    launcher = start(job, pause="forward", stop=stop_to(job), workers=True)
    wait_for_pids(job, 0, 1)
    pids = [pid for pid in job.pids() if pid != launcher.pid]
    assert len(pids) >= 4
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    assert set(pids) <= set(job.pids())
    (job.folder / "go").touch()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGUSR1, stderr
    assert "after step 3, saving" in stderr
    job.wait_until_gone(2)


@pytest.mark.slow
def test_without_the_main_thread_signals_are_not_handled(job: MarkedJob) -> None:
    launcher = start(job, pause="forward", stop=stop_to(job), thread=True)
    wait_for_pids(job, 0, 1)
    launcher.terminate()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    for rank in (0, 1):
        assert f"onefold.stop: rank {rank} handles no signals, because" in stderr
    assert not (job.folder / "saved").exists()


@pytest.mark.slow
def test_ctrl_c_during_a_save_keeps_the_checkpoint_before(on_ranks: OnRanks, job: MarkedJob) -> None:
    launcher = start(job, pause="save", save_every_step=True)
    wait_for_pids(job, 0)
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT, stderr
    job.wait_until_gone(2)
    assert (job.folder / "own" / "latest").read_text() == "global_step2"
    for file in job.folder.glob("losses.*"):  # without the step that was not saved
        file.write_text("".join(f"{line}\n" for line in file.read_text().split()[:2]))
    check_resumed(on_ranks, job)


HANDLERS = """
import os, signal, sys, time, torch, onefold
from onefold.stop_signals import LISTENER
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
model = torch.nn.Linear(4, 4)
stop = {"signals": ["SIGTERM", "SIGUSR1"]}
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "onefold": {"stop": stop}}
first = onefold.initialize(model=model, config=config)[0]
second = onefold.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
child = os.fork()
if not child:  # a data loader worker: SIGTERM ends it, SIGUSR1 does not
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.2)
assert LISTENER.number == 0, "a signal to a forked process"
def step(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
step(first)
first.close()
assert second.stop_requested is None
if sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert told == [signal.SIGTERM], "the handler of the program runs too"
    assert second.stop_requested is None, "before the next step"
    step(second)
    assert second.stop_requested == signal.SIGTERM
else:
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"
    assert signal.set_wakeup_fd(-1) == -1
    third = onefold.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)
    step(third)
    assert third.stop_requested == signal.SIGUSR1
print("done")
"""


@pytest.mark.parametrize("case", ["signal", more("closed")])
def test_engines_share_the_handlers_and_give_them_back(job: MarkedJob, case: str) -> None:
    process = job.start([sys.executable, "-c", HANDLERS, case])
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "done\n"), stderr
