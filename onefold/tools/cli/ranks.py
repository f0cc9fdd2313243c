"""Start the ranks of this node with an elastic agent, and report the failure that ended them.

When one rank fails, its peers fail too, on broken connections; the launcher reports the first failure. What a rank runs
is in `rank_script.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.job_secret import JOB_SECRET_FILE, ForgedMessageError, JobSecret
from onefold.storage.file_lock import lock_file
from onefold.tools.cli.rank_processes import EXIT_FAILED, print_error, report_failure, report_signal
from onefold.tools.cli.rank_script import PROGRAM_RANK, PYTHON_RANK

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from onefold.tools.cli.copy_keeper import CopyKeeper


_FOLDER_PREFIX, _COPIES_PREFIX = "onefold_launch_", "onefold_copies_"
_SHARED_MEMORY = "/dev/shm"

# -- the launcher ----------------------------------------------------------------------------------------------------


def python_command(name: str, *arguments: str, is_module: bool, local_rank: bool = False) -> list[str]:
    """Return the command that runs a script or a module in a rank, with its traceback recorded for the launcher.

    With `local_rank` the script's first argument is `--local_rank=N`, as with DeepSpeed's launcher.
    """
    flags = [*(["--local_rank"] if local_rank else []), *(["--module"] if is_module else [])]
    return [*PYTHON_RANK, *flags, name, *arguments]


def program_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a program other than Python in a rank."""
    return [*PROGRAM_RANK, "--program", name, *arguments]


@dataclass(frozen=True)
class Job:
    """The ranks that this node starts, its rank among the nodes, and the address of the rendezvous."""

    num_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    """Its rank among the nodes of a fixed number. 0 hosts the store of the job."""
    master_addr: str | None = None
    master_port: int | None = None
    visible_devices: str | None = None
    """The value of CUDA_VISIBLE_DEVICES; None leaves it unchanged."""
    max_restarts: int = 0

    min_nodes: int | None = None
    """The smallest number of nodes with which the job runs; None: all `num_nodes`."""
    forks_ranks: bool = False
    """Whether ranks are forked from a process that has imported torch. The command must be of Python."""

    @property
    def is_alone(self) -> bool:
        """Whether the rendezvous is local to this node."""
        return self.num_nodes == 1 and self.master_port is None

    @property
    def is_elastic(self) -> bool:
        """Whether the job runs with fewer nodes than `num_nodes`, too."""
        return self.min_nodes is not None and self.min_nodes < self.num_nodes

    @property
    def can_restart(self) -> bool:
        """Whether ranks are started again after a failure or a change of nodes."""
        return self.max_restarts > 0 or self.is_elastic

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return self.master_addr or "localhost", self.master_port or 29500

    def worker_spec(self, command: Sequence[str], folder: str, secret: JobSecret) -> WorkerSpec:
        """Return the job as torch's elastic agent expects it, with the rendezvous of its nodes."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from onefold.tools.cli.node_rendezvous import join_alone, join_fixed, join_nodes
        from onefold.tools.cli.rank_agent import SLEEP_SECONDS

        host, port = self.store_address
        # With a static rendezvous, restarted ranks would find the addresses of dead ones in the old store. With c10d
        # they synchronize again, and the ranks of nodes follow from that.
        is_static = not self.is_alone and not self.is_elastic and self.max_restarts == 0
        if self.is_alone:
            handler = join_alone(folder, secret)
        elif is_static:
            handler = join_fixed(self.num_nodes, self.node_rank, host, port, secret)
        else:
            least, is_host = self.min_nodes or self.num_nodes, self.node_rank == 0
            handler = join_nodes(least, self.num_nodes, host, port, is_host, secret)
        return WorkerSpec(
            role="default",
            local_world_size=self.num_ranks,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=handler,
            max_restarts=self.max_restarts,
            monitor_interval=SLEEP_SECONDS,
            master_addr=host if is_static else None,
            master_port=port if is_static else None,
            local_addr="localhost" if self.num_nodes == 1 else None,
        )


def run_ranks(command: Sequence[str], job: Job) -> int:
    """Run a command in every rank of this node until all end, and return the exit code of the launcher."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from onefold.tools.cli.fork_server import ForkServerError

    if job.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.visible_devices
    if job.max_restarts > 0 or job.is_alone or job.is_elastic:
        # Otherwise restarted ranks would find the addresses of dead ones in the store that they share with the agent,
        # which also listens on all interfaces.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.num_ranks)))
    try:
        with _locked_folder(_FOLDER_PREFIX) as folder, _copies_folder(job) as copies:
            return _run_agent(command, job, folder, copies)
    except (DistNetworkError, DistStoreError, RendezvousError) as error:  # before ranks were started
        print_error(f"onefold: the ranks cannot connect to {_store_name(job)}: {str(error).splitlines()[0]}")
        return EXIT_FAILED
    except ForkServerError as error:
        print_error(f"onefold: {error}")
        return EXIT_FAILED
    except ForgedMessageError as error:
        print_error(f"onefold: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:  # before the agent handles signals
        return report_signal(signal.SIGINT)


def _store_name(job: Job) -> str:
    host, port = job.store_address
    return f"{host}:{port}"


def _run_agent(command: Sequence[str], job: Job, folder: str, copies: Path | str) -> int:
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

    from onefold.tools.cli.node_rendezvous import JOIN_SECONDS, NodeRendezvous
    from onefold.tools.cli.rank_agent import RankAgent

    _silence_agent()
    secret = _job_secret(job)
    fork_server = None
    if job.forks_ranks:
        from onefold.tools.cli.fork_server import ForkServer

        fork_server = ForkServer()  # before the threads of the rendezvous
    spec = job.worker_spec(command, folder, secret)
    keeper = copies if isinstance(copies, str) else _copy_keeper(job, copies, secret)
    agent = RankAgent(spec, folder, secret, keeper, job.is_elastic, fork_server)
    is_left_open = False
    try:
        with agent.signals_handled():
            result = agent.run()
    except SignalException as stopped:
        is_left_open = True  # the other nodes may continue without this one
        agent.leave()
        failure = agent.failure
        if failure is not None and failure.traceback and not failure.was_asked and stopped.sigval != signal.SIGINT:
            print_error(failure.traceback.rstrip())
        return report_signal(stopped.sigval)
    except RendezvousClosedError:
        result = None
    except RendezvousTimeoutError:
        least = job.min_nodes or job.num_nodes
        print_error(f"onefold: fewer than {least} nodes have joined within {JOIN_SECONDS} s. Start more nodes.")
        return EXIT_FAILED
    except (DistNetworkError, DistStoreError, RendezvousError):
        is_left_open = True
        if not agent.has_started:
            if not isinstance(spec.rdzv_handler, NodeRendezvous):  # it connects here for the first time
                raise
            print_error(f"onefold: the job at {_store_name(job)} has ended before this node could join")
            return EXIT_FAILED
        print_error(
            f"onefold: the store of the job at {_store_name(job)} does not reply, so all ranks of this node have "
            "ended. Start the job again on all nodes; it resumes from its last checkpoint."
        )
        return EXIT_FAILED
    finally:
        if fork_server is not None:
            fork_server.close()
        if not isinstance(keeper, str):
            keeper.close()
        if not is_left_open:
            spec.rdzv_handler.shutdown()
    if result is None:
        print_error("onefold: the job is complete without this node, which has left the rendezvous")
        return EXIT_FAILED
    if not result.is_failed():
        return 0
    if agent.failure is None:
        print_error(f"onefold: the job has lost a node and ends after {job.max_restarts} restarts (--max-restarts)")
        return EXIT_FAILED
    return report_failure(agent.failure)


def _job_secret(job: Job) -> JobSecret:
    """Return the secret that signs the messages of the job. A job on one node gets a new one unless one is given."""
    secret = JobSecret.find(os.environ)
    if not secret and job.num_nodes == 1:
        return JobSecret.make()
    if not secret and job.node_rank == 0:
        print_error(
            "onefold: messages between the nodes are not signed, because the job has no secret. Set "
            f"{JOB_SECRET_FILE} to a file with the same secret on all nodes."
        )
    return secret


def _copy_keeper(job: Job, folder: Path, secret: JobSecret) -> CopyKeeper:
    """Return the keeper of the peer copies of this node."""
    from onefold.tools.cli.copy_keeper import CopyKeeper
    from onefold.tools.cli.rendezvous import own_address

    host = None if job.num_nodes == 1 else own_address(*job.store_address) or socket.gethostname()
    return CopyKeeper(folder, secret, host)


@contextmanager
def _copies_folder(job: Job) -> Iterator[Path | str]:
    """Return a folder in shared memory for the peer copies of a job that can restart, or why there is none."""
    if not job.can_restart:
        yield "its launcher does not restart ranks"
        return
    with ExitStack() as stack:
        try:
            folder: Path | str = Path(stack.enter_context(_locked_folder(_COPIES_PREFIX, _SHARED_MEMORY)))
        except OSError as error:
            folder = f"{_SHARED_MEMORY}: {error.strerror or error}"
        yield folder


@contextmanager
def _locked_folder(prefix: str, parent: str | None = None) -> Iterator[str]:
    """Return a private temporary folder of the launcher. Remove those of launchers that were killed.

    A launcher locks a file in its folder. The lock ends with the process, also if it is killed.
    """
    for lock in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*/lock"):
        with suppress(OSError), open(lock, "r+") as file:  # in use, or of another user
            lock_file(file, wait=False)
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        part = os.path.join(folder, "lock.part")
        with open(part, "w") as file:
            lock_file(file)
            os.rename(part, os.path.join(folder, "lock"))  # other launchers find it locked
            yield folder


def _silence_agent() -> None:
    """Suppress the log of the agent, which also reports ranks that it ends, unless LOGLEVEL or TORCH_LOGS is set."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
