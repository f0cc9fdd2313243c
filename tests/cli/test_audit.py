"""`onefold audit` finds what differs from plain torch, and nothing where all is well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.config import ConfigError
from onefold.tools.cli.audit_command import Variant, divergences, first_difference
from onefold.tools.cli.audit_rank import _check_all_trained, _rebuilt, left_out
from onefold.tools.cli.main import main

pytestmark = pytest.mark.program


# -- comparing ---------------------------------------------------------------------------------------------------


def recorded(
    folder: Path,
    *,
    gradient: float = 1.0,
    update: float = 0.1,
    loss: float = 2.0,
    start: float = 1.0,
    mean: float = 0.5,
    unused: float = 0.0,
    frozen: float = 0.0,
) -> Any:
    """Two steps of a model with a trained parameter, one with rounding errors as gradients, an unused and a frozen one.

    The buffers are a mean and a mask. `unused` and `frozen` are the updates of these parameters.
    """
    folder.mkdir(parents=True)
    weights = {"a": torch.full((4,), start), "b": torch.ones(4), "unused": torch.ones(4), "frozen": torch.ones(4)}
    mask = torch.tensor([0.0, float("-inf")])
    torch.save({"weights": weights, "buffers": {"mean": torch.zeros(2), "mask": mask}}, folder / "step0.pt")
    for number in (1, 2):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(len(folder.name) + number))
        moved = {"a": -update * number, "b": 0.1 * noise.sign(), "unused": unused, "frozen": frozen}
        weights = {name: weights[name] + moved[name] for name in weights}
        gradients = {"a": torch.full((4,), gradient * number), "b": 1e-9 * noise * gradient, "unused": torch.zeros(())}
        buffers = {"mean": torch.full((2,), mean), "mask": mask}
        tensors = {"gradients": gradients, "weights": weights, "buffers": buffers}
        torch.save({"loss": loss / number, **tensors}, folder / f"step{number}.pt")
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
        ({"unused": 1.0}, "step 1: the update of unused differs, where it is zero (2 instead of 0)"),
        ({"frozen": 1.0}, "step 1: the update of frozen differs, where it is zero (2 instead of 0)"),
        ({"mean": 0.75}, "step 1: the buffer mean differs, by 50.0% of its norm"),
        ({"mean": 0.50001}, None),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: dict[str, float], words: str | None) -> None:
    found = first_difference(recorded(tmp_path / "plain"), recorded(tmp_path / "other one", **change), steps=2)
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


def test_a_model_without_gradients_is_not_equal(tmp_path: Path) -> None:
    plain, other = (recorded(tmp_path / name, gradient=0.0) for name in ("plain", "other"))
    assert first_difference(plain, other, steps=2) == "nothing was compared, because no parameter has a gradient"


def test_every_key_that_the_audit_leaves_out_is_named() -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    document = {
        "train_batch_size": 2, "bf16.enabled": True, "gradient_clipping": 1.0, "steps_per_print": 7,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero,
        "onefold": {"state_dtype": "int8"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }  # fmt: skip
    assert left_out(document, 3) == [
        "bf16.enabled", "zero_optimization.zero_quantized_gradients", "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.ratio", "onefold.state_dtype", "scheduler.type",
        "scheduler.params.warmup_num_steps",
    ]  # fmt: skip
    assert left_out({"zero_optimization.stage": 3, "zero_optimization.zero_quantized_weights": True}, 2) == [
        "zero_optimization.zero_quantized_weights"
    ]


def test_groups_and_subsets_of_parameters_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(requires_grad=False)
    _check_all_trained("model_parameters", model.parameters(), model)
    _check_all_trained("model_parameters", [each for each in model.parameters() if each.requires_grad], model)
    with pytest.raises(ConfigError, match=r"initialize\(model_parameters=\.\.\.\) has groups"):
        _check_all_trained("model_parameters", [{"params": list(model.parameters())}], model)
    with pytest.raises(ConfigError, match=r"initialize\(optimizer=\.\.\.\) has other parameters than the model"):
        _rebuilt(torch.optim.SGD(model[0].parameters(), lr=1.0), model)
    _rebuilt(torch.optim.SGD(model.parameters(), lr=1.0), model)


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
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        x = self.frozen(x)
        return (x + self.norm(x)).pow(2).mean()

deepspeed.init_distributed()
if "seeds" in sys.argv:
    torch.manual_seed(dist.get_rank())
with deepspeed.zero.Init():
    model = Net()
decay = 0.1 if "decay" in sys.argv else 0.0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay) if "optimizer" in sys.argv else None
groups = [{"params": list(model.parameters()), "lr": 0.0}] if "groups" in sys.argv else None
config = "ds_config.json"
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=groups, config=config)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(100):
    if "buffers" in sys.argv and hasattr(engine, "ledger"):
        engine.module.norm.running_mean += 1
    loss = engine(torch.randn(16, 8, generator=generator))
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
    "zero_optimization": {"stage": 2, "round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


def audited(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "onefold.tools.cli.main", "audit", *arguments]
    wide = {**os.environ, "COLUMNS": "500"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False, env=wide)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["optimizer"]])
def test_a_sound_script_passes_and_the_audit_says_what_it_has_seen(tmp_path: Path, arguments: list[str]) -> None:
    code, said = audited(tmp_path, "--steps", "2", "train.py", *arguments)
    assert code == 0, said
    assert "onefold, stage 2: equal to plain torch, up to rounding" in said
    assert "FSDP2: equal to plain torch, up to rounding" in said
    assert "parameters that never get a gradient: unused.weight, unused.bias" in said
    dropped = "zero_optimization.round_robin_gradients, zero_optimization.offload_optimizer.device"
    assert f"not audited: bf16.enabled, {dropped}\n" in said
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
    common = ["--steps", "1", "--ranks", "1", "--stage"]
    code, said = audited(tmp_path, *common, "1", "train.py", "doubles")
    assert code == 1, said
    assert re.search(r"onefold, stage 1: the loss of step 1 is 2\.\d+ instead of 1\.\d+", said)
    assert "FSDP2: equal to plain torch" in said
    code, said = audited(tmp_path, *common, "3", "train.py", "buffers")
    assert code == 1, said
    assert "onefold, stage 3: step 1: the buffer norm.running_mean differs, by " in said
    code, said = audited(tmp_path, *common, "2", "train.py", "optimizer", "decay")
    assert code == 1, said
    assert "onefold, stage 2: step 1: the update of unused.weight differs, where it is zero" in said
    assert "It has no gradient, which counts as zero, so weight decay and momentum apply." in said
    code, said = audited(tmp_path, *common, "3", "train.py", "groups")
    assert code == 2, said
    assert "initialize(model_parameters=...) has groups" in said


@pytest.mark.slow
def test_a_script_that_ends_early_or_fails_is_named(tmp_path: Path) -> None:
    code, said = audited(tmp_path, "--steps", "60", "--ranks", "1", "train.py")
    assert code == 2
    assert (
        "the script does not run in plain torch: RuntimeError: the script ended after 50 of 60 optimizer steps" in said
    )
