"""Measure bus, host and disk of this machine, and compute what each offload setting would cost per step.

[Note: what a step costs]
The plan counts the host-device and disk traffic of a step, and the measured rates turn it into seconds. Bus, host and
disk work at the same time as the device, so a step takes at least as long as the slowest of them. If the device
computes longer than that, it hides all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from onefold.config import Aio, load_config
from onefold.log import logger
from onefold.offload.buffer import Buffer
from onefold.offload.bus import Bus
from onefold.offload.host_memory import PAGE, available_bytes, page_aligned
from onefold.offload.nvme import SwapFiles
from onefold.offload.state_codec import Dither
from onefold.optim.offloaded_step import SHARED_TILE
from onefold.optim.pipeline import ElementwiseUpdate, StateWindow, StepValues
from onefold.optim.rules import AdamRule
from onefold.plan import (
    FlatParamSpec,
    Layout,
    OffloadTraffic,
    StateSpec,
    Tier,
    assign_tiers,
    count_bytes,
    count_offload_traffic,
    make_plan,
)
from onefold.plan.layout import Segment
from onefold.plan.traffic import OffloadedStepSplit, is_streamed
from onefold.tools.bench.link_bench import LinkRates, measure_links

Progress = Callable[[str, int, int], None]
"""Called with the current measurement, the number of measurements done, and their total."""

_ROUNDS = 3
# Seconds after which a slow measurement is not repeated.
_PATIENCE = 2.0
_PIECES = 8


@dataclass(frozen=True)
class BusRates:
    """GB/s between the device and page-locked memory: in each direction alone, and in total with both at once."""

    down: float
    up: float
    both: float

    def seconds(self, traffic: OffloadTraffic) -> float:
        """Return the seconds that a step's traffic takes."""
        return _seconds(traffic.down, self.down, traffic.up, self.up, self.both)


@dataclass(frozen=True)
class DiskRates:
    """GB/s between swap files and host memory: reading, writing, and in total with both at once."""

    paths: tuple[str, ...]
    read: float
    write: float
    both: float
    direct: bool
    """Whether the files were opened with O_DIRECT; otherwise the rates are those of the page cache."""
    free_bytes: int
    when: str

    def seconds(self, traffic: OffloadTraffic) -> float:
        """Return the seconds that a step's traffic takes."""
        return _seconds(traffic.read, self.read, traffic.written, self.write, self.both)


@dataclass(frozen=True)
class Measured:
    """Measured rates of a machine. None: not present, or not measured."""

    host: str
    when: str
    num_threads: int
    host_free_bytes: int
    host_copy: float
    """GB/s of copied bytes."""
    adam: float
    """Parameters per second, with 16-bit gradients and fp32 masters and moments."""
    device: str | None = None
    device_bytes: int | None = None
    page_lock: float | None = None
    """GB/s of allocating and locking memory."""
    bus: BusRates | None = None
    disk: DiskRates | None = None
    products: float | None = None
    """FLOP/s of matrix products: bf16 on a GPU, otherwise fp32 on the CPU."""
    launch: float | None = None
    """Host seconds per small op, in forward and backward."""
    boundary: float | None = None
    """Host seconds per flat parameter of an optimizer step."""
    sharding: float | None = None
    """Host seconds per sharded flat parameter of a forward and backward."""
    contention: float | None = None
    """Time of ops while all CPU ranks compute, relative to their time alone."""
    links: LinkRates | None = None

    @staticmethod
    def of(facts: dict[str, Any]) -> Measured:
        """Build from JSON. Raise if a key is missing or unknown, or a rate is not positive."""
        bus = BusRates(**facts["bus"]) if facts["bus"] else None
        disk = DiskRates(**{**facts["disk"], "paths": tuple(facts["disk"]["paths"])}) if facts["disk"] else None
        links = LinkRates(**facts["links"]) if facts.get("links") else None
        found = Measured(**{**facts, "bus": bus, "disk": disk, "links": links})
        rates = [found.host_copy, found.adam]
        rates += [links.sent, links.call] if links else []
        rates += [bus.down, bus.up, bus.both] if bus else []
        rates += [disk.read, disk.write, disk.both] if disk else []
        if not all(rate > 0 for rate in rates):
            raise ValueError("a rate is not positive")
        return found


def _seconds(first: int, first_rate: float, second: int, second_rate: float, both_rate: float) -> float:
    """Return the seconds of traffic in two directions, which share `both_rate` and have a limit each."""
    return max(first / first_rate, second / second_rate, (first + second) / both_rate) / 1e9


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(
    num_bytes: int, paths: Sequence[str] = (), show_progress: Progress = lambda now, done, total: None, ranks: int = 1
) -> Measured:
    """Measure this machine, with about `num_bytes` in each measurement.

    `paths` are folders on the drives to measure, and `ranks` is the number of processes between which links are.
    """
    parts: dict[str, Callable[[], object]]
    parts = {"host_copy": lambda: measure_copy(num_bytes), "adam": lambda: measure_adam(num_bytes)}
    parts |= {"products": measure_products, "launch": measure_launch}
    found: dict[str, Any] = {}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_bytes": properties.total_memory}
        parts |= {"page_lock": lambda: measure_page_lock(num_bytes), "bus": lambda: measure_bus(num_bytes, device)}
    if paths:
        parts["disk"] = lambda: measure_disk(num_bytes, paths)
    if ranks > 1:
        parts["links"] = lambda: measure_links(ranks, num_bytes)
    free = available_bytes()
    for done, (name, work) in enumerate(parts.items()):
        show_progress(name.replace("_", " "), done, len(parts))
        found[name] = work()
    threads = torch.get_num_threads()
    return Measured(socket.gethostname(), _now(), num_threads=threads, host_free_bytes=free, **found)


def measure_copy(num_bytes: int) -> float:
    """Measure GB/s from host memory to host memory, on all threads."""
    source, target = _memory(num_bytes // 2), _memory(num_bytes // 2)
    return _best(lambda: target.copy_(source), source.nbytes) / 1e9


def measure_adam(num_bytes: int) -> float:
    """Measure parameters per second of the host step, with bf16 gradients and fp32 masters and moments."""
    numel, rule = max(num_bytes // 14 // PAGE, 1) * PAGE, AdamRule()
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True}
    names = rule.state_names([hyper])
    master, *moments = _memory(numel * 4 * (1 + len(names))).view(torch.float32).split(numel)
    gradient = _memory(numel * 2).view(torch.bfloat16).fill_(1e-3)
    states = {name: Buffer.of(moment) for name, moment in zip(names, moments, strict=True)}
    window = StateWindow(0, numel, Buffer.of(master), states)
    elementwise = ElementwiseUpdate([rule], SHARED_TILE if torch.get_num_threads() > 2 else None)
    # The gradient is scaled, as with clipping or a loss scale.
    step = StepValues(number=1, coefficient=0.5, groups=[hyper])
    with torch.no_grad():
        return _best(lambda: elementwise.update(OneGroup(), gradient, step, window, 0, numel, None), numel)


class OneGroup:
    """A shard of one optimizer group without frozen elements, as far as `ElementwiseUpdate` needs it."""

    compared_model_weight = None

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        """Return one segment of group 0."""
        return [Segment(0, first, last)]

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        """Return one range without stochastic rounding."""
        return [(first, last, None)]


def measure_products() -> float:
    """Measure FLOP/s of a matrix product of the size of a layer."""
    on_gpu = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    left = torch.zeros(size, size, dtype=dtype, device="cuda" if on_gpu else "cpu")
    right = torch.zeros_like(left)

    def multiply() -> None:
        for _ in range(4):
            left @ right
        if on_gpu:
            torch.cuda.synchronize()

    return _best(multiply, 4 * 2 * size**3)


def measure_launch() -> float:
    """Measure host seconds per op in the forward and backward of a chain of small ops."""
    num, device = 500, "cuda" if torch.cuda.is_available() else "cpu"
    start = torch.zeros(16, device=device, requires_grad=True)

    def chain() -> None:
        found = start
        for _ in range(num):
            found = found * 0.5
        found.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return 1 / _best(chain, 2 * num)


def measure_page_lock(num_bytes: int) -> float:
    """Measure GB/s of allocating page-locked memory, which `initialize` does."""
    return _best(lambda: page_aligned(num_bytes, pinned=True), num_bytes) / 1e9


def measure_bus(num_bytes: int, device: torch.device) -> BusRates:
    """Measure copies between device and host, on the streams that steps use."""
    half = max(num_bytes // 2, PAGE)
    low = page_aligned(2 * half, pinned=True).split(half)
    high = torch.zeros(2 * half, dtype=torch.uint8, device=device).split(half)
    bus = Bus(device, lambda way, size: None)

    def both() -> None:
        arrivals = bus.down(high[0], low[0]), bus.up(low[1], high[1])
        for arrival in arrivals:
            arrival.synchronize()

    return BusRates(
        down=_best(lambda: bus.down(high[0], low[0]).synchronize(), half) / 1e9,
        up=_best(lambda: bus.up(low[1], high[1]).synchronize(), half) / 1e9,
        both=_best(both, 2 * half) / 1e9,
    )


def measure_disk(num_bytes: int, paths: Sequence[str]) -> DiskRates:
    """Measure reads and writes of swap files like those of a job. The files are always removed."""
    num_pieces = _PIECES * len(paths)
    size = max(num_bytes // num_pieces // PAGE, 1) * PAGE
    memory = _memory(num_pieces * size).split(size)
    # Drives and file systems may compress zeros.
    noise = torch.randint(0, 256, (min(size, 1 << 24),), dtype=torch.uint8)
    for piece in memory:
        for part in piece.split(len(noise)):
            part.copy_(noise[: len(part)])
    swap = SwapFiles(paths, aio=Aio(), rank=0, count=lambda way, size: None)
    on_disk = [swap.reserve(size, torch.uint8) for _ in memory]

    def transfer(*reads: bool) -> None:
        """Read or write the pieces, alternating as in `reads`. Each piece is divided among all drives."""
        turns = [reads[index % len(reads)] for index in range(num_pieces)]
        pairs = zip(on_disk, memory, turns, strict=True)
        started = [disk.start_load(host) if read else disk.start_store(host) for disk, host, read in pairs]
        for each in started:
            each.wait()

    try:
        swap.open()
        total = num_pieces * size
        return DiskRates(
            paths=tuple(os.path.abspath(path) for path in paths),
            write=_best(lambda: transfer(False), total) / 1e9,
            read=_best(lambda: transfer(True), total) / 1e9,
            both=_best(lambda: transfer(True, False), total) / 1e9,
            direct=swap.is_direct,
            free_bytes=sum({os.stat(path).st_dev: shutil.disk_usage(path).free for path in paths}.values()) + total,
            when=_now(),
        )
    finally:
        swap.close()


def _best(work: Callable[[], object], amount: int) -> float:
    """Amount a second, in the best of three after one to warm up; fewer where it is slow."""
    work()
    start, best = time.perf_counter(), float("inf")
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        made = work()
        best = min(best, time.perf_counter() - before)
        del made  # giving memory back is not part of it
        if time.perf_counter() - start > _PATIENCE:
            break
    return amount / best


def _memory(num_bytes: int) -> torch.Tensor:
    """Return host memory like that of a job, with all pages touched."""
    return page_aligned(max(num_bytes, PAGE)).zero_()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- storing ---------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Return the file of the measurements of all nodes, which may share a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onefold" / "tiers.json"


def load_measured(host: str | None = None) -> Measured | None:
    """Return the stored measurements of a node, by default this one, or None if they are missing or unreadable."""
    facts = _load_hosts().get(host or socket.gethostname())
    if facts is None:
        return None
    try:
        return Measured.of(facts)
    except (KeyError, TypeError, ValueError) as error:
        _warn_damaged(error)
        return None


def save_measured(measured: Measured) -> Path:
    """Store measurements next to those of other nodes. The file is replaced atomically."""
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**_load_hosts(), measured.host: asdict(measured)}, indent=2) + "\n"
    temporary = file.with_name(f".tiers-{measured.host}-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _load_hosts() -> dict[str, Any]:
    try:
        hosts = json.loads(cache_file().read_text())
        if isinstance(hosts, dict):
            return hosts
        raise TypeError("not a JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:
        _warn_damaged(error)
        return {}


def _warn_damaged(error: Exception) -> None:
    text = "%s cannot be read (%s: %s) and is ignored. Run `onefold bench tiers` to write it again."
    logger.warning(text, cache_file(), type(error).__name__, error)


# -- arithmetic ------------------------------------------------------------------------------------------------------

_CPU, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/"}
# The section `zero_optimization` of each setting.
SETTINGS: dict[str, dict[str, Any]] = {
    "all on the device": {"stage": 2},
    "optimizer cpu, ratio 0.3": {"stage": 2, "offload_optimizer": {**_CPU, "ratio": 0.3}},
    "optimizer cpu": {"stage": 2, "offload_optimizer": _CPU},
    "optimizer cpu, stepped by the host": {"stage": 2, "offload_optimizer": _CPU},
    "optimizer and param cpu": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "optimizer nvme": {"stage": 2, "offload_optimizer": _NVME},
    "optimizer and param nvme": {"stage": 3, "offload_optimizer": _NVME, "offload_param": _NVME},
}
_MOMENTS = StateSpec(tuple(AdamRule().state_names([{}])))
# Models are offloaded by units; with this many, a ratio of tenths is exact.
_NUM_UNITS = 20


@dataclass(frozen=True)
class Cost:
    """The cost of a setting for one rank: bytes stored by tier, traffic per step, and seconds by resource."""

    setting: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    offload_traffic: OffloadTraffic
    seconds: dict[str, float | None]
    """Seconds by resource. 0.0: not used; None: used, but not measured."""

    @property
    def bound_by(self) -> str | None:
        """The slowest measured resource."""
        known = {name: value for name, value in self.seconds.items() if value}
        return max(known, key=known.__getitem__) if known else None


def cost_of(setting: str, num_parameters: float, measured: Measured) -> Cost:
    """Return the cost of a setting for a bf16 model with Adam, on one rank, with one micro-step."""
    own = {"offloaded_step": "host"} if "stepped by the host" in setting else {}
    config = load_config({"bf16": {"enabled": True}, "zero_optimization": SETTINGS[setting], "onefold": own})
    plan = make_plan(config, world_size=1)
    # All of it, independent of the memory of this host.
    plan = replace(plan, offload=replace(plan.offload, param=replace(plan.offload.param, max_in_cpu=0)))
    layout = Layout.of([("weight", (max(round(num_parameters / _NUM_UNITS), 1),), 0)], 1)
    spec = FlatParamSpec(layout, torch.bfloat16, trainable=True, persistent=False, state_spec=_MOMENTS)
    split = OffloadedStepSplit()
    units = [replace(spec, given_to_device=split.assign(layout.numel)) for _ in range(_NUM_UNITS)]
    specs = assign_tiers(units, plan)
    bus, disk = measured.bus, measured.disk
    traffic = count_offload_traffic(specs, plan, 1, device_casts=True)
    below = [spec for spec in specs if spec.residency.offloads_states]
    stepped = sum(spec.layout.numel for spec in below if not is_streamed(plan, spec))
    uses_bus, uses_disk = traffic.down or traffic.up, traffic.read or traffic.written
    device, host, on_disk = (count_bytes(specs, plan, tier).total for tier in Tier)
    seconds = {
        "bus": (bus.seconds(traffic) if bus else None) if uses_bus else 0.0,
        "host Adam": stepped / measured.adam,
        "disk": (disk.seconds(traffic) if disk else None) if uses_disk else 0.0,
    }
    return Cost(setting, device, host, on_disk, traffic, seconds)


def shortages(cost: Cost, measured: Measured) -> list[str]:
    """Return sentences about the resources of which a setting needs more than this machine has."""
    on_disk = measured.disk.free_bytes if measured.disk else None
    checks = (
        ("device memory", cost.device_bytes, measured.device_bytes),
        ("host memory", cost.host_bytes, measured.host_free_bytes),
        ("disk", cost.disk_bytes, on_disk),
    )
    return [
        f"{cost.setting} needs {needed / 1e9:.1f} GB of {what}, but only {free / 1e9:.1f} GB are available"
        for what, needed, free in checks
        if free is not None and needed > free
    ]
