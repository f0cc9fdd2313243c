"""Scripts for transformers, accelerate, TRL and PEFT that know nothing of onefold: the examples, on 2 CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_as_deepspeed import ROOT, installed  # noqa: F401 - a fixture

EXAMPLES = ROOT / "examples/huggingface"
pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers and accelerate are not installed"),
]
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
TRAINING = [
    "--use_cpu", "True", "--max_steps", "4", "--logging_steps", "1", "--per_device_train_batch_size", "4",
    "--report_to", "none", "--disable_tqdm", "True", "--learning_rate", "1e-3",
]  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A folder with a model's weights, which every script starts from."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(EXAMPLES / "tiny.py"), str(folder)], check=True, capture_output=True)
    return folder


class Runner:
    def __init__(self, installed: Path, model: Path, folder: Path) -> None:  # noqa: F811
        self.folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)]),
            "MODEL": str(model),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def set_variable(self, name: str, value: str) -> None:
        self._environment[name] = value

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout

    def script(self, name: str, *arguments: str, ranks: int = 2) -> dict[str, Any]:
        """Start an example by the command `deepspeed`; what its last line of JSON says."""
        launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--no_local_rank"]
        return last_line(self.python(*launcher, str(EXAMPLES / name), *TRAINING, *arguments))


def last_line(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


@pytest.fixture
def runner(installed, model, tmp_path) -> Runner:  # noqa: F811
    return Runner(installed, model, tmp_path)


def config(stage: int) -> list[str]:
    return ["--deepspeed", str(EXAMPLES / f"ds_zero{stage}.json")]


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-6), name


EVERY_TWO = ["--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2"]


def test_the_trainer_trains_and_evaluates(runner):
    arguments = ("--output_dir", "out", "--eval_strategy", "steps", "--eval_steps", "2")
    found = runner.script("trainer.py", *config(3), *arguments, ranks=1)
    assert len(found["losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]
    assert found["eval"][1] < found["eval"][0]


@pytest.mark.slow
def test_the_trainer_trains_evaluates_saves_and_resumes(runner):
    """Stage 3 equals stage 2, also where it goes on from a checkpoint; the weights that it saves are whole."""
    expected = runner.script("trainer.py", *config(2), "--output_dir", "two", *EVERY_TWO)
    assert len(expected["losses"]) == 4
    found = runner.script("trainer.py", *config(3), "--output_dir", "three", *EVERY_TWO)
    assert_alike(found, expected)
    for stage, folder in ((2, "two"), (3, "three")):
        saved = runner.folder / folder / "checkpoint-2" / "global_step2"
        names = {path.name for path in saved.iterdir()}
        ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in (0, 1)]
        models = ranks if stage == 3 else ["mp_rank_00"]
        assert names >= {f"{name}_model_states.pt" for name in models} | {f"{name}_optim_states.pt" for name in ranks}
        assert (saved.parent / "zero_to_fp32.py").exists()
    check = (
        "from transformers import AutoModelForCausalLM as A; import torch\n"
        "two, three = (A.from_pretrained(f'{x}/final').state_dict() for x in ('two', 'three'))\n"
        "assert all(torch.allclose(two[name], three[name], rtol=1e-5, atol=1e-7) for name in two)\n"
    )
    runner.python("-c", check)
    os.rename(runner.folder / "three/checkpoint-4", runner.folder / "gone")  # goes on from step 2
    again = runner.script("trainer.py", *config(3), "--output_dir", "three", *EVERY_TWO)
    assert_alike(again, expected)


# The same training by onefold's own names: accelerate deals batches to ranks in turn.
OWN_LOOP = f"""
import json, os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import tiny, torch, onefold
words = tiny.tokenizer()
model = tiny.model(words)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
          "zero_optimization": {{"stage": STAGE}}}}
engine, *_ = onefold.initialize(model=model, optimizer=optimizer, config=config)
# Its schedule steps once for each process at every boundary.
rates = [min(step / 2, (40 - step) / 38) * 1e-3 for step in range(0, 41)]
rank, losses = int(os.environ["RANK"]), []
loader = list(torch.utils.data.DataLoader(tiny.examples(words), batch_size=4))
for number in range(len(loader) // 2):
    for group in optimizer.param_groups:
        group["lr"] = rates[2 * engine.global_steps]
    loss = engine(**loader[2 * number + rank]).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    losses.append(total.item() / 2)
if rank == 0:
    print(json.dumps({{"losses": losses}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 2])
def test_a_loop_of_ones_own_with_accelerate(runner, stage):
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / f"zero{stage}.yaml")]
    found = last_line(runner.python(*launch, str(EXAMPLES / "accelerate_loop.py"), "out"))
    assert found["processes"] == 2
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    (runner.folder / "own.py").write_text(OWN_LOOP.replace("STAGE", str(stage)))
    assert found["losses"] == pytest.approx(last_line(runner.python(*launch, "own.py"))["losses"], rel=1e-6)
    assert (runner.folder / "out/final/model.safetensors").exists()


TRL = {
    "sft": ["--save_strategy", "no", "--bf16", "False"],
    "sft --lora": ["--save_strategy", "no", "--bf16", "False", "--lora"],
    "sft --qlora": ["--save_strategy", "no", "--bf16", "False", "--qlora"],
    "dpo": ["--save_strategy", "no", "--bf16", "False"],
    "grpo": ["--save_strategy", "no", "--bf16", "False", "--num_generations", "2", "--max_completion_length", "8"],
}


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRL)
def test_trl_in_stage_3_equals_stage_2(runner, recipe):
    script = f"{recipe.split()[0]}.py"
    two, three = (
        runner.script(script, *config(stage), "--output_dir", f"out{stage}", *TRL[recipe]) for stage in (2, 3)
    )
    assert len(two["losses"]) == 4
    assert three["losses"] == pytest.approx(two["losses"], rel=1e-4, abs=1e-6)


@needs_trl
@pytest.mark.slow
def test_lora_with_states_on_the_host_equals_lora_without(runner):
    expected = runner.script("sft.py", *config(2), "--output_dir", "two", *TRL["sft --lora"])
    offload = ["--deepspeed", str(EXAMPLES / "ds_zero2_offload.json"), "--output_dir", "offload"]
    assert_alike(runner.script("sft.py", *offload, *TRL["sft --lora"]), expected)
    names = {path.name for path in (runner.folder / "offload/final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
