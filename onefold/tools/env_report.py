"""Show what this machine has, and which parts onefold will use: `onefold env`, `python -m onefold.env_report`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

import onefold

Section = dict[str, str]
Report = dict[str, Section]

GB = 1e9
OPTIONAL_PACKAGES = ("transformers", "accelerate", "deepspeed", "safetensors", "rich", "matplotlib")


def collect() -> Report:
    """Return all facts as text, by section."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "interconnect": _interconnect(),
        "host": _host(),
        "disk": _disks(),
        "onefold here": _choices(),
    }


def render(report: Report) -> None:
    """Print the facts as a table."""
    table = Table(show_header=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, section in report.items():
        for index, (name, value) in enumerate(section.items()):
            table.add_row("" if index else title, name, Text(value))
        table.add_section()
    Console(highlight=False).print(table)


def report_environment(options: argparse.Namespace) -> int:
    """Run `onefold env`."""
    report = collect()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        render(report)
    return 0


def _versions() -> Section:
    section = {
        "onefold": onefold.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "not in this build of torch",
        "nccl": _nccl_version(),
        "numpy": numpy.__version__,
    }
    for package in OPTIONAL_PACKAGES:
        try:
            section[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            section[package] = "not installed"
    return section


def _nccl_version() -> str:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return "not available"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in version)


def _devices() -> Section:
    section: Section = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        section[f"cuda:{index}"] = (
            f"{device.name}, {total / GB:.0f} GB ({free / GB:.0f} free), capability {device.major}.{device.minor}, "
            f"{device.multi_processor_count} multiprocessors"
        )
    return section or {"GPUs": "none available to torch"}


def _interconnect() -> Section:
    section: Section = {}
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus if num_gpus > 1 else 0):
        others = (other for other in range(num_gpus) if other != index)
        peers = [str(other) for other in others if torch.cuda.can_device_access_peer(index, other)]
        section[f"cuda:{index} reaches"] = f"GPUs {', '.join(peers)} directly" if peers else "no other GPU directly"
    for interface in _folder("/sys/class/net"):
        if interface.name == "lo" or _read(interface / "operstate") == "down":
            continue
        speed = _read(interface / "speed")
        known = speed.isdigit() and int(speed) > 0
        section[interface.name] = f"{int(speed) / 1000:g} Gbit/s" if known else "speed unknown"
    adapters = _folder("/sys/class/infiniband")
    for adapter in adapters:
        rates = {_read(port / "rate") for port in _folder(adapter / "ports")} - {""}
        section[adapter.name] = ", ".join(sorted(rates)) or "no active port"
    if not adapters:
        section["InfiniBand"] = "none"
    return section


def _host() -> Section:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    section = {"system": f"{platform.system()} {platform.release()}, {platform.machine()}", "usable cores": str(cores)}
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in fields:
        total, free = (int(fields[name].split()[0]) * 1024 / GB for name in ("MemTotal", "MemAvailable"))
        section["memory"] = f"{total:.1f} GB ({free:.1f} available)"
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        section["memory limit"] = f"{int(limit) / GB:.1f} GB for this container"
    shared = Path("/dev/shm")
    if shared.is_dir():
        section["shared memory"] = f"{shutil.disk_usage(shared).free / GB:.1f} GB free in {shared}"
    return section


def _disks() -> Section:
    section: Section = {}
    for folder in dict.fromkeys((Path.cwd(), Path("/tmp"))):
        if folder.is_dir():
            usage = shutil.disk_usage(folder)
            section[str(folder)] = f"{usage.free / GB:.1f} GB free of {usage.total / GB:.1f}"
    nvme = [disk.name for disk in _folder("/sys/block") if disk.name.startswith("nvme")]
    section["NVMe"] = ", ".join(nvme) or "none found"
    return section


def _choices() -> Section:
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    num_gpus = torch.cuda.device_count()
    return {
        "backends": ", ".join(name for name, available in backends.items() if available()) or "none",
        "will use": f"NCCL, one rank per GPU: {num_gpus}" if num_gpus else "gloo, on the CPU",
        "bf16": "native" if num_gpus and torch.cuda.is_bf16_supported() else "supported (speed depends on the CPU)",
        "starts ranks with": "onefold launch (torch's elastic agent)",
    }


def _folder(path: str | Path) -> list[Path]:
    path = Path(path)
    return sorted(path.iterdir()) if path.is_dir() else []


def _read(path: str | Path) -> str:
    """Return the text of a kernel file, or an empty string if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
