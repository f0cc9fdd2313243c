"""The faults of the soak, each a function of a running job and of random draws.

A fault is a generator: it injects the fault, yields the seconds to wait, if any, while the job is watched, and then
ends the fault. It returns nothing. The watching loop starts launchers again and reads the records meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.soak_cluster import Cluster
from onefold.checkpoint.format import folder as folders

FAULTS: dict[str, Callable[[Run], Iterator[float]]] = {}
# Faults that need two nodes, and those that need a small disk.
OF_NETWORK = ("cut the network", "delay packets", "drop packets")
OF_DISK = ("fill the disk",)
# Faults that change the number of ranks.
RESHAPING = ("reshape after a kill", "reshape after a stop signal")


@dataclass
class Run:
    """What faults may use."""

    cluster: Cluster
    draws: random.Random
    damaged: set[str] = field(default_factory=set)
    """Data folders that were damaged on purpose, and tags whose manifests were."""
    expected_start: int | None = None
    """The step of the checkpoint that the next start must load."""
    num_damaged: int = 0


def fault(name: str) -> Callable[[Callable[[Run], Iterator[float]]], Callable[[Run], Iterator[float]]]:
    """Register a fault under its name in the report."""

    def register(function: Callable[[Run], Iterator[float]]) -> Callable[[Run], Iterator[float]]:
        FAULTS[name] = function
        return function

    return register


def _any_rank(run: Run) -> int:
    return run.draws.randrange(run.cluster.num_ranks)


def _signal_all(run: Run, number: signal.Signals) -> None:
    for rank in range(run.cluster.num_ranks):
        run.cluster.signal_rank(rank, number)


# -- processes -------------------------------------------------------------------------------------------------------


@fault("kill a rank")
def _kill_a_rank(run: Run) -> Iterator[float]:
    run.cluster.signal_rank(_any_rank(run), signal.SIGKILL)
    yield from ()


@fault("kill all ranks")
def _kill_all(run: Run) -> Iterator[float]:
    _signal_all(run, signal.SIGKILL)
    yield from ()


@fault("stop and continue a rank")
def _pause(run: Run) -> Iterator[float]:
    rank = _any_rank(run)
    run.cluster.signal_rank(rank, signal.SIGSTOP)
    yield run.draws.uniform(1, 20)
    run.cluster.signal_rank(rank, signal.SIGCONT)


@fault("raise in user code")
def _raise(run: Run) -> Iterator[float]:
    (run.cluster.folder / f"raise.{_any_rank(run)}").touch()
    yield from ()


@fault("kill a launcher")
def _kill_launcher(run: Run) -> Iterator[float]:
    run.cluster.signal_launcher(run.draws.randrange(run.cluster.num_nodes), signal.SIGKILL)
    yield from ()


@fault("kill all launchers")
def _kill_launchers(run: Run) -> Iterator[float]:
    for node in range(run.cluster.num_nodes):
        run.cluster.signal_launcher(node, signal.SIGKILL)
    yield from ()


@fault("stop signal")
def _stop_signal(run: Run) -> Iterator[float]:
    """Send SIGUSR1 to a rank, as a scheduler does: all ranks save and end, and the launchers are started again."""
    run.cluster.signal_rank(_any_rank(run), signal.SIGUSR1)
    yield from ()


# -- the disk --------------------------------------------------------------------------------------------------------


@fault("fill the disk")
def _fill(run: Run) -> Iterator[float]:
    ballast = run.cluster.save_dir.parent / "ballast"
    with ballast.open("wb") as file:
        for _ in range(3):  # until retention has freed nothing in between
            found = os.statvfs(ballast)
            if found.f_bfree:
                try:
                    os.posix_fallocate(file.fileno(), 0, file.seek(0, 2) + found.f_bfree * found.f_frsize)
                except OSError:  # a save has taken some of it
                    break
    yield run.draws.uniform(2, 12)
    ballast.unlink()


@fault("damage the newest checkpoint")
def _damage(run: Run) -> Iterator[float]:
    """Damage the checkpoint that `latest` names while all ranks are stopped, and kill them."""
    cluster = run.cluster
    _signal_all(run, signal.SIGSTOP)
    time.sleep(0.1)
    found = [each for each in folders.list_tags(cluster.save_dir) if each.manifest is not None and not each.problems]
    whole = [each for each in found if not _data_of(each) & run.damaged]
    latest = folders.read_latest(cluster.save_dir)
    chosen = next((each for each in whole if each.tag == latest), None)
    if chosen is None or len(whole) < 2:  # the older one has been damaged before
        _signal_all(run, signal.SIGCONT)
        yield from ()
        return
    _damage_checkpoint(run, chosen)
    run.damaged |= _data_of(chosen)
    run.num_damaged += 1
    others = [each for each in whole if each.tag != chosen.tag]
    run.expected_start = max(others, key=lambda each: each.age).manifest.global_steps  # type: ignore[union-attr]
    _signal_all(run, signal.SIGKILL)


def _data_of(checkpoint: folders.FoundCheckpoint) -> set[str]:
    assert checkpoint.manifest is not None
    return {f"{checkpoint.tag}/{name}" for name in checkpoint.manifest.data_folders}


def _damage_checkpoint(run: Run, checkpoint: folders.FoundCheckpoint) -> None:
    """Flip a bit in a part, truncate or remove its file, or flip a bit in the manifest."""
    assert checkpoint.manifest is not None
    files = [checkpoint.folder / file.name for file in checkpoint.manifest.files]
    path, way = run.draws.choice(files), run.draws.choice(["flip", "flip", "truncate", "remove", "manifest"])
    if way == "manifest":
        path = checkpoint.folder / "manifest.json"
        run.damaged.add(checkpoint.tag)
    if way == "remove":
        path.unlink()
    elif way == "truncate":
        os.truncate(path, run.draws.randrange(path.stat().st_size))
    else:
        place = run.draws.randrange(path.stat().st_size - 1)  # the last byte of a manifest ends its line
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0] ^ (1 << run.draws.randrange(8))
            file.seek(place)
            file.write(bytes([byte]))


# -- the network -----------------------------------------------------------------------------------------------------


def _in_node(run: Run, node: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the namespace of a node."""
    host = run.cluster.hosts[node]
    return subprocess.run(["ip", "netns", "exec", host.namespace, *command], capture_output=True, text=True)


def _configure(run: Run, node: int, *command: str) -> None:
    """Run a command in the namespace of a node. Raise if it fails."""
    done = _in_node(run, node, *command)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` says: {done.stderr.strip()}")


def _drop(run: Run, percent: int, seconds: float) -> Iterator[float]:
    """Drop some of the packets that a node receives."""
    node = run.draws.randrange(2)
    some = "" if percent == 100 else f"numgen random mod 100 < {percent}"
    rule = f"iifname {run.cluster.hosts[node].interface} {some} drop"
    chain = "add chain inet soak input { type filter hook input priority 0; }"
    _configure(run, node, "nft", f"add table inet soak; {chain}; add rule inet soak input {rule}")
    yield seconds
    _configure(run, node, "nft", "delete table inet soak")


@fault("drop packets")
def _drop_packets(run: Run) -> Iterator[float]:
    yield from _drop(run, run.draws.randrange(5, 40), run.draws.uniform(3, 12))


@fault("cut the network")
def _cut(run: Run) -> Iterator[float]:
    yield from _drop(run, 100, run.draws.uniform(1, 12))


@fault("delay packets")
def _delay(run: Run) -> Iterator[float]:
    """Delay packets by tens of milliseconds, or by the queue of a slow link where the kernel has no netem."""
    node, host = 0, run.cluster.hosts[0]
    place = ["dev", host.interface, "root"]
    millis = run.draws.randrange(10, 80)
    if _in_node(
        run, node, "tc", "qdisc", "add", *place, "netem", "delay", f"{millis}ms", f"{millis // 2}ms"
    ).returncode:
        slow = ["tbf", "rate", f"{2000 // millis * 100}kbit", "burst", "16kb", "limit", "4mb"]
        _configure(run, node, "tc", "qdisc", "add", *place, *slow)
    yield run.draws.uniform(3, 12)
    _configure(run, node, "tc", "qdisc", "del", *place)


# -- the number of ranks -----------------------------------------------------------------------------------------------


def _reshape(run: Run, number: signal.Signals) -> Iterator[float]:
    """End the job by a signal to its launcher, and let it start again on another number of ranks."""
    cluster = run.cluster
    cluster.num_ranks = run.draws.choice([world for world in (1, 2, 3, 4) if world != cluster.num_ranks])
    cluster.signal_launcher(0, number)
    yield from ()


@fault("reshape after a kill")
def _reshape_after_kill(run: Run) -> Iterator[float]:
    yield from _reshape(run, signal.SIGKILL)


@fault("reshape after a stop signal")
def _reshape_after_signal(run: Run) -> Iterator[float]:
    yield from _reshape(run, signal.SIGUSR1)


def usable_faults(num_nodes: int, has_disk: bool, reshape: bool) -> list[str]:
    """Return the names of the faults that a job can have."""
    excluded = {
        *(() if num_nodes == 2 else OF_NETWORK),
        *(() if has_disk else OF_DISK),
        *(() if reshape else RESHAPING),
    }
    return [name for name in FAULTS if name not in excluded]
