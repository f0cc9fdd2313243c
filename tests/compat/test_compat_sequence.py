"""Sequence parallelism by the switches of accelerate and transformers, on ranks under DeepSpeed's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.compat import groups
from onefold.compat.ulysses import UlyssesSPDataLoaderAdapter, initialize_sequence_parallel

SCRIPT = Path(__file__).with_name("sequence_script.py")
REGISTER = """
import runpy, sys, onefold
onefold.register_as_deepspeed()
sys.argv = sys.argv[1:]
runpy.run_path({!r}, run_name="__main__")
"""


def trained(tmp_path: Path, name: str) -> dict[str, Any]:
    """What the script prints on two ranks."""
    pytest.importorskip("accelerate")
    start = tmp_path / "start.py"
    start.write_text(REGISTER.format(str(SCRIPT)))
    command = ["-m", "onefold.tools.cli.main", "launch", "--nproc", "2", str(start), "script", name, "2", str(tmp_path)]
    environment = os.environ | {"ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if "RESULT" in line]
    found: dict[str, Any] = json.loads(line.split("RESULT ", 1)[1])
    return found


@pytest.mark.program
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "trainer")])
def test_parts_of_sequences_train_as_whole_ones_in_plain_torch(tmp_path, name):
    """Check losses and weights under SGD, with samples in which one rank has no labels."""
    found = trained(tmp_path, name)
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["difference"] < 1e-5
    if name == "trainer":
        assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], rel=1e-5)


def sizes_of_groups() -> tuple[int, ...]:
    initialize_sequence_parallel(2)
    try:
        of_data = groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()
        return *of_data, groups._get_sequence_parallel_rank(), groups._get_sequence_data_parallel_world_size()
    finally:
        groups.mpu = None


def test_ranks_of_a_sequence_have_one_rank_of_data(on_ranks):
    """Check what samplers are made with, so that all ranks of a sequence get the same samples."""
    assert on_ranks(4, sizes_of_groups) == [(2, 0, 0, 4), (2, 0, 1, 4), (2, 1, 0, 4), (2, 1, 1, 4)]


def test_batches_of_a_resumed_epoch_are_not_skipped():
    """Check that `skip_first_batches`, which would read whole sequences, is refused, and that others see the data."""
    accelerate = pytest.importorskip("accelerate")
    data = [{"input_ids": torch.zeros(4)}] * 4
    loader = UlyssesSPDataLoaderAdapter(torch.utils.data.DataLoader(data), 0, None, 1, "cpu")
    assert loader.dataset is data
    with pytest.raises(RuntimeError, match="ignore_data_skip"):
        accelerate.skip_first_batches(loader, 2)
