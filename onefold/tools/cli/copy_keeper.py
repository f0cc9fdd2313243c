"""The peer copies of a node, which its launcher keeps when ranks end and are started again ([Note: peer copies]).

[Note: agreement on copies]
After the rendezvous of a start, each launcher writes to the store which files it has. From these lists, all compute the
same whole copies that no rank has rejected, newest first. Each fetches the files of the newest one that it lacks, joins
the manifest, and writes whether the copy is ready on its node. If it is not ready on all nodes, they try the one before
it. Ranks may resume from copies that are ready on all nodes. All other copies are removed.

While ranks run, each launcher fetches the new files of the ranks of the node before it, and writes the name of the
newest copy of which it has all of them. The launcher of rank 0 records the newest copy that all nodes have mirrored as
complete, and rank 0 begins the next one only then.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.folder import examine
from onefold.checkpoint.format.peer_copy import (
    COMPLETE,
    FOLDER_VARIABLE,
    PROBLEM_VARIABLE,
    RESUME_VARIABLE,
    SLOTS,
    files_of,
    is_copy_name,
    is_whole,
    join_copy,
    list_copies,
    missing_files,
    rank_of,
    read_rejected,
    write_complete,
)
from onefold.job_secret import ForgedMessageError, JobSecret
from onefold.log import format_bytes
from onefold.tools.cli.copy_transfer import CopyClient, CopyFiles, CopyServer, TransferError, checked_files
from onefold.tools.cli.rank_processes import print_error

_PERIOD = 0.2
# The other node may end before this one. A problem that lasts longer is reported.
_MOST_FAILURES = 10
# A shard precedes its record, without which it does not count.
_ORDER = (".safetensors", ".json")


class CopyKeeper:
    """The copies of one node."""

    def __init__(self, folder: Path, secret: JobSecret, host: str | None) -> None:
        """`host` is the address of this node for others, or None for a job of one node."""
        self.folder = folder
        self._secret = secret.derive("peer copies")
        self._server = CopyServer(folder, self._secret, host) if host is not None and secret else None
        self._mirror: _Mirror | None = None

    def begin(
        self, store: Any, node: int, num_nodes: int, ranks: Sequence[int], check_nodes: Callable[[], None]
    ) -> dict[str, str]:
        """Agree with the launchers of a start on the copies from which it may resume. Return variables for its ranks.

        `check_nodes` raises if a node is lost.
        """
        self._end_mirror()

        def exchange(what: str, value: Any) -> list[Any]:
            store.set(f"onefold/copies/{what}/{node}", json.dumps(value))
            return [_await(store, f"onefold/copies/{what}/{number}", check_nodes) for number in range(num_nodes)]

        held = {name: files_of(self.folder / name) for name in list_copies(self.folder)}
        address, rejected = self._server.address if self._server is not None else None, read_rejected(self.folder)
        row = {"address": address, "ranks": list(ranks), "files": held, "rejected": rejected}
        rows = exchange("held", row)
        if problems := [str(row["problem"]) for row in rows if "problem" in row]:
            self._keep([])
            return {PROBLEM_VARIABLE: problems[0]}
        of_nodes = [checked_files(row["files"]) for row in rows]
        newest_rejected = max((row["rejected"] for row in rows if is_copy_name(row["rejected"])), default="")
        agreed = list[str]()
        with _Sources(rows, of_nodes, self._secret, check_nodes) as sources:
            for name in _whole_copies(of_nodes, newest_rejected):
                # A second copy is not fetched: ranks only use it if they find the newest one damaged.
                if not agreed or not any(_missing(name, files, of_nodes) for files in of_nodes):
                    is_ready = self._prepare(name, _missing(name, of_nodes[node], of_nodes), sources)
                    if all(exchange(f"ready/{name}", is_ready)):
                        agreed.append(name)
        self._keep(agreed)
        if num_nodes > 1 and self._server is not None:
            before = rows[node - 1]
            self._mirror = _Mirror(
                self.folder, self._secret, store, node, num_nodes, before["address"], before["ranks"]
            )
        return {FOLDER_VARIABLE: str(self.folder), RESUME_VARIABLE: ",".join(agreed)}

    def _keep(self, agreed: Sequence[str]) -> None:
        """Remove all copies but these, of which the first one is complete."""
        for name in list_copies(self.folder):
            if name not in agreed:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / COMPLETE).unlink(missing_ok=True)
        if agreed:
            write_complete(self.folder, agreed[0])

    def _prepare(self, name: str, missing: Mapping[str, int], sources: _Sources) -> bool:
        """Fetch the missing files of a copy, and join it. Return whether it is complete and not damaged."""
        copy = self.folder / name
        try:
            needed, free = sum(missing.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise TransferError(
                    f"{format_bytes(needed)} of other nodes are needed here, but {format_bytes(free)} are free"
                )
            for file, size in missing.items():
                sources.fetch(self.folder, name, file, size)
            join_copy(copy)
            problems = examine(copy).problems
        except (OSError, ValueError, AssertionError, TypeError, KeyError, ForgedMessageError) as error:
            problems = (f"{type(error).__name__}: {error}",)
        if problems:
            print_error(f"onefold: the peer copy {name} is not used: {'; '.join(problems)}")
        return not problems

    def _end_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.end()
        self._mirror = None

    def close(self) -> None:
        """Stop mirroring and serving."""
        self._end_mirror()
        if self._server is not None:
            self._server.close()


class _Sources:
    """The other nodes, from which this one fetches files at a restart."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        of_nodes: Sequence[CopyFiles],
        secret: JobSecret,
        check_nodes: Callable[[], None],
    ) -> None:
        self._rows, self._of_nodes, self._secret, self._check_nodes = rows, of_nodes, secret, check_nodes
        self._clients: dict[int, CopyClient] = {}
        self._problems: dict[int, Exception] = {}
        """The first error of each node that did not answer."""

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def fetch(self, folder: Path, name: str, file: str, size: int) -> None:
        """Fetch a file from the first node that has it and answers."""
        self._check_nodes()
        problem: Exception = TransferError(f"no node has {name}/{file}")
        for node, (files, row) in enumerate(zip(self._of_nodes, self._rows, strict=True)):
            if files.get(name, {}).get(file) != size or row["address"] is None:
                continue
            if node in self._problems:
                problem = self._problems[node]
                continue
            try:
                if node not in self._clients:
                    self._clients[node] = CopyClient(tuple(row["address"]), self._secret)
                return self._clients[node].fetch(folder, name, file, size)
            except (OSError, ForgedMessageError) as error:
                self._problems[node] = problem = error
        raise problem


def publish_no_copies(store: Any, node: int, problem: str) -> None:
    """Publish to the other launchers of a start that this one has no folder for copies, and why."""
    store.set(f"onefold/copies/held/{node}", json.dumps({"problem": problem}))


def _await(store: Any, key: str, check_nodes: Callable[[], None]) -> Any:
    """Return the value that another launcher writes to the store."""
    while not store.check([key]):
        time.sleep(0.01)
        check_nodes()
    return json.loads(store.get(key))


def _missing(name: str, held: CopyFiles, of_nodes: Sequence[CopyFiles]) -> dict[str, int]:
    """Return the files of a copy that a node lacks, with their sizes."""
    wanted = {file: size for files in of_nodes for file, size in files.get(name, {}).items()}
    return {file: size for file, size in wanted.items() if file not in held.get(name, {})}


def _whole_copies(of_nodes: Sequence[CopyFiles], rejected: str) -> list[str]:
    """Return the newest copies of which the nodes together have all files, newest first, after the rejected one."""
    names = sorted({name for files in of_nodes for name in files if name > rejected}, reverse=True)
    whole = [name for name in names if is_whole(name, {file for files in of_nodes for file in files.get(name, {})})]
    return whole[:SLOTS]


class _Mirror:
    """A thread that mirrors the copies of the ranks of the node before this one."""

    def __init__(
        self,
        folder: Path,
        secret: JobSecret,
        store: Any,
        node: int,
        num_nodes: int,
        address: Sequence[Any],
        ranks: Sequence[int],
    ) -> None:
        self._folder, self._secret, self._store = folder, secret, store
        self._node, self._num_nodes = node, num_nodes
        self._address, self._ranks = (str(address[0]), int(address[1])), set(ranks)
        self._client: CopyClient | None = None
        self._mirrored = self._complete = ""
        self._stop = threading.Event()
        # Held while the thread does what must not follow `end`, but not for calls of the store, which may not reply.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="onefold-copy-mirror", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Request the end of the thread, which may wait for a node that does not reply. It records nothing later."""
        with self._lock:
            self._stop.set()
            client = self._client
        if client is not None:
            client.close()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        failures = 0
        while not self._stop.wait(_PERIOD):
            try:
                if (client := self._connected()) is None:
                    return
                self._fetch_new(client)
                self._record_complete()
                failures = 0
            except (OSError, ValueError, RuntimeError) as error:  # the agent notices lost nodes and the lost store
                if self._client is not None:
                    self._client.close()
                self._client = None
                failures += 1
                if failures == _MOST_FAILURES and not self._stop.is_set():
                    print_error(f"onefold: the peer copies of node {self._address[0]} cannot be mirrored: {error}")
                self._stop.wait(1)

    def _connected(self) -> CopyClient | None:
        """Return the connection to the other node, or None if the thread must end."""
        client = self._client or CopyClient(self._address, self._secret)
        with self._lock:
            if not self._stop.is_set():
                self._client = client
                return client
        client.close()
        return None

    def _fetch_new(self, client: CopyClient) -> None:
        for name, files in sorted(client.list_files().items()):
            wanted = {file: size for file, size in files.items() if rank_of(file) in self._ranks}
            if name <= self._mirrored or not wanted:
                continue
            for file in sorted(wanted.keys() - files_of(self._folder / name).keys(), key=_place_in_order):
                if self._stop.is_set():
                    return
                client.fetch(self._folder, name, file, wanted[file])
            if not missing_files(wanted, self._ranks) and not self._stop.is_set():
                self._mirrored = name
                self._store.set(f"onefold/copies/mirrored/{self._node}", name)

    def _record_complete(self) -> None:
        """On the node of rank 0, record the newest copy that all nodes have mirrored."""
        keys = [f"onefold/copies/mirrored/{node}" for node in range(self._num_nodes)]
        if self._node == 0 and self._store.check(keys):
            complete = min(self._store.get(key).decode() for key in keys)
            with self._lock:
                if complete != self._complete and not self._stop.is_set():
                    self._complete = complete
                    write_complete(self._folder, complete)


def _place_in_order(file: str) -> tuple[int, str]:
    return _ORDER.index(os.path.splitext(file)[1]), file
