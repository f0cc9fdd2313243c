"""The nodes of the soak: launchers that are started again whenever they end, a small disk, and a network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.launch import ROOT
from benchmarks.network import UNSHAPED, Host, NoNetwork, Rate, two_hosts
from benchmarks.soak_job import JobOptions
from benchmarks.soak_records import Records

DISK_BYTES = 48 << 20


class Cluster:
    """One job: a launcher on each node, and the records of the ranks."""

    def __init__(self, options: JobOptions, hosts: list[Host], num_ranks: int, most_ranks: int) -> None:
        """`hosts`: two namespaces, or none for a job on this node."""
        self.options = options
        self.hosts = hosts
        self.num_nodes = len(hosts) or 1
        self.num_ranks = num_ranks
        self.folder = Path(options.folder)
        self.save_dir = Path(options.save_dir)
        for folder in (self.folder, self.save_dir):
            folder.mkdir(parents=True, exist_ok=True)
        self.records = Records(self.folder, most_ranks)
        self.num_launches = 0
        self.ends: list[str] = []
        """How each launcher ended that was started again."""
        self.launchers: list[subprocess.Popen[bytes] | None] = [None] * self.num_nodes
        self._is_done = [False] * self.num_nodes

    def poll(self) -> bool:
        """Start launchers that have ended again. Return whether all have ended because the job is complete."""
        for node, launcher in enumerate(self.launchers):
            if self._is_done[node]:
                continue
            code = launcher.poll() if launcher is not None else None
            if code == 0:
                self._is_done[node] = True
            elif launcher is None or code is not None:
                if launcher is not None:
                    self.ends.append(f"node {node}: {code}")
                self.launchers[node] = self._launch(node)
        return all(self._is_done)

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--max-restarts", "100000"]
        command += ["--nproc", str(self.num_ranks // self.num_nodes)]
        own = {}
        if self.hosts:
            host = self.hosts[node]
            command = ["ip", "netns", "exec", host.namespace, *command, "--num_nodes", str(self.num_nodes)]
            command += ["--node_rank", str(node), "--master_addr", self.hosts[0].address]
            own = {"GLOO_SOCKET_IFNAME": host.interface}
        command += [str(ROOT / "benchmarks" / "soak_job.py"), self.options.to_json()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT), **own}
        self.num_launches += 1
        with (self.folder / f"launcher.{node}.log").open("ab") as log:
            log.write(f"--- launch {self.num_launches}\n".encode())
            log.flush()
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def start_again_on(self, num_ranks: int) -> None:
        """Let `poll` start the job on another number of ranks, after it is complete."""
        self.num_ranks = num_ranks
        self.launchers = [None] * self.num_nodes
        self._is_done = [False] * self.num_nodes

    # -- processes -------------------------------------------------------------------------------------------------

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank of the newest start, unless it has ended."""
        pid = self.records.pids.get(rank)
        with suppress(OSError):
            if pid is not None and str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)

    def signal_launcher(self, node: int, number: signal.Signals) -> None:
        launcher = self.launchers[node]
        if launcher is not None and launcher.poll() is None:
            launcher.send_signal(number)

    def finish_at(self, step: int) -> None:
        """Let the job end after this step."""
        part = self.folder / "last_step.part"
        part.write_text(str(step))
        part.rename(self.folder / "last_step")

    def end(self) -> None:
        """Kill the launchers. The kernel kills their ranks."""
        for launcher in self.launchers:
            if launcher is not None:
                launcher.kill()
                launcher.wait()
        deadline = time.monotonic() + 20
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return the processes of the ranks that still run."""
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                words = (path / "cmdline").read_bytes() if path.name.isdecimal() else b""
                if b"soak_job.py" in words and str(self.folder).encode() in words:
                    found.append(int(path.name))
        return found

    def last_words(self) -> str:
        """Return the ends of the launchers' logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}"
            for path in sorted(self.folder.glob("launcher.*.log"))
        )


@contextmanager
def cluster(
    folder: Path, options: JobOptions, num_nodes: int, num_ranks: int, most_ranks: int, small_disk: bool
) -> Iterator[Cluster]:
    """Make the nodes and the disk of a job, and remove them at the end. Raise NoNetwork if there can be no nodes."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(Rate(UNSHAPED))) if num_nodes == 2 else []
        disk = folder / "disk"
        disk.mkdir(parents=True)
        if small_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
            subprocess.run(mount, check=True, capture_output=True)
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], capture_output=True)
        own = replace(options, folder=str(folder), save_dir=str(disk / "saved"))
        made = Cluster(own, hosts, num_ranks, most_ranks)
        stack.callback(made.end)
        yield made


def why_no_nodes() -> str | None:
    """Return why this machine can have no network between two nodes, or None."""
    try:
        with two_hosts(Rate(UNSHAPED)):
            pass
    except NoNetwork as error:
        return str(error)
    return None if shutil.which("nft") else "there is no `nft`"


def why_no_disk(folder: Path) -> str | None:
    """Return why this machine can have no small disk, or None."""
    place = folder / "try"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        return f"mounting a small disk needs root on Linux: {done.stderr.strip()}"
    subprocess.run(["umount", str(place)], check=True)
    return None
