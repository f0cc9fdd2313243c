"""Start the ranks of this host: torch's elastic agent does the work, this file chooses what a person sees of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    command: str
    arguments: tuple[str, ...] = ()

    @staticmethod
    def script(path: str, arguments: tuple[str, ...]) -> Program:
        """A Python script; its traceback is kept for the launcher."""
        return Program(sys.executable, ("-u", "-m", "onefold.cli.rank", path, *arguments))

    @staticmethod
    def module(name: str, arguments: tuple[str, ...]) -> Program:
        """A Python module, as `python -m` runs it; its traceback is kept for the launcher."""
        return Program(sys.executable, ("-u", "-m", "onefold.cli.rank", "--module", name, *arguments))


@dataclass(frozen=True)
class Job:
    """How many ranks, and where they meet."""

    ranks_per_node: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether nobody but this host need know where ranks meet."""
        return self.num_nodes == 1 and self.master_port is None

    def launch_config(self, log_dir: str) -> LaunchConfig:
        """The same job in torchrun's terms."""
        alone = self.is_alone
        # With static rendezvous restarted ranks would find the addresses of the dead ones in the old store; with c10d
        # they meet anew, and the node ranks follow from that.
        backend = "c10d" if alone or self.max_restarts > 0 else "static"
        configs: dict[str, Any] = {"store_type": "file"} if alone else {}
        configs |= {"rank": self.node_rank} if backend == "static" else {}
        return LaunchConfig(
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=self.ranks_per_node,
            run_id=f"onefold_{os.getpid()}" if alone else "onefold",
            rdzv_backend=backend,
            # Alone, agents meet in a file, and no port is open but the ranks' own; with others, everybody must know
            # the address beforehand.
            rdzv_endpoint=os.path.join(log_dir, "rendezvous")
            if alone
            else f"{self.master_addr or 'localhost'}:{self.master_port or 29500}",
            rdzv_configs=configs,
            # A host often cannot resolve its own name, and alone it need not.
            local_addr="localhost" if self.num_nodes == 1 else None,
            max_restarts=self.max_restarts,
            logs_specs=_AttemptLogs(log_dir, self.max_restarts),
        )


def run_ranks(program: Program, job: Job) -> int:
    """Run `program` in every rank of this host until all are done; the exit code the command should end with."""
    _quiet_the_agent()
    if job.max_restarts > 0 or job.is_alone:
        # Else the restarted ranks find the addresses of the dead ones in the store that they share with the agent; and
        # the agent's listens on all interfaces, that of the ranks where the job is.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.ranks_per_node)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="onefold_", ignore_cleanup_errors=True) as log_dir:
        try:
            elastic_launch(job.launch_config(log_dir), program.command)(*program.arguments)
        except ChildFailedError as error:
            return _report_failure(error.failures)
        except SignalException as stopped:
            return _report_signal(stopped.sigval)
        except KeyboardInterrupt:  # before the agent had its own handler
            return _report_signal(signal.SIGINT)
        finally:
            # The agent leaves its handlers behind, and they raise.
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


class _AttemptLogs(DefaultLogsSpecs):
    """Asked for the error files of each attempt, it first shows what ended the one before: otherwise nobody would."""

    def __init__(self, log_dir: str, max_restarts: int) -> None:
        super().__init__(log_dir=log_dir)
        self._max_restarts = max_restarts
        self._error_files: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if attempt > 0:
            failures = {
                int(envs[local_rank]["RANK"]): ProcessFailure(local_rank, pid=0, exitcode=1, error_file=error_file)
                for local_rank, error_file in self._error_files.items()
                if os.path.exists(error_file)
            }
            if failures:
                rank = first_failure(failures)
                _say(_traceback(failures[rank]).rstrip())
                _say(f"onefold: rank {rank} failed")
            _say(f"onefold: starting the ranks again, restart {attempt} of {self._max_restarts}")
        destination = super().reify(envs)
        self._error_files = destination.error_files
        return destination


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed by itself; the others failed because it was gone, or were ended by the agent."""

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        when = float(_extra_information(failure).get("exact_timestamp", failure.timestamp))
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        # A killed process writes no file, so its time is when the agent looked, up to a second after its peers noticed.
        return ended_by_agent, when - 1 if failure.exitcode < 0 else when

    return min(failures, key=order)


def _report_failure(failures: Mapping[int, ProcessFailure]) -> int:
    rank = first_failure(failures)
    failure = failures[rank]
    if failure.exitcode == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED
    if failure.exitcode == EXIT_USAGE and isinstance(failure.message, dict):
        _say(f"onefold: {failure.message['message']}")
        return EXIT_USAGE
    _say(_traceback(failure).rstrip())
    if failure.exitcode < 0:
        reason, exit_code = failure.signal_name(), 128 - failure.exitcode
        if failure.exitcode == -signal.SIGKILL:
            reason += " (perhaps the host ran out of memory)"
    else:
        reason, exit_code = f"exit code {failure.exitcode}", failure.exitcode
    _say(f"onefold: rank {rank} (host {socket.gethostname()}, pid {failure.pid}) failed: {reason}")
    return exit_code


def _report_signal(number: signal.Signals) -> int:
    _say(f"onefold: stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}; all ranks have ended")
    return 128 + number


def _extra_information(failure: ProcessFailure) -> dict[str, Any]:
    # The annotation says `str`; with an error file it is the dictionary that was written there.
    message: Any = failure.message
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _traceback(failure: ProcessFailure) -> str:
    return str(_extra_information(failure).get("py_callstack", ""))


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def _quiet_the_agent() -> None:
    """The agent logs every death, also those it brings about; ask for it with LOGLEVEL or TORCH_LOGS."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
