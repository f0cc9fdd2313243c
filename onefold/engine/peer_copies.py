"""The peer copies of one engine: made every n steps, and offered to the first load after a restart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.peer_copy import (
    FOLDER_VARIABLE,
    PROBLEM_VARIABLE,
    RESUME_VARIABLE,
    SLOTS,
    copy_name,
    engine_of,
    keep_parts_of_node,
    node_folder,
    num_nodes,
    program_identity,
    program_of,
    read_complete,
    reject,
)
from onefold.checkpoint.state.slots import outside_units
from onefold.comm import local_rank
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.train_state import TrainState
from onefold.errors import ConfigError
from onefold.job_secret import JobSecret
from onefold.log import format_bytes, logger
from onefold.storage.place import tree_size

_KEY = "onefold.peer_copies"


class PeerCopies:
    """Copies of the state of one engine in the memory of the nodes ([Note: peer copies])."""

    _num_engines = _num_copies = 0
    _has_open = False

    def __init__(self, state: TrainState, saver: CheckpointSaver) -> None:
        self._state, self._saver = state, saver
        self._every = state.plan.loop.peer_copies.every
        self.client_state: Callable[[], Mapping[str, Any]] | None = None
        """Returns the client state of a copy. It is called on rank 0, when one begins."""
        self._is_open = self._is_due = False
        self._num_declined = 0
        self._begun = self._resumed = self.place = ""
        """The names of the newest copy that this engine has begun, and of that which the launchers have offered."""
        self._resumable: list[str] = []
        if self._every is None or state.group.is_fake:
            return
        _check_launcher()
        if PeerCopies._has_open:
            raise ConfigError(
                f"{_KEY}: this process has another engine with this key, and copies of two engines may be of "
                "different steps. Close the other engine, or leave the key out for one of them."
            )
        folder = node_folder()
        self.place = self._check_space(folder)
        self._engine, PeerCopies._num_engines = PeerCopies._num_engines, PeerCopies._num_engines + 1
        PeerCopies._has_open = self._is_open = True
        names = os.environ.get(RESUME_VARIABLE, "").split(",")
        own = [name for name in names if name and engine_of(name) == self._engine]
        self._resumable = [name for name in own if program_of(folder / name) == program_identity()]
        if own and not self._resumable and state.group.rank == 0:
            logger.warning("%s: %s is not loaded: a program with other arguments has made it", _KEY, own[0])
        self._resumed = own[0] if own else ""

    def take_resumable(self) -> list[str]:
        """Return the copies from which this start may resume, newest first. Later calls return none."""
        found, self._resumable = self._resumable, []
        return found if self._state.global_steps == 0 else []

    def after_step(self) -> None:
        """Copy the state if it is time, or as soon as the last copy is complete. All ranks call this together."""
        every, steps = self._every, self._state.global_steps
        if every is None or not (self._is_due or steps % every == 0):
            return
        is_first = self._state.group.rank == 0
        if self._resumable and is_first:
            logger.warning(
                "%s: the job was restarted, and %s is in memory, but the program has not called load_checkpoint before "
                "its first steps. They begin anew",
                _KEY, self._resumable[0],
            )  # fmt: skip
        self._resumable = []
        self._is_due = not self._copy()
        self._num_declined = self._num_declined + 1 if self._is_due else 0
        if is_first and self._num_declined == every:
            logger.warning(
                "%s: the last copy is not complete %d steps after it began, so copies are made less often than every "
                "%d steps. Increase `every`",
                _KEY, 2 * every, every,
            )  # fmt: skip

    def _copy(self) -> bool:
        """Begin a copy. Return whether one was begun."""
        folder, complete = node_folder(), None
        name, may_begin = "", True
        if self._state.group.rank == 0:
            complete = read_complete(folder)
            may_begin = self._begun in ("", complete, self._saver.coordinator.failed_copy)
            # Copies of later engines of this process have later names, too.
            PeerCopies._num_copies += may_begin
            start = int(os.environ["ONEFOLD_RESTARTS"])
            name = copy_name(start, PeerCopies._num_copies, self._engine, self._state.group.size)
        kept = [complete] if complete is not None else []
        begun = self._saver.copy(str(folder), name, kept, self.client_state or dict, may_begin=may_begin)
        self._begun = begun or self._begun
        return bool(begun)

    def after_load(self, name: str) -> None:
        """Remove what this node has fetched of a copy for the load, which has ended on all ranks."""
        if local_rank() == 0:
            keep_parts_of_node(node_folder() / name, int(os.environ.get("GROUP_RANK", "0")), num_nodes())

    def reject(self) -> None:
        """Let no restart resume from the copies that this job has made until now. All ranks call this together."""
        newest = self._begun or self._resumed
        if newest and local_rank() == 0:
            reject(node_folder(), newest)

    def _check_space(self, folder: Path) -> str:
        """Raise unless the shared memory of all nodes is large enough. Return what will be used, in words."""
        free = shutil.disk_usage(folder).free + tree_size(folder)
        node, nodes = int(os.environ.get("GROUP_RANK", "0")), num_nodes()
        rows = self._state.schedule.agreement.synchronize("the peer copies", [node, self._bytes_of_part(), free])
        of_node = [sum(row[1] for row in rows if row[0] == number) for number in range(nodes)]
        for number in range(nodes):
            needed = SLOTS * (of_node[number] + (of_node[number - 1] if nodes > 1 else 0))
            there = min((row[2] for row in rows if row[0] == number), default=0)
            if needed > there:
                raise ConfigError(
                    f"{_KEY}: node {number} needs {format_bytes(needed)} of shared memory ({folder.parent}) for two "
                    f"copies of its ranks{' and of those of the node before it' if nodes > 1 else ''}, but "
                    f"{format_bytes(there)} are free. Enlarge it (mount -o remount,size=...; in a container, "
                    "--shm-size or an emptyDir of medium Memory), or leave the key out."
                )
            if number == node:
                mine = format_bytes(needed)
        where = f"of this node and the next one, {mine} here" if nodes > 1 else f"of this node, {mine}"
        limit = "" if nodes > 1 else "; it protects against the death of ranks, not of the node"
        return f"every {self._every} steps, in the memory {where} for {SLOTS} copies{limit}"

    def _bytes_of_part(self) -> int:
        """Return the bytes that this rank writes, with states that are created by the first step."""
        state = self._state
        if state.group.rank >= state.group.num_shards:
            return 0
        total = 0
        for param in (param for unit in state.schedule.units for param in unit.params):
            start, stop = param.own_range
            trained = param.trainable and state.step is not None
            total += (stop - start) * (4 * (1 + len(param.spec.states)) if trained else param.dtype.itemsize)
        if state.group.rank == 0:
            total += sum(tensor.nbytes for tensor in outside_units(state.model)[0].values())
        return total

    def describe(self) -> str:
        """Return how often the state is copied, and where to."""
        return f"peer copies       {self.place}" if self.place else ""

    def close(self) -> None:
        """Let another engine of this process have copies."""
        if self._is_open:
            PeerCopies._has_open = self._is_open = False


def _check_launcher() -> None:
    """Raise unless a launcher keeps the copies of this rank."""
    if FOLDER_VARIABLE in os.environ:
        if num_nodes() > 1 and not JobSecret.find(os.environ):
            raise ConfigError(
                f"{_KEY}: copies of several nodes are sent over the network, and need the secret of the job. Set "
                "ONEFOLD_JOB_SECRET_FILE to a file with the same secret on all nodes, or leave the key out."
            )
        return
    problem = os.environ.get(PROBLEM_VARIABLE, "This rank has no launcher")
    raise ConfigError(
        f"{_KEY}: the copies outlive the ranks in the shared memory of a launcher. {problem}. Start all nodes by "
        "`onefold launch --max-restarts N` on Linux (several nodes: `--nnodes MIN:MAX`), or leave the key out."
    )
