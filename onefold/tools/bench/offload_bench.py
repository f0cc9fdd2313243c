"""Measures bus, host and disk of this machine, and computes what each offload setting would cost a step.

[Note: what a step costs]
The plan's own arithmetic gives the bytes that cross the bus and go to the disk; the measured rates turn them into
seconds. Bus, host and disk work beside each other and beside the device, so a step takes at least as long as the
slowest of them needs. Whatever the device computes in longer than that hides them all.
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
from onefold.optim.offloaded_step import TILE
from onefold.optim.pipeline import StateWindow
from onefold.optim.rules import AdamRule
from onefold.optim.tiles import Step, Tiler
from onefold.plan import (
    Crossing,
    FlatParamSpec,
    KeptStates,
    Layout,
    Tier,
    assign_tiers,
    count_bytes,
    count_crossing,
    make_plan,
)
from onefold.plan.layout import Segment
from onefold.plan.memory import SharedStep, passes_device
from onefold.tools.bench.link_bench import LinkRates, measure_links

Tell = Callable[[str, int, int], None]
"""Hears what is measured now, how many parts are done, and how many there are."""

_ROUNDS = 3
# Seconds after which a slow part is not repeated.
_PATIENCE = 2.0
_PIECES = 8


@dataclass(frozen=True)
class BusRates:
    """GB/s between the device and page-locked memory: each way alone, and the sum of both at once."""

    down: float
    up: float
    both: float

    def seconds(self, crossing: Crossing) -> float:
        return _seconds(crossing.down, self.down, crossing.up, self.up, self.both)


@dataclass(frozen=True)
class DiskRates:
    """GB/s between files and host memory, as swapped tensors travel: each way alone, and the sum of both at once."""

    paths: tuple[str, ...]
    read: float
    write: float
    both: float
    direct: bool
    """False: some file system does not take O_DIRECT, so these are rates of the page cache."""
    free_bytes: int
    when: str

    def seconds(self, crossing: Crossing) -> float:
        return _seconds(crossing.read, self.read, crossing.written, self.write, self.both)


@dataclass(frozen=True)
class Measured:
    """One machine, at one time. None: there is no such thing here, or nobody asked."""

    host: str
    when: str
    num_threads: int
    host_free_bytes: int
    host_copy: float
    """GB/s, of what is copied."""
    adam: float
    """Parameters a second: gradients of 16 bits, masters and moments of 32."""
    device: str | None = None
    device_bytes: int | None = None
    page_lock: float | None = None
    """GB/s of memory that is made, touched and locked."""
    bus: BusRates | None = None
    disk: DiskRates | None = None
    products: float | None = None
    """FLOP/s of products in bf16, on the device where there is one; in fp32 on a CPU."""
    launch: float | None = None
    """Seconds that the host takes to have one small op run, forward and backward,"""
    boundary: float | None = None
    """and to have one flat parameter stepped."""
    contention: float | None = None
    """Ranks on CPUs: how many times as long ops take while all of them compute."""
    links: LinkRates | None = None

    @staticmethod
    def of(facts: dict[str, Any]) -> Measured:
        """From JSON. Raises where something is missing, unknown, or no rate."""
        bus = BusRates(**facts["bus"]) if facts["bus"] else None
        disk = DiskRates(**{**facts["disk"], "paths": tuple(facts["disk"]["paths"])}) if facts["disk"] else None
        links = LinkRates(**facts["links"]) if facts.get("links") else None
        found = Measured(**{**facts, "bus": bus, "disk": disk, "links": links})
        rates = [found.host_copy, found.adam]
        rates += [links.sent, links.call] if links else []
        rates += [bus.down, bus.up, bus.both] if bus else []
        rates += [disk.read, disk.write, disk.both] if disk else []
        if not all(rate > 0 for rate in rates):
            raise ValueError("a rate that is not above zero")
        return found


def _seconds(first: int, first_rate: float, second: int, second_rate: float, both_rate: float) -> float:
    """The ways share what both reach together, and neither is faster than alone."""
    return max(first / first_rate, second / second_rate, (first + second) / both_rate) / 1e9


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(
    num_bytes: int, paths: Sequence[str] = (), tell: Tell = lambda now, done, total: None, ranks: int = 1
) -> Measured:
    """All of it, each part on about so many bytes. `paths`: folders on the drives to measure; `ranks`: between how many
    links are.
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
        tell(name.replace("_", " "), done, len(parts))
        found[name] = work()
    threads = torch.get_num_threads()
    return Measured(socket.gethostname(), _now(), num_threads=threads, host_free_bytes=free, **found)


def measure_copy(num_bytes: int) -> float:
    """GB/s from host memory to host memory, on all threads."""
    source, target = _memory(num_bytes // 2), _memory(num_bytes // 2)
    return _best(lambda: target.copy_(source), source.nbytes) / 1e9


def measure_adam(num_bytes: int) -> float:
    """Parameters a second of the host's step: tiles of a gradient in bf16, master and moments in fp32."""
    numel, rule = max(num_bytes // 14 // PAGE, 1) * PAGE, AdamRule()
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True}
    names = rule.state_names([hyper])
    master, *moments = _memory(numel * 4 * (1 + len(names))).view(torch.float32).split(numel)
    gradient = _memory(numel * 2).view(torch.bfloat16).fill_(1e-3)
    states = {name: Buffer.of(moment) for name, moment in zip(names, moments, strict=True)}
    window = StateWindow(0, numel, Buffer.of(master), states)
    tiler = Tiler([rule], TILE if torch.get_num_threads() > 2 else None)
    # Scaled, as with clipping or a loss scale.
    step = Step(number=1, coefficient=0.5, groups=[hyper])
    with torch.no_grad():
        return _best(lambda: tiler.step(OneGroup(), gradient, step, window, 0, numel, None), numel)


class OneGroup:
    """Elements of one optimizer group, none of them frozen: what the tiler asks of an optimizer shard."""

    compared_model_weight = None

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        return [Segment(0, first, last)]

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        return [(first, last, None)]


def measure_products() -> float:
    """FLOP/s of a product as large as those of a layer."""
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
    """Seconds of the host for each op of a chain of small ones under autograd, its backward among them."""
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
    """GB/s of page-locked memory that is made from nothing: what a start pays."""
    return _best(lambda: page_aligned(num_bytes, pinned=True), num_bytes) / 1e9


def measure_bus(num_bytes: int, device: torch.device) -> BusRates:
    """Down and up by the streams that steps use."""
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
    """Through a swap like that of a job. Whatever happens, its files are removed."""
    num_pieces = _PIECES * len(paths)
    size = max(num_bytes // num_pieces // PAGE, 1) * PAGE
    memory = _memory(num_pieces * size).split(size)
    # Drives and file systems may pack zeros.
    noise = torch.randint(0, 256, (min(size, 1 << 24),), dtype=torch.uint8)
    for piece in memory:
        for part in piece.split(len(noise)):
            part.copy_(noise[: len(part)])
    swap = SwapFiles(paths, aio=Aio(), rank=0, count=lambda way, size: None)
    on_disk = [swap.reserve(size, torch.uint8) for _ in memory]

    def transfer(*reads: bool) -> None:
        """Each drive reads or writes its pieces as `reads` says in turn."""
        turns = [reads[index // len(paths) % len(reads)] for index in range(num_pieces)]
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
    """Like that of a job, and touched."""
    return page_aligned(max(num_bytes, PAGE)).zero_()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- keeping ---------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where measurements are kept, by host: home folders are shared."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onefold" / "tiers.json"


def load_measured(host: str | None = None) -> Measured | None:
    """What was kept of this host, or of another. None where there is nothing, or nothing that can be read."""
    facts = _load_hosts().get(host or socket.gethostname())
    if facts is None:
        return None
    try:
        return Measured.of(facts)
    except (KeyError, TypeError, ValueError) as error:
        _warn_damaged(error)
        return None


def save_measured(measured: Measured) -> Path:
    """Keep it beside what is kept of other hosts. Whoever reads meanwhile sees the old file or the new one."""
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
        raise TypeError("no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:
        _warn_damaged(error)
        return {}


def _warn_damaged(error: Exception) -> None:
    text = "%s: cannot be read (%s: %s) and counts as empty; `onefold bench tiers` writes it anew"
    logger.warning(text, cache_file(), type(error).__name__, error)


# -- arithmetic ------------------------------------------------------------------------------------------------------

_CPU, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/"}
# What is written under `zero_optimization`.
SETTINGS: dict[str, dict[str, Any]] = {
    "all on the device": {"stage": 2},
    "optimizer cpu, ratio 0.3": {"stage": 2, "offload_optimizer": {**_CPU, "ratio": 0.3}},
    "optimizer cpu": {"stage": 2, "offload_optimizer": _CPU},
    "optimizer cpu, stepped by the host": {"stage": 2, "offload_optimizer": _CPU},
    "optimizer and param cpu": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "optimizer nvme": {"stage": 2, "offload_optimizer": _NVME},
    "optimizer and param nvme": {"stage": 3, "offload_optimizer": _NVME, "offload_param": _NVME},
}
_MOMENTS = KeptStates(tuple(AdamRule().state_names([{}])))
# A model is offloaded by units; so many make a ratio of tenths exact.
_NUM_UNITS = 20


@dataclass(frozen=True)
class Cost:
    """What a setting takes of one rank: bytes at rest, bytes that move in a step, and seconds, by resource."""

    setting: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    crossing: Crossing
    seconds: dict[str, float | None]
    """0.0: not used; None: used, but its rate is not known."""

    @property
    def bound_by(self) -> str | None:
        """The slowest of those that are known."""
        known = {name: value for name, value in self.seconds.items() if value}
        return max(known, key=known.__getitem__) if known else None


def cost_of(setting: str, num_parameters: float, measured: Measured) -> Cost:
    """A setting by its name, for a model in bf16 with Adam, on one rank, with one micro-step."""
    own = {"offloaded_step": "host"} if "stepped by the host" in setting else {}
    config = load_config({"bf16": {"enabled": True}, "zero_optimization": SETTINGS[setting], "onefold": own})
    plan = make_plan(config, world_size=1)
    # All of it, whatever the host could keep.
    plan = replace(plan, offload=replace(plan.offload, param=replace(plan.offload.param, max_in_cpu=0)))
    layout = Layout.of([("weight", (max(round(num_parameters / _NUM_UNITS), 1),), 0)], 1)
    spec = FlatParamSpec(layout, torch.bfloat16, trainable=True, persistent=False, kept=_MOMENTS)
    shared = SharedStep()
    units = [replace(spec, given_to_device=shared.gives_to_device(layout.numel)) for _ in range(_NUM_UNITS)]
    specs = assign_tiers(units, plan)
    bus, disk = measured.bus, measured.disk
    crossing = count_crossing(specs, plan, 1, device_casts=True)
    below = [spec for spec in specs if spec.residency.offloads_states]
    stepped = sum(spec.layout.numel for spec in below if not passes_device(plan, spec))
    uses_bus, uses_disk = crossing.down or crossing.up, crossing.read or crossing.written
    device, host, on_disk = (count_bytes(specs, plan, tier).total for tier in Tier)
    seconds = {
        "bus": (bus.seconds(crossing) if bus else None) if uses_bus else 0.0,
        "host Adam": stepped / measured.adam,
        "disk": (disk.seconds(crossing) if disk else None) if uses_disk else 0.0,
    }
    return Cost(setting, device, host, on_disk, crossing, seconds)


def shortages(cost: Cost, measured: Measured) -> list[str]:
    """What this machine has too little of, in words."""
    on_disk = measured.disk.free_bytes if measured.disk else None
    checks = (
        ("device memory", cost.device_bytes, measured.device_bytes),
        ("host memory", cost.host_bytes, measured.host_free_bytes),
        ("disk", cost.disk_bytes, on_disk),
    )
    return [
        f"{cost.setting} needs {needed / 1e9:.1f} GB of {what}, and {free / 1e9:.1f} GB are there"
        for what, needed, free in checks
        if free is not None and needed > free
    ]
