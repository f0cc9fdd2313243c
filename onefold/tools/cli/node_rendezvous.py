"""The rendezvous of the nodes of a job: torch's, with the times and the view of its members that restarts need.

[Note: members of a job]
Every launcher renews a time stamp in the store of node 0. A node is lost when its stamp is older than
`HEARTBEAT_SECONDS * MISSED_HEARTBEATS`, or when it has left the rendezvous. A node that starts while the job runs
waits. Each launcher compares the members with those of the start of its ranks. torch would end the ranks at once when a
node waits; here the agent decides, because the ranks should save a checkpoint first.

The stamps are times of the clocks of the nodes, so these must agree to within a few seconds.
"""

from __future__ import annotations

import enum
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp

from onefold.job_secret import JobSecret
from onefold.tools.cli.rendezvous import make_rendezvous

# A node without a heartbeat for the product of these is lost.
HEARTBEAT_SECONDS = 2
MISSED_HEARTBEATS = 5
# The time that further nodes have to join when the minimum has joined: at the first start, nodes start at different
# times. At a restart, the members of the job join within a second of each other.
FIRST_CALL_SECONDS = 30
RESTART_CALL_SECONDS = 3
# The time to wait for the minimum number of nodes.
JOIN_SECONDS = 600
# The time to wait for a reply of the store, and for values that other nodes set after the rendezvous.
STORE_SECONDS = 20


class Change(enum.Enum):
    """The difference between the members of the job and those at the start of its ranks."""

    NONE = enum.auto()
    LOST = enum.auto()
    """A member has left or has no heartbeat."""
    WAITING = enum.auto()
    """All members are there, and another node waits."""


class NodeRendezvous(RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of one node with the others."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._handler: Any = handler
        handler._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._members: frozenset[Any] = frozenset()

    def change(self) -> Change:
        """Compare the members with those of the last rendezvous. Raise RendezvousError if the store has gone."""
        with self._handler._heartbeat_lock:
            self._handler._state_holder.sync()
            state = self._handler._state_holder.state
        if not self._members <= state.participants.keys():
            return Change.LOST
        return Change.WAITING if state.wait_list else Change.NONE

    def leave(self) -> None:
        """Leave the rendezvous, so that the other nodes need not wait for the heartbeats of this one."""
        self._handler._stop_heartbeats()
        with suppress(RendezvousError):  # the store may have gone before this node
            self._handler._op_executor.run(_RendezvousExitOp(), self._handler._get_deadline(timedelta(seconds=5)))

    # -- torch's interface -----------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the nodes of the next start have joined."""
        info: RendezvousInfo = self._handler.next_rendezvous()
        self._members = frozenset(self._handler._state_holder.state.participants)
        self._handler.settings.timeout._set_timeouts(last_call=timedelta(seconds=RESTART_CALL_SECONDS))
        return info

    def num_nodes_waiting(self) -> int:
        """Return 0: the agent reads `change`, and torch would kill the ranks."""
        return 0

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store of the rendezvous."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return str(self._handler.get_backend())

    def get_run_id(self) -> str:
        """Return the name of the job in its store."""
        return str(self._handler.get_run_id())

    def is_closed(self) -> bool:
        """Return whether the job has ended."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """End the job for nodes that join later."""
        self._handler.set_closed()

    def shutdown(self) -> bool:
        """End the job for nodes that join later, and stop the heartbeats."""
        return bool(self._handler.shutdown())


def join_nodes(
    min_nodes: int, max_nodes: int, host: str, port: int, is_host: bool, secret: JobSecret
) -> NodeRendezvous:
    """Connect to the store of the job at `host:port`, or open it if `is_host`."""
    handler = make_rendezvous(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{host}:{port}",
            run_id="onefold",
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            is_host=is_host,
            local_addr="localhost" if max_nodes == 1 else None,
            join_timeout=JOIN_SECONDS,
            last_call_timeout=FIRST_CALL_SECONDS,
            keep_alive_interval=HEARTBEAT_SECONDS,
            keep_alive_max_attempt=MISSED_HEARTBEATS,
        ),
        secret,
    )
    assert isinstance(handler, DynamicRendezvousHandler)
    _limit_silence(port)
    return NodeRendezvous(handler)


def _limit_silence(port: int) -> None:
    """Let the connections of this process to a port fail if the other end does not reply.

    The store waits without a limit for the reply to a request that it has given up. A node that is cut off from node 0
    would wait until the kernel gives up, 15 minutes.
    """
    for entry in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:  # or not a socket
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STORE_SECONDS * 1000)


def join_alone(folder: str, secret: JobSecret) -> RendezvousHandler:
    """Return the rendezvous of a job of one node. It uses a file, so that only the ranks open a port."""
    return make_rendezvous(
        RendezvousParameters(
            backend="c10d",
            endpoint=os.path.join(folder, "rendezvous"),
            run_id=f"onefold_{os.getpid()}",
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
            store_type="file",
        ),
        secret,
    )


def join_fixed(num_nodes: int, node_rank: int, host: str, port: int, secret: JobSecret) -> RendezvousHandler:
    """Return the rendezvous of a fixed number of nodes that start once."""
    return make_rendezvous(
        RendezvousParameters(
            backend="static",
            endpoint=f"{host}:{port}",
            run_id="onefold",
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            local_addr="localhost" if num_nodes == 1 else None,
            rank=node_rank,
        ),
        secret,
    )
