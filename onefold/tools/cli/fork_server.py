"""A process that has imported torch, from which ranks are forked, so that a restart does not import it again.

[Note: ranks that are forked]
The server is a separate interpreter. It imports torch and onefold, never calls CUDA, and has one thread when it forks:
a child of a process with threads may find their locks taken for ever. numpy's OpenBLAS starts threads at import, and
ends them before a fork; the fork of a child that ends at once makes it do so. Should other threads run, the server says
so and ends.

A rank is forked twice. The process in between ends, and the kernel makes the launcher the parent of the rank
(`PR_SET_CHILD_SUBREAPER`), so the launcher waits for it and ends with it as for any other rank. The rank returns from
`serve` to the top level of this module, and runs its script as a fresh interpreter would: the same `__main__`, argv,
path, streams, default signal handlers, exit code and exit handlers, in a session of its own. It differs in that torch
is imported, so variables that torch reads at import must be set before the launcher starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from onefold.tools.cli.rank_processes import ForkedRank
from onefold.tools.cli.rank_script import LAUNCHER_VARIABLE, die_with_launcher, run_script

_PR_SET_CHILD_SUBREAPER = 36
_IMPORTS = ("torch", "torch.distributed", "onefold", "onefold.start", "onefold.engine", "onefold.checkpoint")
_LENGTH = struct.Struct("!I")
_PARENT_SECONDS = 10.0
_SOCKET_VARIABLE = "ONEFOLD_FORK_SERVER_SOCKET"


class ForkServerError(RuntimeError):
    """The fork server cannot start ranks."""


class ForkServer:
    """The fork server of a launcher."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ForkServerError("--fork-server needs Linux. Leave it out.")
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise ForkServerError("--fork-server: prctl(PR_SET_CHILD_SUBREAPER) failed. Leave it out.")
        self._socket, theirs = socket.socketpair()
        environment = {**os.environ, LAUNCHER_VARIABLE: str(os.getpid()), _SOCKET_VARIABLE: str(theirs.fileno())}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "onefold.tools.cli.fork_server"],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        """Fork a rank that runs the arguments of `rank_script.run_script`."""
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(request)) + request)
            reply = json.loads(_receive(self._socket))
        except (OSError, EOFError):
            raise ForkServerError("the fork server has ended. Leave --fork-server out to start interpreters.") from None
        if "error" in reply:
            raise ForkServerError(reply["error"])
        return ForkedRank(int(reply["pid"]))

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(length)
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# -- the server ------------------------------------------------------------------------------------------------------


def serve() -> list[str]:
    """Fork ranks until the launcher closes the connection. Return the arguments of the script in a rank."""
    connection = socket.socket(fileno=int(os.environ.pop(_SOCKET_VARIABLE)))
    launcher = int(os.environ[LAUNCHER_VARIABLE])
    die_with_launcher()
    for name in _IMPORTS:
        importlib.import_module(name)
    if _fork() == 0:
        os._exit(0)
    problem = _problem()
    while True:
        try:
            request = json.loads(_receive(connection))
        except (EOFError, ConnectionError):
            sys.exit(0)
        if problem is not None:
            _send(connection, {"error": problem})
            continue
        if _fork() == 0:
            if os.fork():
                os._exit(0)
            os.setsid()
            _await_parent(launcher)
            _send(connection, {"pid": os.getpid()})
            connection.close()
            _refresh(request["environment"])
            return list(request["arguments"])


def _send(connection: socket.socket, reply: dict[str, object]) -> None:
    text = json.dumps(reply).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _fork() -> int:
    """Fork, and wait for the child."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid


def _problem() -> str | None:
    """Return the reason why this process must not fork ranks, if there is one."""
    import torch

    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return (
            f"--fork-server: {num_threads - 1} threads were started when torch was imported, so ranks cannot be "
            "forked. Leave it out."
        )
    if torch.cuda.is_initialized():
        return "--fork-server: CUDA was initialized when torch was imported. Leave it out."
    return None


def _await_parent(launcher: int) -> None:
    """Wait until the process in between has ended, and the launcher is the parent of this process."""
    deadline = time.monotonic() + _PARENT_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > deadline:  # the launcher has died
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.0005)


def _refresh(environment: Mapping[str, str]) -> None:
    """Replace what a fork copies, and a fresh interpreter would read or choose: the environment and random seeds."""
    os.environ.clear()
    os.environ.update(environment)
    # Python seeds its own generator after a fork.
    sys.modules["torch"].default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


if __name__ == "__main__":
    run_script(serve())
