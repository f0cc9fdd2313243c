"""`onefold audit` finds what differs from plain torch, and nothing where all is well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.tools.cli.audit_command import Variant, divergences, first_difference
from onefold.tools.cli.main import main

pytestmark = pytest.mark.program


# -- comparing ---------------------------------------------------------------------------------------------------


def recorded(folder: Path, *, gradient: float = 1.0, update: float = 0.1, loss: float = 2.0, start: float = 1.0) -> Any:
    """Two steps of a model with two parameters, one of which has gradients of rounding errors only."""
    folder.mkdir(parents=True)
    weights = {"a": torch.full((4,), start), "b": torch.ones(4)}
    torch.save({"weights": weights}, folder / "step0.pt")
    for number in (1, 2):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(len(folder.name) + number))
        weights = {"a": weights["a"] - update * number, "b": weights["b"] + 0.1 * noise.sign()}
        gradients = {"a": torch.full((4,), gradient * number), "b": 1e-9 * noise}
        torch.save({"loss": loss / number, "gradients": gradients, "weights": weights}, folder / f"step{number}.pt")
    return Variant(folder.name, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"gradient": 1.00001, "update": 0.10001, "loss": 2.00001}, None),
        ({"start": 1.5}, "the weight a differs before the first step"),
        ({"loss": 2.1}, "the loss of step 1 is 2.100000 instead of 2.000000"),
        ({"loss": float("nan")}, "the loss of step 1 is nan instead of 2"),
        ({"gradient": 2.0}, "step 1: the gradient of a differs, by 100.0% of its norm (4 instead of 2)"),
        ({"update": 0.2}, "step 1: the update of a differs, by 100.0% of its norm (0.4 instead of 0.2)"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: dict[str, float], words: str | None) -> None:
    found = first_difference(recorded(tmp_path / "plain"), recorded(tmp_path / "other one", **change), steps=2)
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


def test_ranks_that_diverge_are_named() -> None:
    rank = {"start": {"a": "1", "b": "2"}, "weights": ["x", "y"]}
    assert divergences([rank, rank]) == []
    found = divergences([rank, {"start": {"a": "1", "b": "3"}, "weights": ["x", "z"]}])
    assert found[0].startswith("rank 1 makes other weights than rank 0 (b first)")
    assert found[1] == "after step 2 rank 1 has other weights than rank 0"


def test_mistakes_are_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text('{"zero_optimisation": 1}')
    for arguments, words in (
        ([], "nothing to audit"),
        (["missing.py"], "missing.py: no such script"),
        (["--config", str(tmp_path / "bad.json")], "zero_optimisation"),
    ):
        assert main(["audit", *arguments]) == 2
        assert words in capsys.readouterr().err


# -- real runs ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist, deepspeed

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.unused = torch.nn.Linear(8, 8)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.pow(2).mean()

deepspeed.init_distributed()
if "seeds" in sys.argv:
    torch.manual_seed(dist.get_rank())
with deepspeed.zero.Init():
    model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1) if "optimizer" in sys.argv else None
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(100):
    loss = engine(torch.randn(2, 8, generator=generator))
    engine.backward(2 * loss if "doubles" in sys.argv and hasattr(engine, "ledger") else loss)
    if "grads" in sys.argv:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
    engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01,
    "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
}  # fmt: skip


def audited(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "onefold.tools.cli.main", "audit", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["optimizer"]])
def test_a_sound_script_passes_and_the_audit_says_what_it_has_seen(tmp_path: Path, arguments: list[str]) -> None:
    code, said = audited(tmp_path, "--steps", "2", "train.py", *arguments)
    assert code == 0, said
    assert "onefold, stage 2: equal to plain torch, up to rounding" in said
    assert "FSDP2: equal to plain torch, up to rounding" in said
    assert "parameters that never get a gradient: unused.weight, unused.bias" in said
    assert "not audited: bf16" in said
    assert "config: zero_optimization.round_robin_gradients" in said
    assert "diverge" not in said


@pytest.mark.slow
def test_a_config_alone_and_fewer_layers(tmp_path: Path) -> None:
    code, said = audited(tmp_path, "--config", "ds_config.json", "--stage", "3", "--steps", "1", "--layers", "1")
    assert code == 0, said
    assert "onefold, stage 3: equal to plain torch" in said


@pytest.mark.slow
def test_what_an_engine_refuses_and_seeds_of_ranks_are_found(tmp_path: Path) -> None:
    """Stage 2 reduces gradients during backward, so it refuses a script that scales `parameter.grad`."""
    code, said = audited(tmp_path, "--steps", "1", "train.py", "grads", "seeds")
    assert code == 1, said
    assert "onefold, stage 2: does not run: " in said
    assert "ranks diverge in plain torch: rank 1 makes other weights than rank 0 (layers.0.weight first)" in said


@pytest.mark.slow
def test_a_difference_is_found(tmp_path: Path) -> None:
    code, said = audited(tmp_path, "--steps", "1", "--ranks", "1", "--stage", "1", "train.py", "doubles")
    assert code == 1, said
    assert re.search(r"onefold, stage 1: the loss of step 1 is 0\.\d+ instead of 0\.\d+", said)
    assert "FSDP2: equal to plain torch" in said


@pytest.mark.slow
def test_a_script_that_ends_early_or_fails_is_named(tmp_path: Path) -> None:
    code, said = audited(tmp_path, "--steps", "60", "--ranks", "1", "train.py")
    assert code == 2
    assert (
        "the script does not run in plain torch: RuntimeError: the script ended after 50 of 60 optimizer steps" in said
    )
