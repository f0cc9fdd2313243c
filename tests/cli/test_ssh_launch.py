"""`onefold launch --ssh` with a real sshd on this machine, which is reached under two names."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from processes import MARK, MarkedJob, marked_job, wait_until

from onefold.job_secret import JobSecret
from onefold.tools.cli.ssh_launch import exported

pytestmark = pytest.mark.program

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HEAD = """
import json, os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(__file__).parent
def ready(name, text=""):
    (folder / f"{name}.{rank}.part").write_text(text or str(os.getpid()))
    (folder / f"{name}.{rank}.part").rename(folder / f"{name}.{rank}")
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SshJob:
    """A job on two nodes, which are names of this machine in the configuration of ssh."""

    def __init__(self, job: MarkedJob, server: subprocess.Popen[bytes]) -> None:
        self.job, self.folder, self.server = job, job.folder, server
        (self.folder / "hosts").write_text("nodea slots=1\nnodeb slots=1\n")
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def script(self, text: str) -> str:
        (self.folder / "script.py").write_text(HEAD + text)
        return str(self.folder / "script.py")

    def launch(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        flags = ["--hostfile", str(self.folder / "hosts"), "--ssh", "--ssh_args", f"-F {self.folder}/ssh_config"]
        flags += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--export", f"{MARK},OF_TOKEN"]
        return self.job.launch(*flags, *arguments, OF_TOKEN="token-of-the-user", **environment)

    def children(self) -> list[int]:
        """Return the processes that descend from the server."""
        parents: dict[int, int] = {}
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdecimal():
                    parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        found, left = [], [self.server.pid]
        while left:
            parent = left.pop()
            own = [pid for pid, other in parents.items() if other == parent]
            found += own
            left += own
        return found

    def wait_until_gone(self) -> None:
        wait_until(lambda: not self.children() and not self.job.pids(), 30)

    def commands(self) -> set[str]:
        """Return the command lines of all processes that were seen while the job ran."""
        self._stop.set()
        self._watcher.join()
        return self.seen

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self.seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))


@pytest.fixture
def ssh_job(tmp_path: Path) -> Iterator[SshJob]:
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server and openssh-client")
    tmp_path.chmod(0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    port = free_port()
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {tmp_path}/host_key\nPidFile {tmp_path}/sshd.pid\n"
        f"AuthorizedKeysFile {tmp_path}/user_key.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin yes\n"
    )
    (tmp_path / "known_hosts").write_text(f"nodea,nodeb {(tmp_path / 'host_key.pub').read_text()}")
    (tmp_path / "ssh_config").write_text(
        f"Host nodea nodeb\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  HostKeyAlias nodea\n"
        f"  IdentityFile {tmp_path}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {tmp_path}/known_hosts\n"
        "  LogLevel ERROR\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd refuses to start without it
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        tried = subprocess.CompletedProcess[bytes]([], 1)
        deadline = time.monotonic() + 20
        while tried.returncode and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.1)
            command = ["ssh", "-o", "BatchMode=yes", "-F", str(tmp_path / "ssh_config"), "nodea", "true"]
            tried = subprocess.run(command, capture_output=True, check=False)
        if tried.returncode:
            pytest.skip(f"sshd does not accept connections here: {tried.stderr.decode()[:300]}")
        with marked_job(tmp_path) as job:
            made = SshJob(job, server)
            yield made
            made.commands()
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_the_ranks_of_all_nodes_start_and_nothing_secret_is_on_a_command_line(ssh_job: SshJob) -> None:
    path = ssh_job.script(
        "names = ('RANK', 'WORLD_SIZE', 'OF_TOKEN', 'ONEFOLD_JOB_SECRET', 'CUDA_VISIBLE_DEVICES')\n"
        "row = {name: os.environ.get(name) for name in names}\n"
        "ready('row', json.dumps({**row, 'folder': os.getcwd(), 'stdin': sys.stdin.read()}))\n"
    )
    launcher = ssh_job.launch(path, ONEFOLD_JOB_SECRET="secret-of-the-user-0123")
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, stderr
    rows = [json.loads((ssh_job.folder / f"row.{rank}").read_text()) for rank in (0, 1)]
    secret = JobSecret("secret-of-the-user-0123").derive("start 0").text
    expected = {"WORLD_SIZE": "2", "OF_TOKEN": "token-of-the-user", "ONEFOLD_JOB_SECRET": secret, "stdin": ""}
    expected |= {"CUDA_VISIBLE_DEVICES": "0", "folder": os.getcwd()}
    assert rows == [{"RANK": str(rank), **expected} for rank in (0, 1)]
    ssh_job.wait_until_gone()
    commands = ssh_job.commands()
    assert any("remote_node" in command and command.startswith("ssh") for command in commands)
    shown = ("token-of-the-user", "secret-of-the-user", str(secret))
    assert [command for command in commands if any(text in command for text in shown)] == []


@pytest.mark.slow
def test_the_exit_code_of_a_failed_rank_is_that_of_the_launcher(ssh_job: SshJob) -> None:
    path = ssh_job.script("ready('up')\nif rank == 1:\n    wait_for('up.0')\n    sys.exit(7)\ntime.sleep(600)\n")
    launcher = ssh_job.launch(path)
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 7, stderr
    assert "onefold: rank 1 (" in stderr
    assert "onefold: node nodeb ended with exit code 7" in stderr
    ssh_job.wait_until_gone()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_of_all_nodes(ssh_job: SshJob, number: signal.Signals) -> None:
    path = ssh_job.script(
        "signal.signal(signal.SIGTERM, lambda *_: (ready('told'), sys.exit(143)))\n"
        "ready('up')\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    ready('told')\n    sys.exit(130)\n"
    )
    launcher = ssh_job.launch(path)
    wait_until(lambda: all((ssh_job.folder / f"up.{rank}").exists() for rank in (0, 1)))
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, stderr
    assert all((ssh_job.folder / f"told.{rank}").exists() for rank in (0, 1))
    ssh_job.wait_until_gone()
    assert ssh_job.job.folders() == []


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(ssh_job: SshJob) -> None:
    path = ssh_job.script("ready('up')\ntime.sleep(600)\n")
    launcher = ssh_job.launch(path)
    wait_until(lambda: all((ssh_job.folder / f"up.{rank}").exists() for rank in (0, 1)))
    launcher.kill()
    launcher.wait()
    ssh_job.wait_until_gone()


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_is_named(ssh_job: SshJob) -> None:
    (ssh_job.folder / "hosts").write_text("nodea slots=1\nnodec.invalid slots=1\n")
    launcher = ssh_job.launch(ssh_job.script("time.sleep(600)\n"))
    _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "onefold: the connection to nodec.invalid failed" in stderr
    ssh_job.wait_until_gone()


def test_variables_of_libraries_and_those_that_are_named_are_sent() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "a",
        "RANK": "1",
        "HOME": "/",
        "MY": "x",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert exported(["MY", "OTHER"], environment) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a", "MY": "x"}
