"""The elastic agent of `onefold launch`: torch keeps the rendezvous, and the agent owns the processes of its ranks.

[Note: how ranks end]
When a rank fails, its peers fail as well, on broken connections. The agent gives them two seconds to record their
tracebacks, so that the failure that came first is known, and then kills the process groups of all ranks with SIGKILL
(sooner if the first rank was killed by SIGKILL itself, as by the kernel when memory is short):
a restarted job must not share a device or a port with a process that has not ended yet. SIGTERM is sent only if the
launcher itself was asked to stop, because ranks answer it by saving a checkpoint. A rank that ends with 128 plus the
number of a signal was asked to stop as well; then its peers may save, too, and nothing is restarted.

[Note: nodes that join and leave]
When a node waits, a launcher that notices it writes `JOIN` to the store of the current start, and sends a stop signal
to its ranks. All ranks of the job save after the same step, and end. Each launcher finds the entry, and restarts its
ranks instead of ending the job. A launcher that receives a signal writes `LEAVE` if the job may run without its node,
forwards the signal to its ranks, and leaves the rendezvous when they have ended. Neither counts as a restart. A node
that is lost without an entry counts as a failure, and its peers are killed, because they cannot save without it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from onefold.checkpoint.format.peer_copy import FOLDER_VARIABLE, PROBLEM_VARIABLE, RESUME_VARIABLE
from onefold.job_secret import JOB_SECRET, JOB_SECRET_FILE, JobSecret
from onefold.stop_signals import FORWARDED, SAME_SIGNAL_SECONDS, STOP_SECONDS_FILE
from onefold.tools.cli.copy_keeper import CopyKeeper, publish_no_copies
from onefold.tools.cli.fork_server import ForkServer
from onefold.tools.cli.node_rendezvous import STORE_SECONDS, Change, NodeRendezvous
from onefold.tools.cli.rank_processes import (
    ForkedRank,
    RankEnd,
    RankProcess,
    first_failure,
    print_error,
    report_failure,
)
from onefold.tools.cli.rank_script import LAUNCHER_VARIABLE, PYTHON_RANK

# The time in which ranks record their tracebacks after the first failure.
TRACEBACK_SECONDS = 2.0
# The same if the first rank was killed by SIGKILL: that is never the consequence of another failure, which may however
# have occurred just before.
KILLED_SECONDS = 0.2
# The time between two looks at the rendezvous while no rank ends. torch's agent sleeps for the second one, during which
# it does not notice the end of a rank.
MONITOR_SECONDS, SLEEP_SECONDS = 0.1, 0.01
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Added to the time that ranks give themselves to stop.
MARGIN_SECONDS = 5.0
# The entry in the store of a start that announces its end, and its values.
ANNOUNCEMENT = "onefold/announcement"
JOIN, LEAVE, STOP = "join", "leave", "stop"
# Of the signals that a rank handles, the first of these is sent to save a checkpoint for a node that joins.
SAVE_SIGNALS = (*(found for found in FORWARDED if found.name.startswith("SIGUSR")), signal.SIGTERM, *FORWARDED)


class RankAgent(SimpleElasticAgent):  # type: ignore[misc]
    """Starts the ranks of this node after each rendezvous, and ends all of them when one fails or a signal arrives."""

    def __init__(
        self,
        spec: WorkerSpec,
        folder: str,
        secret: JobSecret,
        copies: CopyKeeper | str,  # or why this node has none
        is_elastic: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        super().__init__(spec)
        self._secret = secret
        self._fork_server, self._copies = fork_server, copies
        self._nodes = spec.rdzv_handler if isinstance(spec.rdzv_handler, NodeRendezvous) else None
        self._is_elastic = is_elastic
        self.failure: RankEnd | None = None
        """The first failure among the ranks of this node, of the last start."""
        self._folder = Path(folder)
        self._processes: list[RankProcess] = []
        self._changed = threading.Condition()
        self._num_starts = 0
        self._num_restarts = 0
        self._signal: signal.Signals | None = None
        self._signal_at = 0.0
        self._is_hurried = False
        self._defers_signals = False

    # -- torch's interface -----------------------------------------------------------------------------------------

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._initialize_workers(worker_group)
            except DistStoreError:  # a node was lost between the rendezvous and the start of the ranks
                if self._nodes is None:
                    raise
            else:
                return

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        starts, restarts = self._share_counts(worker_group)
        if starts > 0:
            group: Any = worker_group
            has_failed = restarts > self._num_restarts
            reason = f"restart {restarts} of {group.spec.max_restarts}" if has_failed else "because the nodes changed"
            nodes = f" on {group.group_world_size} node{'s' * (group.group_world_size > 1)}" * self._is_elastic
            print_error(f"onefold: restarting all ranks{nodes}, {reason}")
        self._num_restarts = restarts
        of_copies = self._agree_on_copies(worker_group)
        command = [str(worker_group.spec.entrypoint), *worker_group.spec.args]
        self._processes, self.failure = [], None
        with self._signals_deferred():
            for worker in worker_group.workers:
                # The secret file is for launchers, and the folder of copies may be that of an outer launcher.
                outer = (JOB_SECRET_FILE, FOLDER_VARIABLE, RESUME_VARIABLE, PROBLEM_VARIABLE)
                inherited = {name: value for name, value in os.environ.items() if name not in outer}
                environment = {**inherited, **self._environment(worker, worker_group, starts, restarts), **of_copies}
                process = self._start_process(command, environment)
                self._processes.append(RankProcess(process, environment, worker.global_rank, self._changed))
        return {local_rank: process.pid for local_rank, process in enumerate(self._processes)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        if not any(codes) and None in codes:
            with self._changed:
                self._changed.wait_for(lambda: self._exit_codes() != codes, MONITOR_SECONDS)
            codes = self._exit_codes()
        if not any(codes) and None in codes:
            change = self._nodes.change() if self._nodes is not None else Change.NONE
            if change is Change.NONE or (change is Change.WAITING and 0 in codes):
                return RunResult(state=WorkerState.HEALTHY)
            return self._end_start(change)
        return self._result(worker_group)

    def _end_start(self, change: Change) -> RunResult:
        """End the ranks because a node has joined or left, after they have saved a checkpoint if they can."""
        if change is Change.WAITING:
            self._announce(JOIN)
            can_save = self._request_save()
        else:
            can_save = self._announced() is not None  # the ranks of the node that has left were asked to stop
        if can_save:
            self._wait(self._stop_seconds())
        codes = self._exit_codes()
        if any(codes) or None not in codes:
            return self._result(self._worker_group)
        self._kill()
        return self._failed()

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        """Return how the ranks have ended. End all of them if one has failed."""
        first = self.first_failure()
        if first is None:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        is_killed = first.exit_code == -signal.SIGKILL
        self._wait(self._stop_seconds() if first.was_asked else KILLED_SECONDS if is_killed else TRACEBACK_SECONDS)
        self.failure = first = self.first_failure()
        assert first is not None
        self._kill()
        (worker,) = (worker for worker in worker_group.workers if worker.global_rank == first.rank)
        failure = ProcessFailure(worker.local_rank, first.pid, first.exit_code, error_file="")
        return self._failed({first.rank: failure})

    def _failed(self, failures: dict[int, ProcessFailure] | None = None) -> RunResult:
        """Return a failure, after which torch's agent restarts all ranks if restarts remain."""
        first, announced = self.failure, self._announced()
        if announced in (JOIN, LEAVE):
            self._remaining_restarts += 1  # torch's agent subtracts it again
        elif first is not None and first.was_asked:
            self._remaining_restarts = 0
        if first is not None and self._remaining_restarts > 0 and not first.was_asked and announced != LEAVE:
            report_failure(first)
        return RunResult(state=WorkerState.FAILED, failures=failures or {})

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._kill()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, is_restart: bool = False
    ) -> None:
        """End all ranks. If the launcher received a signal, forward it, and give the ranks time to stop."""
        if self._signal is not None:
            self._announce(LEAVE if self._is_elastic else STOP)
            for process in self._processes:
                process.send(self._signal)
            self._wait(self._stop_seconds())
            self.failure = self.first_failure()
        self._kill()

    # -- nodes -------------------------------------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether ranks have been started."""
        return self._num_starts > 0

    def leave(self) -> None:
        """Leave the rendezvous; the other nodes may continue."""
        if self._nodes is not None:
            self._nodes.leave()

    def _announce(self, value: str) -> None:
        """Announce to the other nodes why the ranks of this start will end, unless another node has done so."""
        store = self._store
        if self._nodes is not None and store is not None:
            with suppress(DistError):  # the store may have gone
                store.compare_set(ANNOUNCEMENT, "", value)

    def _announced(self) -> str | None:
        """Return the announced reason for the end of this start."""
        store = self._store
        if self._nodes is None or store is None or not store.check([ANNOUNCEMENT]):
            return None
        return str(store.get(ANNOUNCEMENT).decode())

    def _request_save(self) -> bool:
        """Send a stop signal to the ranks that save a checkpoint after it. Return whether there is one."""
        requested = False
        for process in self._processes:
            handled = process.stop_signals()
            if number := next((number for number in SAVE_SIGNALS if number in handled), None):
                process.send(number)
                requested = True
        return requested

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start_process(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | ForkedRank:
        """Start the process of a rank in a session of its own."""
        if self._fork_server is None:
            return subprocess.Popen(command, env=environment, start_new_session=True)
        return self._fork_server.start(command[len(PYTHON_RANK) :], environment)

    def _share_counts(self, worker_group: WorkerGroup) -> tuple[int, int]:
        """Return the number of earlier starts, and of restarts after failures. Both are the largest of all nodes.

        A node that finds others waiting in the rendezvous restarts without having counted a failure, and the launcher
        of a node may be new.
        """
        group: Any = worker_group  # torch sets its fields in the rendezvous
        store, spec = group.store, group.spec
        mine = self._num_starts, spec.max_restarts - self._remaining_restarts
        store.set(f"onefold/counts/{group.group_rank}", json.dumps(mine))
        rows = [json.loads(store.get(f"onefold/counts/{node}")) for node in range(group.group_world_size)]
        starts, restarts = (max(numbers) for numbers in zip(*rows, strict=True))
        self._num_starts, self._remaining_restarts = starts + 1, max(0, spec.max_restarts - restarts)
        return starts, restarts

    def _agree_on_copies(self, worker_group: WorkerGroup) -> dict[str, str]:
        """Return the variables with the folder of the peer copies of the ranks, and those to resume from."""
        group: Any = worker_group
        if isinstance(self._copies, str):
            problem = f"Node {group.group_rank} ({socket.gethostname()}) has none: {self._copies}"
            if self._nodes is not None:
                publish_no_copies(group.store, group.group_rank, problem)
            return {PROBLEM_VARIABLE: problem}
        checked = time.monotonic()

        def check_nodes() -> None:
            nonlocal checked
            if self._nodes is not None and time.monotonic() - checked > STORE_SECONDS / 10:
                checked = time.monotonic()
                if self._nodes.change() is Change.LOST:
                    raise DistStoreError("a node was lost while copies were fetched")

        ranks = [worker.global_rank for worker in worker_group.workers]
        return self._copies.begin(group.store, group.group_rank, group.group_world_size, ranks, check_nodes)

    def _environment(self, worker: Worker, group: WorkerGroup, starts: int, restarts: int) -> dict[str, str]:
        """Return the variables that a rank finds in its environment: those of torch's launcher, and onefold's own."""
        spec = group.spec
        folder = self._folder / f"start_{starts}" / str(worker.local_rank)
        folder.mkdir(parents=True)
        secret = self._secret.derive(f"start {starts}").text
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ONEFOLD_RESTARTS": str(starts),
            LAUNCHER_VARIABLE: str(os.getpid()),
            STOP_SECONDS_FILE: str(folder / "stop_seconds"),
            **({} if secret is None else {JOB_SECRET: secret}),
            **self._loopback(group),
        }

    @staticmethod
    def _loopback(group: Any) -> dict[str, str]:
        """Return the variable that lets gloo listen on the loopback interface only, for a job on one node."""
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if name is None or group.group_world_size > 1 or _GLOO_INTERFACE in os.environ:
            return {}
        return {_GLOO_INTERFACE: name}

    def _exit_codes(self) -> list[int | None]:
        return [process.exit_code for process in self._processes]

    def first_failure(self) -> RankEnd | None:
        """Return the first failure among the ranks that have ended."""
        return first_failure(process.end() for process in self._processes if process.exit_code is not None)

    def _stop_seconds(self) -> float:
        """Return the time after which ranks that were asked to stop are killed."""
        return max((process.stop_seconds() for process in self._processes), default=0.0) + MARGIN_SECONDS

    def _wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, but not longer than `seconds`, nor after a second signal."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while any(process.exit_code is None for process in self._processes) and not self._is_hurried:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, 0.1))

    def _kill(self) -> None:
        """Kill the process groups of all ranks."""
        with self._signals_deferred():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.reap()

    # -- signals -----------------------------------------------------------------------------------------------------

    @contextmanager
    def signals_handled(self) -> Iterator[None]:
        """Stop the job when a signal arrives: raise torch's SignalException, and end the ranks if it did not do so."""
        # A signal that is ignored, as SIGHUP by nohup, stays ignored.
        before = {number: signal.getsignal(number) for number in FORWARDED}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            try:
                self._kill()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Raise SignalException for the first signal. A second one ends all ranks at once."""
        if self._signal is None:
            self._signal, self._signal_at = signal.Signals(number), time.monotonic()
            if not self._defers_signals:
                self._raise()
        elif time.monotonic() - self._signal_at > SAME_SIGNAL_SECONDS:
            self._is_hurried = True

    def _raise(self) -> None:
        assert self._signal is not None
        raise SignalException(f"the launcher received {self._signal.name}", self._signal)

    @contextmanager
    def _signals_deferred(self) -> Iterator[None]:
        """Raise SignalException at the end of the context, so that every started process is known and killed once."""
        early = self._signal is not None
        self._defers_signals = True
        try:
            yield
        finally:
            self._defers_signals = False
        if self._signal is not None and not early:
            self._raise()
