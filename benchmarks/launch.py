"""Runs one system in fresh processes, one a rank, and gathers what the ranks measured. A failure is an outcome too.

[Note: NCCL ranks on one GPU]
NCCL refuses two ranks on one device only if both say they are on the same host, and `NCCL_HOSTID` is what a rank says.
So where there are more ranks than GPUs each says another one, and NCCL connects them by sockets of the loopback. With
CUDA's MPS daemon their kernels run side by side; without it the device switches between processes, and every small
collective costs milliseconds. It is not NVLink: how systems compare there is real, bandwidth and latency are not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.systems import Workload, missing_reason

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """One run of one system: the slowest and fullest of its ranks, or the reason why there are no figures."""

    system: str
    error: str | None = None
    num_parameters: int = 0
    num_active_parameters: int = 0
    """Those that compute a token; fewer in a mixture of experts."""
    step_seconds: list[float] = field(default_factory=list)
    startup_seconds: float = 0.0
    resident_mb: float = 0.0
    rest_mb: float = 0.0
    """Resident memory at its peak, and after the last step."""
    gpu_mb: float = 0.0
    startup_gpu_mb: float = 0.0
    """Until the first step's end; `gpu_mb` is the peak after it."""
    collectives: int = 0
    host_exchanges: int = 0
    sent_mb: float | None = None
    """What a rank sends in a step, where ranks talk over the loopback."""
    losses: list[float] = field(default_factory=list)

    @property
    def step_mean(self) -> float:
        """Overlap lets ranks drift apart and steps borrow from each other: only the whole stretch is a measure."""
        return statistics.mean(self.step_seconds)


def run(
    system: str, workload: Workload, num_ranks: int, timeout: float, environment: dict[str, str] | None = None
) -> Outcome:
    reason = missing_reason(system)
    if reason is not None:
        return Outcome(system, error=reason)
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        logs = [Path(folder, f"{rank}.log") for rank in range(num_ranks)]
        ranks = _start(system, workload, results, logs, environment or {})
        problem = wait(ranks, timeout)
        if problem is not None and not all(result.exists() for result in results):
            rank, what = problem
            return Outcome(system, error=f"rank {rank} {what}: {last_words(logs[rank])}")
        measured = [json.loads(result.read_text()) for result in results]
    return Outcome(
        system,
        num_parameters=measured[0]["num_parameters"],
        num_active_parameters=measured[0]["num_active_parameters"],
        step_seconds=max((rank["step_seconds"] for rank in measured), key=sum),
        startup_seconds=max(rank["startup_seconds"] for rank in measured),
        resident_mb=max(rank["resident_mb"] for rank in measured),
        rest_mb=max(rank["rest_mb"] for rank in measured),
        gpu_mb=max(rank["gpu_mb"] for rank in measured),
        startup_gpu_mb=max(rank["startup_gpu_mb"] for rank in measured),
        collectives=measured[0]["collectives"],
        host_exchanges=measured[0]["host_exchanges"],
        sent_mb=measured[0]["sent_mb"],
        losses=[statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in measured), strict=True)],
    )


def _start(
    system: str, workload: Workload, results: list[Path], logs: list[Path], environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    num_ranks = len(results)
    shared = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if workload.device == "cpu":
        # One thread a rank; DeepSpeed picks its accelerator from the environment.
        shared |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ranks = []
    for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
        arguments = [system, json.dumps(dataclasses.asdict(workload)), str(result), str(time.time())]
        with log.open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.worker", *arguments],
                    cwd=ROOT,
                    env={**shared, "RANK": str(rank), **_place(rank, num_ranks, workload)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return ranks


def shares_devices(num_ranks: int, workload: Workload) -> bool:
    return workload.device == "cuda" and num_ranks > torch.cuda.device_count()


def _place(rank: int, num_ranks: int, workload: Workload) -> dict[str, str]:
    """Where a rank computes and how it talks; see [Note: NCCL ranks on one GPU]."""
    if not shares_devices(num_ranks, workload):
        return {"LOCAL_RANK": str(rank)}
    device = str(rank % torch.cuda.device_count())
    return {"LOCAL_RANK": device, "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """CUDA's daemon for kernels of several processes, where there is one: what ranks need to find it, or nothing."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="onefold-mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}

        def control(*arguments: str, text: str = "") -> bool:
            if daemon is None:
                return False
            settings = {**os.environ, **places}
            return not subprocess.run(
                [daemon, *arguments], input=text, text=True, capture_output=True, env=settings
            ).returncode

        started = control("-d")
        try:
            yield places if started else {}
        finally:
            if started:
                control(text="quit\n")


def wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> tuple[int, str] | None:
    """Waits for all ranks; gives the first that failed and how. The others would wait for it for ever: they end too."""
    deadline = time.monotonic() + timeout
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            for rank, code in enumerate(codes):
                if code:
                    return rank, f"ended with {code}"
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > deadline:
                return codes.index(None), f"was still running after {timeout:.0f} s"
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def last_words(log: Path) -> str:
    """The last error line of a rank; later lines are often only noise of the shutdown."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    names = ("Error", "HostShortage")
    errors = [line for line in lines if any(name in line for name in names) and not line.startswith("File ")]
    return re.sub(r"^\[rank\d+\]: ", "", (errors or lines or ["no output"])[-1])[:300]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_all(
    systems: list[str], num_rounds: int, run_one: Callable[[str], Outcome], summary: Callable[[Outcome], str]
) -> dict[str, list[Outcome]]:
    """Runs every system once a round, so that noise hits all alike; prints a line and an estimate after each run."""
    outcomes: dict[str, list[Outcome]] = {system: [] for system in systems}
    num_runs, num_done, begun = len(systems) * num_rounds, 0, time.monotonic()
    for round_index in range(num_rounds):
        # Each round starts elsewhere: the first run after a pause is often the fastest.
        offset = round_index % len(systems)
        for system in systems[offset:] + systems[:offset]:
            failed_before = outcomes[system] and outcomes[system][-1].error
            outcome = outcomes[system][-1] if failed_before else run_one(system)
            outcomes[system].append(outcome)
            num_done += 1
            left = (time.monotonic() - begun) / num_done * (num_runs - num_done)
            what = f"no figures, {outcome.error}" if outcome.error else summary(outcome)
            print(f"[{num_done}/{num_runs}] {system}: {what} (about {left:.0f} s left)", flush=True)
    return outcomes
