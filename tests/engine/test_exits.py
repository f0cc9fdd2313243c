"""Programs end as they say: no path to the exit ends in an abort, a hang, or with a thread left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from exits import PATHS

pytestmark = pytest.mark.program

SCRIPT = Path(__file__).with_name("exits.py")
FEW = ["save in the background", "exception", "Ctrl-C"]


def ends(folder: Path, stage: int, count: int, *paths: str) -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(stage), str(count), str(folder), *paths],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_programs_end_with_their_own_exit_codes(tmp_path):
    found = ends(tmp_path, 3, 1, *FEW)
    assert found == {path: {json.dumps(PATHS[path]): 1} for path in FEW}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_programs_end_in_every_way_again_and_again(tmp_path, stage):
    found = ends(tmp_path, stage, 3)
    assert found == {path: {json.dumps(codes): 3} for path, codes in PATHS.items()}
