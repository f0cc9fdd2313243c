"""What transformers, PEFT and TRL do beyond the examples of test_dropin.py: in stage 3 as in stage 2."""

from __future__ import annotations

import io
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_as_deepspeed import installed  # noqa: F401 - a fixture
from test_dropin import EVERY_TWO, EXAMPLES, assert_alike, config, last_line, model, needs_trl, runner  # noqa: F401
from torch import nn

pytestmark = pytest.mark.program

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


class Small(nn.Module):
    """The norm is small and stays unsharded, the other layers rest as shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        out: torch.Tensor = self.head(self.norm(x))
        return out


def engine_of(stage: int, **more: Any) -> Any:
    from onefold.compat import deepspeed

    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **more},
    }
    return deepspeed.initialize(model=Small(), config=settings)[0]


def refused(act: Any, words: str = "GatheredParameters") -> bool:
    try:
        act()
    except RuntimeError as error:
        return words in str(error)
    return False


def state_dicts(folder: str) -> dict[str, bool]:
    from safetensors.torch import save_file

    from onefold.compat.deepspeed import zero

    engine = engine_of(3)
    own = engine.module.head.state_dict()
    found = {
        "keys": list(own) == ["weight"] and list(engine.module.blocks.state_dict())[:2] == ["0.weight", "0.bias"],
        "clone": refused(lambda: own["weight"].clone()),
        "torch": refused(lambda: torch.save(own, io.BytesIO())),
        "safetensors": refused(lambda: save_file(own, f"{folder}/{engine.global_rank}.safetensors")),
        "load": refused(lambda: nn.Linear(32, 32, bias=False).load_state_dict(own), "size mismatch"),
        "whole model": refused(lambda: engine.module.state_dict()["head.weight"].clone()),
        "unsharded": engine.module.norm.state_dict()["weight"].shape == (32,),
    }
    with zero.GatheredParameters([engine.module.head.weight]):
        of_model = engine.module.state_dict()
        found["gathered"] = torch.equal(of_model["head.weight"], engine.module.head.weight)
        found["others"] = refused(lambda: of_model["blocks.0.weight"].clone())
    engine.close()
    return found


def test_a_state_dict_of_a_sharded_module_has_names_and_refuses_its_values(on_ranks, tmp_path):
    """PEFT lists the keys of one module on rank 0; a model's, around some parameters that were gathered."""
    for found in on_ranks(2, state_dicts, str(tmp_path)):
        assert all(found.values()), found


def train_and_call_the_norm_alone(stage: int, overlap: bool) -> list[float]:
    from onefold.compat.deepspeed import zero

    engine = engine_of(stage, overlap_comm=overlap)
    rank, found = engine.global_rank, []
    for step in range(6):
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = ((engine.module.norm(x) if step % 3 == 1 else engine(x)) * x).sum()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        if rank == 0:
            found.append(engine.module.norm(x).sum().item())
        torch.distributed.barrier()
    parameters = list(engine.module.parameters())
    with zero.GatheredParameters(parameters):
        found += [parameter.norm().item() for parameter in parameters]
    engine.close()
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_one_rank_may_call_a_module_whose_parameters_stay_unsharded(on_ranks, overlap):
    """PEFT computes the prompt that it saves on rank 0 alone, while the others wait in a barrier."""
    expected = on_ranks(2, train_and_call_the_norm_alone, 2, overlap)
    assert on_ranks(2, train_and_call_the_norm_alone, 3, overlap) == expected


def saved(folder: str) -> None:
    engine = engine_of(2)
    engine.save_checkpoint(folder, tag="one")
    engine.close()


@pytest.mark.slow
def test_the_script_beside_a_checkpoint_can_be_run_by_its_name(on_ranks, tmp_path):
    on_ranks(1, saved, str(tmp_path))
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)


PLAIN = ["--save_strategy", "no", "--bf16", "False"]


@needs_trl
@needs_accelerate
@pytest.mark.slow
def test_a_reward_model_in_stage_3_equals_stage_2(runner):  # noqa: F811
    two, three = (runner.script("reward.py", *config(stage), "--output_dir", f"out{stage}", *PLAIN) for stage in (2, 3))
    assert len(two["losses"]) == 4
    assert_alike(three, two)
    assert (runner.folder / "out3/final/model.safetensors").exists()


@needs_peft
@needs_accelerate
@pytest.mark.slow
def test_adapters_of_every_kind_in_stage_3_equal_stage_2(runner):  # noqa: F811
    names = "lora,dora,ia3,vera,oft,prompt,prefix,adalora"
    two, three = (
        runner.script("peft_methods.py", *config(stage), "--output_dir", f"out{stage}", *PLAIN, names)
        for stage in (2, 3)
    )
    assert list(two) == names.split(",")
    assert all(len(losses) == 4 for losses in two.values())
    assert_alike(three, two)
    check = (
        "from safetensors.torch import load_file as load; import torch\n"
        "for name in ('lora', 'dora', 'ia3', 'vera', 'oft'):\n"
        "    two, three = (load(f'out{x}/{name}/adapter_model.safetensors') for x in (2, 3))\n"
        "    assert two.keys() == three.keys(), name\n"
        "    assert all(torch.allclose(two[key], three[key], rtol=1e-5, atol=1e-7) for key in two), name\n"
    )
    runner.python("-c", check)


TRAINER = {
    "best": [*EVERY_TWO, "--load_best_model_at_end", "True", "--save_total_limit", "1", "--learning_rate", "0.1"],
    "checkpointing": ["--gradient_checkpointing", "True", "--save_strategy", "no"],
    "reentrant": [
        "--gradient_checkpointing", "True", "--gradient_checkpointing_kwargs", '{"use_reentrant": true}',
        "--save_strategy", "no",
    ],
}  # fmt: skip


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINER)
def test_the_trainer_in_stage_3_equals_stage_2(runner, case):  # noqa: F811
    two, three = (
        runner.script("trainer.py", *config(stage), "--output_dir", f"out{stage}", *TRAINER[case]) for stage in (2, 3)
    )
    assert len(two["losses"]) == 4
    assert_alike(three, two)


def with_tiles(runner: Any, stage: int) -> list[str]:  # noqa: F811
    """The config of a stage with tiles and checkpoints on the host, as an argument."""
    document = json.loads((EXAMPLES / f"ds_zero{stage}.json").read_text())
    document["onefold"] = {"tiled_loss": 3, "tiled_mlp": 2}
    document["activation_checkpointing"] = {"cpu_checkpointing": True}
    path = runner.folder / f"tiles{stage}.json"
    path.write_text(json.dumps(document))
    return ["--deepspeed", str(path)]


@pytest.mark.slow
@needs_accelerate
def test_the_trainer_computes_in_tiles_by_the_keys_alone(runner):  # noqa: F811
    """Check losses and evaluations against those of the plain trainer, and label smoothing, which needs all logits."""
    common = ["--save_strategy", "no", "--eval_strategy", "steps", "--eval_steps", "2"]
    recomputing = [*common, "--gradient_checkpointing", "True"]
    plain = runner.script("trainer.py", *config(3), "--output_dir", "plain", *common)
    tiled = runner.script("trainer.py", *with_tiles(runner, 3), "--output_dir", "tiled", *recomputing)
    assert len(plain["losses"]) == 4
    for name, numbers in plain.items():
        assert tiled[name] == pytest.approx(numbers, rel=1e-4), name
    smoothing = ["--label_smoothing_factor", "0.1"]
    with pytest.raises(AssertionError, match="LlamaForCausalLM is called in training mode without labels"):
        runner.script("trainer.py", *with_tiles(runner, 3), "--output_dir", "out", *common, *smoothing)


@needs_trl
@needs_accelerate
@pytest.mark.slow
def test_a_trainer_with_a_head_of_its_own_is_told_that_it_has_tiles(runner):  # noqa: F811
    with pytest.raises(AssertionError, match="such as a fused head of TRL or Liger, which has tiles of its own"):
        runner.script("sft.py", *with_tiles(runner, 3), "--output_dir", "out", *PLAIN)


@needs_accelerate
@pytest.mark.slow
def test_the_trainer_resumes_on_another_number_of_ranks(runner):  # noqa: F811
    """Two ranks of 4 and one rank of 8 see the same batches."""
    expected = runner.script("trainer.py", *config(3), "--output_dir", "out", *EVERY_TWO)
    os.rename(runner.folder / "out/checkpoint-4", runner.folder / "gone")
    one = ["--per_device_train_batch_size", "8", "--output_dir", "out"]
    for stage in (3, 2):
        found = runner.script("trainer.py", *config(stage), *one, *EVERY_TWO, ranks=1)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        os.rename(runner.folder / "out/checkpoint-4", runner.folder / f"gone{stage}")


# A small T5 that is evaluated by what it writes.
T5 = """
import torch
from transformers import T5Config, T5ForConditionalGeneration
torch.manual_seed(1)
config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
T5ForConditionalGeneration(config).save_pretrained("t5")
"""
WRITES = """
import json
import torch
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5ForConditionalGeneration
(arguments,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
made = torch.Generator().manual_seed(3)
data = [
    {"input_ids": torch.randint(1, 64, (12,), generator=made), "labels": torch.randint(2, 64, (6,), generator=made)}
    for _ in range(64)
]
trainer = Seq2SeqTrainer(
    model=T5ForConditionalGeneration.from_pretrained("t5"), args=arguments, train_dataset=data, eval_dataset=data[:13]
)
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
written = trainer.predict(data[:7]).predictions.tolist()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"losses": [*losses, evaluated], "written": written}))
"""


@needs_accelerate
@pytest.mark.slow
def test_a_model_that_writes_in_its_evaluation(runner):  # noqa: F811
    runner.python("-c", T5)
    (runner.folder / "writes.py").write_text(WRITES)
    writing = ["--predict_with_generate", "True", "--generation_max_length", "8", "--save_strategy", "no"]
    two, three = (
        runner.script(str(runner.folder / "writes.py"), *config(stage), "--output_dir", f"out{stage}", *writing)
        for stage in (2, 3)
    )
    assert two["written"] == three["written"]
    assert three["losses"] == pytest.approx(two["losses"], rel=1e-6)


@needs_accelerate
@pytest.mark.slow
def test_the_trainer_finds_a_smaller_batch(runner):  # noqa: F811
    """Stage 2: transformers refuses it in stage 3. The first engine goes, another is made for the same model."""
    code = (EXAMPLES / "trainer.py").read_text().replace(
        "        args=arguments,\n", "        args=arguments,\n        callbacks=[Full()],\n"
    )  # fmt: skip
    full = (
        "from transformers import TrainerCallback\n"
        "class Full(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **_):\n"
        "        if state.train_batch_size >= 4:\n"
        "            raise RuntimeError('CUDA out of memory.')\n\n\n"
    )
    code = code.replace("def main()", f"{full}def main()")
    code = code.replace("import tiny\n", f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport tiny\n")
    Path(runner.folder / "full.py").write_text(code)
    found = runner.script(
        str(runner.folder / "full.py"), *config(2), "--output_dir", "out", "--save_strategy", "no",
        "--auto_find_batch_size", "True",
    )  # fmt: skip
    assert len(found["losses"]) == 4


# 12 layers of 12 MB each. glibc is told to give freed memory back: what is measured is what was in use.
LOADING = """
import os, re, sys, threading, time, torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

def megabytes(kind):
    return int(re.search(rf"{kind}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def build(num_layers):
    shape = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, vocab_size=500)
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=num_layers, **shape))

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    build(12).save_pretrained("big")
    build(1).save_pretrained("small")
dist.barrier()
alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
AutoModelForCausalLM.from_pretrained("small")
before, peaks, done = {}, {}, threading.Event()
for kind in ("RssAnon", "RssFile"):
    before[kind] = peaks[kind] = megabytes(kind)

def watch():
    while not done.is_set():
        for kind in peaks:
            peaks[kind] = max(peaks[kind], megabytes(kind))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = AutoModelForCausalLM.from_pretrained("big")
done.set()
watcher.join()
found = [None, None]
dist.all_gather_object(found, {kind: peaks[kind] - before[kind] for kind in peaks})
if dist.get_rank() == 0:
    import json
    print(json.dumps({"size": os.path.getsize("big/model.safetensors") / 2**20, "ranks": found}))
"""


@needs_accelerate
@pytest.mark.slow
def test_loading_takes_a_shard_and_a_layer_and_one_rank_reads_the_file(runner):  # noqa: F811
    runner.set_variable("MALLOC_MMAP_THRESHOLD_", "65536")
    (runner.folder / "loading.py").write_text(LOADING)
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    found = last_line(runner.python(*launch, "loading.py"))
    first, second = found["ranks"]
    assert first["RssFile"] > 0.9 * found["size"], "rank 0 maps the file and reads all of it"
    assert second["RssFile"] < 0.1 * found["size"]
    for rank in (first, second):
        assert rank["RssAnon"] < found["size"] / 2 + 40, "its shard, and a few layers on the way"
