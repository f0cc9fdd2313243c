"""The programs of docs/moving-from-fsdp2.md: DDP, FSDP2 and onefold print the same losses up to rounding."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_guide import DOCS, blocks

from onefold.checkpoint.dcp import dcp_checkpoint

TEXT = (DOCS / "moving-from-fsdp2.md").read_text()
PROGRAMS = {each.name: each.body for each in blocks("python", TEXT) if each.name}


def losses_of(program: str, folder: Path) -> dict[tuple[str, str], float]:
    """Run a program on two ranks, and return the loss of each rank and step."""
    (folder / program).write_text(PROGRAMS[program])
    command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--nproc", "2", str(folder / program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d+) step (\d+) loss ([\d.]+)", done.stdout)
    return {(rank, step): float(loss) for rank, step, loss in found}


@pytest.mark.slow
def test_the_programs_train_alike(tmp_path: Path) -> None:
    assert list(PROGRAMS) == ["train_ddp.py", "train_fsdp2.py", "train_onefold.py"]
    expected = losses_of("train_ddp.py", tmp_path)
    assert len(expected) == 40
    for program in ("train_fsdp2.py", "train_onefold.py"):
        assert losses_of(program, tmp_path) == pytest.approx(expected, abs=2e-6), program


def test_the_programs_are_python_and_differ_in_the_wrapper_only() -> None:
    for name, body in PROGRAMS.items():
        compile(body, name, "exec")
    ddp, fsdp = (PROGRAMS[name].splitlines() for name in ("train_ddp.py", "train_fsdp2.py"))
    start = ddp.index("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)")
    assert ddp[start:] == fsdp[-len(ddp[start:]) :]


def test_the_page_names_the_folders_that_are_recognized() -> None:
    for name in (*dcp_checkpoint.ACCELERATE, *dcp_checkpoint._SCHEDULES, dcp_checkpoint.METADATA):
        assert f"`{name}`" in TEXT
