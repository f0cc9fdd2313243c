"""Tables and the header of a dated report."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.launch import ROOT, Outcome


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table that is also readable in a terminal."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failure_notes(outcomes: dict[str, list[Outcome]]) -> str:
    """One line below the table for each system that has a run without figures."""
    notes = []
    for system, rounds in outcomes.items():
        errors = [outcome.error for outcome in rounds if outcome.error]
        if errors:
            notes.append(f"* {system}, {len(errors)} of {len(rounds)} runs without figures: {errors[0]}")
    return "\n\n" + "\n".join(notes) if notes else ""


def ratio(value: float, reference: float | None) -> str:
    return f"{value / reference:.2f}" if reference else "-"


def describe_run(title: str, module: str, details: dict[str, str]) -> str:
    """Where and how the figures came about: without that they mean nothing."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": f"`python -m {module} {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "hardware": _hardware(),
        "versions": _versions(),
        **details,
    }
    return f"# {title}\n\n" + "\n".join(f"* {name}: {value}" for name, value in facts.items()) + "\n"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not re.fullmatch(r"[0-9a-f]+", commit):
        return "none"
    return commit + (" with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def _hardware() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    text = f"{model.group(1) if model else platform.machine()}, {cores} cores, {memory:.0f} GiB"
    if torch.cuda.is_available():
        text += f"; {torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    return text


def _versions() -> str:
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("onefold", "deepspeed"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
