"""The example for Ray Train, on a real local Ray with two workers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from onefold.checkpoint.format.shard_files import CheckpointReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "train.py"


def run(checkpoints: Path, steps: int, temporary: Path) -> str:
    """Run the example, and return what its workers have printed. Ray and all its processes end with it."""
    environment = {
        **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": str(temporary),
        "RAY_raylet_start_wait_time_s": "300", "CUDA_VISIBLE_DEVICES": "", "HOME": str(temporary),
    }  # fmt: skip
    command = [sys.executable, str(EXAMPLE), "--steps", str(steps), "--checkpoints", str(checkpoints)]
    done = subprocess.run(command, env=environment, cwd=temporary, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ray[train]'")
def test_two_workers_of_ray_train_and_resume(tmp_path: Path) -> None:
    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        words = run(tmp_path, 3, Path(short))
        assert "rank 0 of 2: step 3" in words
        assert "rank 1 of 2: step 3" in words
        with CheckpointReader.open(tmp_path) as checkpoint:
            assert (checkpoint.manifest.global_steps, checkpoint.manifest.world_size) == (3, 2)
        assert "rank 1 of 2: step 5" in run(tmp_path, 5, Path(short))
    with CheckpointReader.open(tmp_path) as checkpoint:
        assert checkpoint.manifest.global_steps == 5
        assert len(checkpoint.manifest.files) == 2
