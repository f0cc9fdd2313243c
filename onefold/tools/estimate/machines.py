"""Machines to plan for: memory and rates of GPUs, hosts and links, by name or as given by the user.

This module does not import torch, so that an unknown machine is refused at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onefold.report.device_peaks import PEAKS

if TYPE_CHECKING:
    from onefold.tools.bench.offload_bench import Measured

GB = 1_000_000_000
MAX_GPUS = 1 << 16
# Host seconds per op, per flat parameter of a step, and per flat parameter that a pass shards, where they are not
# measured: those of GPT with 46M parameters on a host of 16 cores with an H200.
LAUNCH, BOUNDARY, SHARDING = 25e-6, 300e-6, 500e-6
"""The number of GPUs of the largest job that can be planned."""


class PlanError(ValueError):
    """A model or a machine cannot be planned. The message says why, and what to give instead."""


@dataclass(frozen=True)
class Gpu:
    """The data sheet of a GPU: bytes of memory, FLOP/s of bf16 matrix products, bytes/s of memory and links."""

    memory: int
    flops: float
    bandwidth: float
    link: float
    """Bytes/s to the other GPUs of its node, in each direction."""
    bus: float
    """Bytes/s to its host in each direction, with page-locked memory."""
    has_fp8: bool = True
    """Whether it multiplies in FP8."""


# GPUs with at least this much memory are assumed to be in a data center.
_SERVER = 40 * GB
GPUS: dict[str, Gpu] = {
    "B200": Gpu(180 * GB, PEAKS["B200"], 8000e9, 900e9, 50e9),
    "H200": Gpu(141 * GB, PEAKS["H200"], 4800e9, 450e9, 50e9),
    "H100": Gpu(80 * GB, PEAKS["H100"], 3350e9, 450e9, 50e9),
    "H100-PCIE": Gpu(80 * GB, PEAKS["H100-PCIE"], 2000e9, 50e9, 50e9),
    "A100-80": Gpu(80 * GB, PEAKS["A100"], 2039e9, 300e9, 24e9, has_fp8=False),
    "A100-40": Gpu(40 * GB, PEAKS["A100"], 1555e9, 300e9, 24e9, has_fp8=False),
    "L40S": Gpu(48 * GB, PEAKS["L40S"], 864e9, 24e9, 24e9),
    "A6000": Gpu(48 * GB, PEAKS["A6000"], 768e9, 24e9, 24e9, has_fp8=False),
    "A10G": Gpu(24 * GB, PEAKS["A10G"], 600e9, 12e9, 12e9, has_fp8=False),
    "V100-32": Gpu(32 * GB, PEAKS["V100"], 900e9, 150e9, 12e9, has_fp8=False),
    "5090": Gpu(32 * GB, PEAKS["5090"], 1790e9, 50e9, 50e9),
    "4090": Gpu(24 * GB, PEAKS["4090"], 1008e9, 24e9, 24e9),
    "3090": Gpu(24 * GB, PEAKS["3090"], 936e9, 24e9, 24e9, has_fp8=False),
}


@dataclass(frozen=True)
class Machine:
    """Nodes of GPUs. A step is assumed to reach four fifths of each bandwidth."""

    name: str
    gpu: Gpu
    gpus: int = 1
    """GPUs per node."""
    nodes: int = 1
    host_memory: int = 0
    """Bytes per node."""
    nvme: int = 0
    """Bytes of NVMe per node; 0: none."""
    across: float = 50e9
    """Bytes/s between a node and the others, in each direction."""
    disk: float = 6e9
    """Bytes/s of the drives of a node, reading and writing."""
    adam: float = 2e9
    """Parameters per second that Adam updates on the CPUs of a node."""
    efficiency: float = 0.5
    """The share of the data sheet's FLOP/s that a training step reaches."""
    launch: float = LAUNCH
    """Host seconds per op of a forward or backward."""
    boundary: float = BOUNDARY
    """Host seconds per flat parameter of an optimizer step."""
    sharding: float = SHARDING
    """Host seconds per sharded flat parameter of a forward and backward."""
    measured: bool = False
    """Whether the rates were measured on this machine."""
    call: float = 0.0
    """Seconds of the smallest collective."""
    contention: float = 1.0
    """Time of an op while all ranks compute, relative to its time alone."""
    is_cpu: bool = False
    """Whether ranks compute on the CPU, so that `gpu` describes a rank's share of the host."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes

    @property
    def is_server(self) -> bool:
        """Whether the nodes are assumed to be in a data center."""
        return self.gpu.memory >= _SERVER

    def describe(self) -> str:
        """Describe the machine, and where its rates are from."""
        gpu = self.gpu
        origin = (
            "measured here where available, otherwise from data sheets"
            if self.measured
            else "estimates from data sheets"
        )
        disk = f"{self.nvme / GB:.0f} GB of NVMe at {self.disk / GB:g} GB/s" if self.nvme else "no NVMe"
        links = f", {gpu.link / GB:.0f} GB/s between GPUs" if self.gpus > 1 else ""
        links += f", {self.across / GB:g} GB/s between nodes" if self.nodes > 1 else ""
        return (
            f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.gpus} x {self.name}: {gpu.memory / GB:.0f} GB per "
            f"GPU, {gpu.flops / 1e12:.0f} TFLOP/s at {self.efficiency:.0%}, {gpu.bandwidth / GB:,.0f} GB/s of memory"
            f"{links}, {gpu.bus / GB:g} GB/s to the host; host: {self.host_memory / GB:.0f} GB, CPU Adam at "
            f"{self.adam / 1e9:g} billion parameters/s; {disk} ({origin})"
        )


def find_machine(text: str) -> Machine:
    """Return the machine that a text such as `8xH100`, `H100` or `one 4090` names, with a typical host."""
    found = re.fullmatch(r"(?:([0-9]{1,9})\s*x\s*|one\s+)?(.+)", text.strip(), re.IGNORECASE)
    number, name = (int(found[1] or 1), found[2].upper().removeprefix("RTX").strip(" -")) if found else (0, "")
    names = {"A100": "A100-80", "V100": "V100-32", **{known: known for known in GPUS}}
    if name not in names or number < 1:
        raise PlanError(
            f"--machine {text} is not of the form 8xH100. Give a number and one of these GPUs: {', '.join(GPUS)}."
        )
    gpu = GPUS[names[name]]
    is_server = gpu.memory >= _SERVER
    host = (256 if is_server else 64) * GB * max(number, 1) if number < 8 or not is_server else 2048 * GB
    return Machine(
        names[name],
        gpu,
        number,
        host_memory=min(host, 2048 * GB),
        nvme=(8000 if is_server else 1000) * GB,
        across=400e9 if is_server and number == 8 and gpu.flops > 500e12 else 50e9 if is_server else 3e9,
        disk=12e9 if is_server else 5e9,
        adam=(4e9 if number == 8 else 2e9) if is_server else 1e9,
        efficiency=0.55 if gpu.flops > 500e12 else 0.65,
    )


def this_machine() -> Machine:
    """Return this machine: its GPUs, and the memory of its host.

    Rates are those that `onefold bench tiers` and `onefold tune` measured here, otherwise those of data sheets.
    """
    import torch

    from onefold.offload.host_memory import available_bytes
    from onefold.tools.bench.offload_bench import load_measured

    machine = find_machine("4090")
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().upper()
        known = next((known for known in GPUS if known.split("-")[0] in name), None)
        if known is None:
            known_ones = ", ".join(GPUS)
            raise PlanError(f"the rates of the GPU {name} are unknown. Name a similar one with --machine: {known_ones}")
        machine = find_machine(f"{torch.cuda.device_count()}x{known}")
        machine = replace(machine, gpu=replace(machine.gpu, memory=torch.cuda.mem_get_info()[1]))
    machine = replace(machine, host_memory=available_bytes(), nvme=0)
    measured = load_measured()
    if measured is not None:
        machine = replace(machine, adam=measured.adam, measured=True)
        if measured.products is not None and torch.cuda.is_available():
            machine = replace(machine, gpu=replace(machine.gpu, flops=measured.products), efficiency=0.9)
        if measured.launch is not None:
            machine = replace(machine, launch=measured.launch, boundary=measured.boundary or BOUNDARY)
            machine = replace(machine, sharding=measured.sharding or SHARDING)
        if measured.links is not None and measured.links.ranks == machine.gpus > 1:
            machine = replace(machine, gpu=replace(machine.gpu, link=measured.links.sent / 0.8))
            machine = replace(machine, call=measured.links.call)
        if measured.bus is not None:
            machine = replace(machine, gpu=replace(machine.gpu, bus=1e9 * measured.bus.both / 2))
        if measured.disk is not None:
            machine = replace(machine, nvme=measured.disk.free_bytes, disk=1e9 * measured.disk.both)
    return machine


def cpu_ranks(ranks: int, measured: Measured) -> Machine:
    """Return CPU ranks on this host, with the rates that `onefold tune` measured."""
    links, products = measured.links, measured.products or 1e11
    share = measured.host_free_bytes // ranks
    sent = links.sent if links is not None else 1e9
    bandwidth = 2e9 * measured.host_copy / ranks
    cores = Gpu(share, products / ranks, bandwidth, sent / 0.8, 1e9 * measured.host_copy, has_fp8=False)
    return Machine(
        "CPU",
        cores,
        ranks,
        host_memory=measured.host_free_bytes,
        adam=measured.adam,
        launch=measured.launch or LAUNCH,
        boundary=measured.boundary or BOUNDARY,
        sharding=measured.sharding or SHARDING,
        contention=measured.contention or 1.0,
        call=links.call if links is not None else 1e-3,
        measured=True,
        is_cpu=True,
    )


def adjust(machine: Machine, **given: float | int | None) -> Machine:
    """Return the machine with the values that the user gave, in bytes and bytes/s, in place of its own."""
    gpu = {name: given.pop(name) for name in ("memory", "bus", "link", "flops") if name in given}
    machine = replace(machine, gpu=replace(machine.gpu, **{k: v for k, v in gpu.items() if v is not None}))  # type: ignore[arg-type]
    return replace(machine, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
