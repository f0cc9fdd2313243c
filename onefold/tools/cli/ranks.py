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
    """Return the command that runs a script or a module in a rank, with its traceback recorded for the launcher.

    With `local_rank` the script's first argument is `--local_rank=N`, as with DeepSpeed's launcher.
    """
    flags = [*(["--local_rank"] if local_rank else []), *(["--module"] if is_module else [])]
    return [sys.executable, "-u", "-m", "onefold.tools.cli.ranks", *flags, name, *arguments]


@dataclass(frozen=True)
class Job:
    """The ranks that this node starts, its rank among the nodes, and the address of the rendezvous."""

    num_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    visible_devices: str | None = None
    """The value of CUDA_VISIBLE_DEVICES; None leaves it unchanged."""
    max_restarts: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the rendezvous is local to this node."""
        return self.num_nodes == 1 and self.master_port is None

    def launch_config(self, log_dir: str) -> LaunchConfig:
        """Return the job as a configuration of torch's elastic agent."""
        from torch.distributed.launcher.api import LaunchConfig

        alone = self.is_alone
        # With a static rendezvous, restarted ranks would find the addresses of dead ones in the old store. With c10d
        # they synchronize again, and the ranks of nodes follow from that.
        backend = "c10d" if alone or self.max_restarts > 0 else "static"
        configs: dict[str, Any] = {"rank": self.node_rank} if backend == "static" else {}
        # On one node the agent uses a file, so that only the ranks open a port. Several nodes need an address that all
        # of them know beforehand.
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
            # A node often cannot resolve its own hostname.
            local_addr="localhost" if self.num_nodes == 1 else None,
            max_restarts=self.max_restarts,
            logs_specs=_attempt_logs(log_dir, self.max_restarts),
        )


def run_ranks(command: Sequence[str], job: Job) -> int:
    """Run a command in every rank of this node until all end, and return the exit code of the launcher."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _silence_agent()
    if job.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.visible_devices
    if job.max_restarts > 0 or job.is_alone:
        # Otherwise restarted ranks would find the addresses of dead ones in the store that they share with the agent,
        # which also listens on all interfaces.
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
            _print_error(f"onefold: the ranks cannot connect to {where}: {str(error).splitlines()[0]}")
            return EXIT_FAILED
        except KeyboardInterrupt:  # before the agent installed its handler
            return _report_signal(signal.SIGINT)
        finally:
            # The agent does not remove its signal handlers, which raise.
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


def _attempt_logs(log_dir: str, max_restarts: int) -> LogsSpecs:
    """Return log settings that report the failure of an attempt before the next one starts. The agent does not."""
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
                    _print_error(_traceback(failures[rank]).rstrip())
                    _print_error(f"onefold: rank {rank} failed")
                _print_error(f"onefold: restarting all ranks, restart {attempt} of {max_restarts}")
            destination = super().reify(envs)
            self.error_files = destination.error_files
            return destination

    return AttemptLogs(log_dir=log_dir)


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank that failed first. The others failed because it was gone, or were ended by the agent."""

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        when = float(_extra_information(failure).get("exact_timestamp", failure.timestamp))
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        # A killed process writes no file. The agent notices it up to a second after its peers failed.
        return ended_by_agent, when - 1 if failure.exitcode < 0 else when

    return min(failures, key=order)


def _report_failure(failures: Mapping[int, ProcessFailure]) -> int:
    rank = first_failure(failures)
    failure = failures[rank]
    if failure.exitcode in (EXIT_INTERRUPTED, EXIT_BROKEN_PIPE):
        return int(failure.exitcode)
    if failure.exitcode == EXIT_USAGE and isinstance(failure.message, dict):
        _print_error(f"onefold: {failure.message['message']}")
        return EXIT_USAGE
    _print_error(_traceback(failure).rstrip())
    reason = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL:
        reason += " (the node may be out of memory)"
    _print_error(f"onefold: rank {rank} (node {socket.gethostname()}, pid {failure.pid}) failed: {reason}")
    return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode


def _report_signal(number: signal.Signals) -> int:
    _print_error(f"onefold: stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}; all ranks have ended")
    return 128 + number


def _extra_information(failure: ProcessFailure) -> dict[str, Any]:
    # Despite its annotation, the message is the dictionary of the error file if there is one.
    message: Any = failure.message
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _traceback(failure: ProcessFailure) -> str:
    return str(_extra_information(failure).get("py_callstack", ""))


def _print_error(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def _silence_agent() -> None:
    """Suppress the log of the agent, which also reports ranks that it ends, unless LOGLEVEL or TORCH_LOGS is set."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


# -- one rank --------------------------------------------------------------------------------------------------------

OWN_FILES = (__file__, "<frozen runpy>", runpy.__file__)


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback without the frames of this file to torch's error file. This is an excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher was interrupted too, and reports it once
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        sys.stderr.write(text)
        return
    now = time.time()
    # torch stores whole seconds, but ranks fail within milliseconds of each other.
    extra = {"py_callstack": text, "timestamp": str(int(now)), "exact_timestamp": now}
    # Rename a complete file, because the agent may end this rank at any time.
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
        # As with `python SCRIPT`, imports are resolved next to the script, not in the current folder.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
