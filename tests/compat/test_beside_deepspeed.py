"""The examples on DeepSpeed itself and on onefold, on 2 CPU ranks in fp32: 20 steps and more, losses side by side.

DeepSpeed is not installed with onefold and does not share an environment with it. Make one, with transformers and
accelerate in it, and name its Python:

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8
    ONEFOLD_DEEPSPEED_PYTHON=/path/to/python make test-slow ARGS="tests/compat/test_beside_deepspeed.py -s"
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_as_deepspeed import installed  # noqa: F401 - a fixture
from test_dropin import EXAMPLES, TRAINING, Runner, last_line, model, runner  # noqa: F401 - fixtures

PYTHON = os.environ.get("ONEFOLD_DEEPSPEED_PYTHON")
pytestmark = [
    pytest.mark.program,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="ONEFOLD_DEEPSPEED_PYTHON names no Python with DeepSpeed"),
]
LOOP = str(EXAMPLES / "accelerate_loop.py")
# DeepSpeed does not start `trainer.py` in stage 3 here: `from_pretrained` under its zero.Init looks at the batch sizes
# before the process group is up, and takes one rank for the world.
SCRIPTS = {
    "Trainer, stage 2": [
        "-m", "torch.distributed.run", "--nproc_per_node", "2", str(EXAMPLES / "trainer.py"), *TRAINING,
        "--max_steps", "20", "--eval_strategy", "steps", "--eval_steps", "10",
        "--deepspeed", str(EXAMPLES / "ds_zero2.json"), "--output_dir", "out",
    ],
    **{
        f"accelerate, stage {stage}": [
            "-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / f"zero{stage}.yaml"), LOOP, "out", "3",
        ]
        for stage in (2, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_are_those_of_deepspeed(runner, model, tmp_path, script):  # noqa: F811
    assert PYTHON is not None
    variables = {
        **os.environ,
        "MODEL": str(model),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
    }
    variables.pop("PYTHONPATH", None)
    (tmp_path / "deepspeed").mkdir()
    done = subprocess.run(
        [PYTHON, *SCRIPTS[script]], cwd=tmp_path / "deepspeed", env=variables,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    expected, found = last_line(done.stdout), last_line(runner.python(*SCRIPTS[script]))
    assert expected.keys() == found.keys()
    for name in {"losses", "eval"} & expected.keys():
        pairs = list(zip(found[name], expected[name], strict=True))
        farthest = max(abs(ours - theirs) for ours, theirs in pairs)
        ends = f"{pairs[0][1]:.4f} to {pairs[-1][1]:.4f}"
        print(f"\n{script}, {name}: {len(pairs)} values, {ends}, apart at most {farthest:.1e}")
        assert farthest < 1e-3
    assert len(found["losses"]) >= 20
