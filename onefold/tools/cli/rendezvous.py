"""The rendezvous of the launchers of a job: torch's, with signed messages and without pickle.

torch's dynamic rendezvous stores its state as a pickle, and would execute code that another process has put there. Here
the state is stored as JSON, signed like all messages of the launchers ([Note: signed messages] in `job_secret.py`):
the ranks of nodes and the address of rank 0, which torch's agent exchanges, among them. Only pickles that this process
has made itself reach torch.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from onefold.comm.store_server import is_own_address, listen_at
from onefold.job_secret import ForgedMessageError, JobSecret

_MISSING = "none"
_LONGEST_PAUSE = 0.1
_NODE_FIELDS = ("addr", "pid", "local_id")


def make_rendezvous(parameters: RendezvousParameters, secret: JobSecret) -> RendezvousHandler:
    """Return torch's handler for these parameters, with signed messages. The backend is `static` or `c10d`."""
    if parameters.backend == "static":
        return SignedStaticRendezvous(parameters, secret)
    store: Store
    if parameters.get("store_type") == "file":
        store = FileStore(parameters.endpoint)
    else:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=29500)
        timeout = timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
        store = open_store(host, port, timeout, parameters.get_as_bool("is_host"))
        parameters.local_addr = parameters.local_addr or own_address(host, port)
    signed = SignedLauncherStore(store, secret)
    return create_handler(signed, JsonRendezvousBackend(signed, parameters.run_id), parameters)


def open_store(host: str, port: int, timeout: timedelta, is_host: bool | None = None) -> TCPStore:
    """Return the store at an address, and start it unless it runs if the address is that of this node.

    Its server listens at this address alone. It listens on all interfaces if `host` is a name, which nodes may resolve
    differently.
    """
    listener = listen_at(host, port) if is_host is not False else None
    attempts = [bool(is_host)]
    if is_host is None:  # another process of this node may host it
        is_found = listener is not None or (not is_own_address(host) and _matches_machine_hostname(host))
        attempts = [True, False] if is_found else [False]
    for is_server in attempts:
        try:
            return TCPStore(
                host, port, is_master=is_server, multi_tenant=True, timeout=timeout,
                master_listen_fd=listener if is_server else None,
            )  # fmt: skip
        except (DistNetworkError, RuntimeError, ValueError) as error:
            if is_server == attempts[-1]:
                reason = "the store cannot be started" if is_server else "no store answers"
                raise RendezvousConnectionError(f"{reason} at {host}:{port}: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def own_address(host: str, port: int) -> str | None:
    """Return the address of this node on the interface that reaches `host`, or None if it is not known."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


class SignedLauncherStore(Store):  # type: ignore[misc]
    """A store whose values are signed, for torch's agent and rendezvous. Counters are not."""

    timeout: timedelta  # of torch

    def __init__(self, store: Any, secret: JobSecret) -> None:
        super().__init__()
        self._store, self._secret = store, secret
        self.set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._secret.verify(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one; an empty one stands for none. Return what is stored then."""
        before = self._sign(key, expected) if expected else b""
        return self._secret.verify(key, self._store.compare_set(key, before, self._sign(key, desired)))

    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys in Python, because a signal is not handled while the main thread waits inside torch's store."""
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        started, pause = time.monotonic(), 0.001
        while not self.check(keys):
            if time.monotonic() - started > limit:
                raise DistStoreError(f"no value for {', '.join(keys)} within {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        return False

    def _sign(self, key: str, value: str | bytes) -> bytes:
        return self._secret.sign(key, value.encode() if isinstance(value, str) else bytes(value))


class SignedStaticRendezvous(StaticTCPRendezvous):  # type: ignore[misc]
    """torch's rendezvous of nodes whose ranks are given, with signed messages of the launchers."""

    def __init__(self, parameters: RendezvousParameters, secret: JobSecret) -> None:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=29500)
        timeout = parameters.get_as_int("timeout", 600) or 600
        super().__init__(host, port, int(parameters.config["rank"]), parameters.max_nodes, parameters.run_id, timeout)
        self._secret = secret

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, which node 0 starts; the ranks use the same server."""
        if self._store is None:
            self._store = open_store(self.master_addr, self.master_port, self.timeout, is_host=self.rank == 0)
            self._signed = SignedLauncherStore(self._store, self._secret)
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._signed), self.rank, self.world_size, address)


class JsonRendezvousBackend(RendezvousBackend):  # type: ignore[misc]
    """Keeps the state of torch's dynamic rendezvous in a store, as JSON."""

    def __init__(self, store: SignedLauncherStore, run_id: str) -> None:
        self._store, self._key = store, f"onefold/rendezvous/{run_id}"
        self._call("compare_set", "", _MISSING)

    @property
    def name(self) -> str:
        """The name of the backend in torch's logs."""
        return "onefold"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state as torch reads it, and the token with which it can be replaced."""
        return self._decoded(self._call("get"))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that has this token. Return the state that is stored, and whether it is this one."""
        text = to_json(pickle.loads(state))  # torch has pickled it in this process
        expected = token if isinstance(token, bytes) else _MISSING.encode()
        stored = self._call("compare_set", expected, text)
        found = self._decoded(stored)
        return None if found is None else (*found, stored == text)

    def _call(self, operation: str, *values: Any) -> bytes:
        try:
            found: bytes = getattr(self._store, operation)(self._key, *values)
            return found
        except ForgedMessageError as error:
            raise RendezvousStateError(str(error)) from error
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the store of the rendezvous does not answer: {error}") from error

    def _decoded(self, text: bytes) -> tuple[bytes, Token] | None:
        return None if text == _MISSING.encode() else (pickle.dumps(from_json(text)), text)


def to_json(state: _RendezvousState) -> bytes:
    """Return the state of a rendezvous as JSON."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_fields(node), rank] for node, rank in state.participants.items()],
            "wait_list": sorted(map(_fields, state.wait_list)),
            "redundancy_list": sorted(map(_fields, state.redundancy_list)),
            "last_heartbeats": [[*_fields(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
        }
    ).encode()


def from_json(text: bytes) -> _RendezvousState:
    """Return the state of a rendezvous from JSON. Raise `RendezvousStateError` if it is something else."""
    try:
        fields = json.loads(text)
        state = _RendezvousState()
        state.round, state.complete, state.closed = (
            int(fields["round"]),
            bool(fields["complete"]),
            bool(fields["closed"]),
        )
        state.deadline = None if fields["deadline"] is None else datetime.fromisoformat(fields["deadline"])
        state.participants = {_node(node): int(rank) for *node, rank in fields["participants"]}
        state.wait_list = {_node(node) for node in fields["wait_list"]}
        state.redundancy_list = {_node(node) for node in fields["redundancy_list"]}
        state.last_heartbeats = {_node(node): datetime.fromisoformat(at) for *node, at in fields["last_heartbeats"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RendezvousStateError(
            f"the state of the rendezvous in the store is not one of onefold: {type(error).__name__}: {error}. Use a "
            "port that no other job uses."
        ) from error
    return state


def _fields(node: _NodeDesc) -> tuple[Any, ...]:
    return tuple(getattr(node, name) for name in _NODE_FIELDS)


def _node(fields: Sequence[Any]) -> _NodeDesc:
    addr, pid, local_id = fields
    return _NodeDesc(str(addr), int(pid), int(local_id))
