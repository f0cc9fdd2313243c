"""Start the launchers of all nodes of a hostfile by ssh: `onefold launch --hostfile hosts --ssh train.py`.

The command line of ssh is the same for all jobs. The job, the command of its ranks, the variables that it needs and its
secret are sent as one line of JSON over stdin ([Note: signed messages] in `job_secret.py`). The other end is
`remote_node.py`. ssh without a terminal forwards no signals, so these are sent as lines, too. When stdin is closed,
because this process or the connection has gone, a node stops its ranks.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import FrameType

from onefold import __version__
from onefold.job_secret import JOB_SECRET, JOB_SECRET_FILE, JobSecret
from onefold.stop_signals import FORWARDED
from onefold.tools.cli.rank_processes import EXIT_FAILED, print_error
from onefold.tools.cli.ranks import Job

# Variables of this shell that are sent to all nodes: names, and the beginnings of names.
EXPORTED = (
    "GLOO_", "HF_", "LD_LIBRARY_PATH", "MLFLOW_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TOKENIZERS_", "TORCH_",
    "TRITON_", "UCX_", "WANDB_",
)  # fmt: skip
# The time that other nodes have to end by themselves when one has failed.
GRACE_SECONDS = 10.0
# The time after which connections are closed that do not end although their nodes were asked to stop.
LOST_SECONDS = 300.0
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_EXIT_OF_SSH = 255
_MODULE = "onefold.tools.cli.remote_node"


@dataclass(frozen=True)
class SshOptions:
    """How to reach other nodes."""

    arguments: Sequence[str] = ()
    """Arguments of ssh, such as `-p 2222`."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables for all ranks."""
    setup: str = ""
    """A shell command that a node executes first, such as `source venv/bin/activate`."""
    local: frozenset[str] = frozenset()
    """Nodes that are this machine and are started without ssh."""


def exported(names: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `EXPORTED` and those of `names`."""
    found = os.environ if environment is None else environment
    return {name: value for name, value in found.items() if name.startswith(EXPORTED) or name in names}


def run_on_nodes(jobs: Mapping[str, Job], command: Sequence[str], ssh: SshOptions) -> int:
    """Run a command in the ranks of all nodes until they end. Return the exit code of the node that failed first."""
    secret = JobSecret.find(os.environ) or JobSecret.make()
    environment = {**ssh.environment, JOB_SECRET: str(secret.text)}
    environment.pop(JOB_SECRET_FILE, None)  # of this machine
    nodes = []
    with _signals() as received:
        try:
            for name, job in jobs.items():
                order = {
                    "version": __version__,
                    "job": asdict(job),
                    "command": list(command),
                    "folder": os.getcwd(),
                    "environment": environment,
                }
                nodes.append(_Node(name, _command(name, ssh), order))
            return _wait(nodes, received, is_elastic=any(job.is_elastic for job in jobs.values()))
        finally:
            for node in nodes:
                node.kill()


def _command(name: str, ssh: SshOptions) -> list[str]:
    if name in ssh.local:
        return [sys.executable, "-m", _MODULE]
    remote = f"exec {shlex.join([sys.executable, '-m', _MODULE])}"
    return ["ssh", *_OPTIONS, *ssh.arguments, name, f"{ssh.setup} && {remote}" if ssh.setup else remote]


class _Node:
    """The connection to one node, or the launcher on this one."""

    def __init__(self, name: str, command: Sequence[str], order: Mapping[str, object]) -> None:
        self.name = name
        self.is_remote = command[0] == "ssh"
        # In a session of its own, ssh does not receive Ctrl-C of the terminal, which is sent as a line.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.write(json.dumps(order))

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def write(self, line: str) -> None:
        """Send a line, unless the node has ended."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def stop(self) -> None:
        """Ask the node to stop its ranks."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Close the connection, and with it the ranks of the node."""
        self.stop()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()


def _wait(nodes: Sequence[_Node], received: list[int], *, is_elastic: bool) -> int:
    """Forward signals until all nodes have ended. When one fails, let the others end, unless the job is elastic.

    An elastic job has succeeded if any node has.
    """
    failed: _Node | None = None
    failed_at, num_sent, running = 0.0, 0, list(nodes)
    while running:
        time.sleep(0.05)
        for number in received[num_sent:]:
            num_sent += 1
            for node in running:
                node.write(f"signal {number}")
        for node in [node for node in running if node.exit_code is not None]:
            running.remove(node)
            if node.exit_code and failed is None:
                failed, failed_at = node, time.monotonic()
        if failed is not None and not is_elastic and time.monotonic() - failed_at > GRACE_SECONDS:
            for node in running:
                node.stop()
            if time.monotonic() - failed_at > LOST_SECONDS:
                print_error(
                    f"onefold: {', '.join(node.name for node in running)} did not end. Look for their processes."
                )
                break
    if received:
        return 128 + received[0]
    if failed is None or (is_elastic and any(node.exit_code == 0 for node in nodes)):
        return 0
    if failed.is_remote and failed.exit_code == _EXIT_OF_SSH:
        print_error(f"onefold: the connection to {failed.name} failed. Check `ssh {failed.name} true`.")
        return EXIT_FAILED
    print_error(f"onefold: node {failed.name} ended with exit code {failed.exit_code}")
    code = failed.exit_code or EXIT_FAILED
    return code if code > 0 else 128 - code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that a launcher forwards."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in FORWARDED}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
