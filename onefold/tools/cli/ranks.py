"""Start the ranks of this node with torch's elastic agent, and report the failure that ended them.

The launcher starts each rank as `python -m onefold.tools.cli.ranks [--module] SCRIPT ...`. This runs SCRIPT as Python
would, except that the traceback of an uncaught exception is written to the file that the agent reads, not to the
terminal. When one rank fails, its peers fail too, on broken connections; the launcher reports the first failure.

torch is imported by the launcher only, not in a rank, because a script may set variables that torch reads at import.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


# -- the launcher ----------------------------------------------------------------------------------------------------


def python_command(name: str, *arguments: str, is_module: bool, local_rank: bool = False) -> list[str]:
    """A Python script, or a module as `python -m` runs it; its traceback is kept for the launcher.

    With `local_rank` the script's first argument is `--local_rank=N`, as DeepSpeed's launcher has it.
    """
    flags = [*(["--local_rank"] if local_rank else []), *(["--module"] if is_module else [])]
    return [sys.executable, "-u", "-m", "onefold.tools.cli.ranks", *flags, name, *arguments]


@dataclass(frozen=True)
class Job:
    """How many ranks this node starts, which node it is, and where all ranks meet."""

    num_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    visible_devices: str | None = None
    """What CUDA_VISIBLE_DEVICES is set to; None leaves it as it is."""
    max_restarts: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether nobody but this node need know where ranks meet."""
        return self.num_nodes == 1 and self.master_port is None

    def launch_config(self, log_dir: str) -> LaunchConfig:
        """The same job in torchrun's terms."""
        from torch.distributed.launcher.api import LaunchConfig

        alone = self.is_alone
        # With static rendezvous restarted ranks would find the addresses of the dead ones in the old store; with c10d
        # they meet anew, and the node ranks follow from that.
        backend = "c10d" if alone or self.max_restarts > 0 else "static"
        configs: dict[str, Any] = {"rank": self.node_rank} if backend == "static" else {}
        # Alone, agents meet in a file, and no port is open but the ranks' own; with others, everybody must know the
        # address beforehand.
        endpoint = f"{self.master_addr or 'localhost'}:{self.master_port or 29500}"
        if alone:
            endpoint, configs = os.path.join(log_dir, "rendezvous"), {"store_type": "file"}
        return LaunchConfig(
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=self.num_ranks,
            run_id=f"onefold_{os.getpid()}" if alone else "onefold",
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=configs,
            # A node often cannot resolve its own name, and alone it need not.
            local_addr="localhost" if self.num_nodes == 1 else None,
            max_restarts=self.max_restarts,
            logs_specs=_attempt_logs(log_dir, self.max_restarts),
        )


def run_ranks(command: Sequence[str], job: Job) -> int:
    """Run a command in every rank of this node until all are done; the exit code the command should end with."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _quiet_the_agent()
    if job.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.visible_devices
    if job.max_restarts > 0 or job.is_alone:
        # Else the restarted ranks find the addresses of the dead ones in the store that they share with the agent; and
        # the agent's listens on all interfaces, that of the ranks where the job is.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.num_ranks)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="onefold_", ignore_cleanup_errors=True) as log_dir:
        try:
            elastic_launch(job.launch_config(log_dir), command[0])(*command[1:])
        except ChildFailedError as error:
            return _report_failure(error.failures)
        except SignalException as stopped:
            return _report_signal(stopped.sigval)
        except (DistNetworkError, DistStoreError, RendezvousError) as error:
            where = f"{job.master_addr or 'localhost'}:{job.master_port or 29500}"
            _say(f"onefold: the ranks cannot meet at {where}: {str(error).splitlines()[0]}")
            return EXIT_FAILED
        except KeyboardInterrupt:  # before the agent had its own handler
            return _report_signal(signal.SIGINT)
        finally:
            # The agent leaves its handlers behind, and they raise.
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


def _attempt_logs(log_dir: str, max_restarts: int) -> LogsSpecs:
    """Asked for the error files of each attempt, it first shows what ended the one before: otherwise nobody would."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    class AttemptLogs(DefaultLogsSpecs):
        error_files: Mapping[int, str] = {}

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
            if attempt > 0:
                failures = {
                    int(envs[local_rank]["RANK"]): ProcessFailure(local_rank, pid=0, exitcode=1, error_file=error_file)
                    for local_rank, error_file in self.error_files.items()
                    if os.path.exists(error_file)
                }
                if failures:
                    rank = first_failure(failures)
                    _say(_traceback(failures[rank]).rstrip())
                    _say(f"onefold: rank {rank} failed")
                _say(f"onefold: starting the ranks again, restart {attempt} of {max_restarts}")
            destination = super().reify(envs)
            self.error_files = destination.error_files
            return destination

    return AttemptLogs(log_dir=log_dir)


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
    if failure.exitcode in (EXIT_INTERRUPTED, EXIT_BROKEN_PIPE):
        return int(failure.exitcode)
    if failure.exitcode == EXIT_USAGE and isinstance(failure.message, dict):
        _say(f"onefold: {failure.message['message']}")
        return EXIT_USAGE
    _say(_traceback(failure).rstrip())
    reason = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL:
        reason += " (perhaps the host ran out of memory)"
    _say(f"onefold: rank {rank} (host {socket.gethostname()}, pid {failure.pid}) failed: {reason}")
    return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode


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


# -- one rank --------------------------------------------------------------------------------------------------------

OWN_FILES = (__file__, "<frozen runpy>", runpy.__file__)


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook: the traceback, without the frames of this file, in torch's error-file format."""
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher was interrupted too, and says so once
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        sys.stderr.write(text)
        return
    now = time.time()
    # torch reads whole seconds; ranks fail within milliseconds of each other, so the launcher needs the rest.
    extra = {"py_callstack": text, "timestamp": str(int(now)), "exact_timestamp": now}
    # The agent may end this rank at any moment, and cannot read half a file.
    part = f"{error_file}.part"
    with open(part, "w") as file:
        json.dump({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}}, file)
    os.replace(part, error_file)


def run_script(arguments: list[str]) -> None:
    """Run a script, or after `--module` a module, with the rest as its arguments."""
    sys.excepthook = record_exception
    if arguments[0] == "--local_rank":
        arguments = arguments[1:]
        arguments.insert(1 + (arguments[0] == "--module"), f"--local_rank={os.environ['LOCAL_RANK']}")
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        # As for `python SCRIPT`: imports are looked up beside the script, not in the folder it was started from.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
