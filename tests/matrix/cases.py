"""Train a tiny model with one framework, on one rank: `python cases.py CASE:MODE,CASE:MODE FOLDER`.

MODE is `plain` for the framework without DeepSpeed (DDP, or torch alone), or the ZeRO stage. Nothing in here imports
onefold: frameworks reach it under the name `deepspeed`. Each case returns what the modes must have in common: the
losses, and optionally other numbers. Rank 0 writes them to FOLDER/CASE/MODE.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ.get("RANK", "0"))
STEPS = 3
Result = dict[str, Any]


def ds_config(mode: str, **more: Any) -> dict[str, Any]:
    zero = {"stage": int(mode), "stage3_gather_16bit_weights_on_model_save": True} | more.pop("zero", {})
    zero |= {"stage3_param_persistence_threshold": 0} if mode == "3" else {}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
    } | more


# -- transformers and what builds on its Trainer ------------------------------------------------------------------


def options(mode: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of a Trainer."""
    given: dict[str, Any] = {
        "output_dir": str(folder / f"run-{mode}"), "use_cpu": True, "max_steps": STEPS, "logging_steps": 1,
        "per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "save_strategy": "no", "seed": 1, "ddp_backend": "gloo",
    }  # fmt: skip
    return given | ({} if mode == "plain" else {"deepspeed": ds_config(mode)}) | more


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(trainer: Any, folder: Path, mode: str) -> Result:
    """Train, save, and return the losses."""
    trainer.train()
    trainer.save_model(str(folder / f"saved-{mode}"))
    return {"losses": losses_of(trainer)}


def trainer_llama(mode: str, folder: Path) -> Result:
    """`from_pretrained`, three steps, an evaluation, `save_model`."""
    import tiny
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(**options(mode, folder))
    data = tiny.examples(tiny.tokenizer())
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    trainer = Trainer(model=model, args=arguments, train_dataset=data[:96], eval_dataset=data[96:])
    found = train(trainer, folder, mode) | {"eval": trainer.evaluate()["eval_loss"]}
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / f"saved-{mode}")
    with gathered(again):
        return found | {"reloaded": sum(parameter.detach().abs().sum().item() for parameter in again.parameters())}


def gathered(model: nn.Module) -> Any:
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def trainer_qwen_bf16(mode: str, folder: Path) -> Result:
    """A model with tied embeddings that is loaded and trained in bf16 (plain: autocast over fp32 weights)."""
    import tiny
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(**options(mode, folder, bf16=True))
    dtype = torch.float32 if mode == "plain" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "tied", torch_dtype=dtype)
    return train(Trainer(model=model, args=arguments, train_dataset=tiny.examples(tiny.tokenizer())), folder, mode)


def trainer_new_head(mode: str, folder: Path) -> Result:
    """A checkpoint without the classification head: the head is initialised, and the rest is loaded."""
    import tiny
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    arguments = TrainingArguments(**options(mode, folder))
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder.parent / "model", num_labels=3)
    weight = model.score.weight
    shape = list(getattr(weight, "ds_shape", weight.shape))
    data = [
        {"input_ids": row["input_ids"], "labels": index % 3}
        for index, row in enumerate(tiny.examples(tiny.tokenizer()))
    ]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    # The random head differs between modes, so its first loss is only as near as small weights make it.
    return {"shape": shape, "near ln 3": abs(losses_of(trainer)[0] - math.log(3)) < 0.2}


def peft_lora(mode: str, folder: Path) -> Result:
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

    arguments = TrainingArguments(**options(mode, folder))
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    set_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return train(Trainer(model=model, args=arguments, train_dataset=tiny.examples(tiny.tokenizer())), folder, mode)


def trl_sft(mode: str, folder: Path) -> Result:
    import tiny
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**options(mode, folder, bf16=False, gradient_checkpointing=False))
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder.parent / "model"),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": tiny.SENTENCES}),
        processing_class=tiny.tokenizer(),
    )
    return train(trainer, folder, mode)


def trl_dpo(mode: str, folder: Path) -> Result:
    import tiny
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**options(mode, folder, bf16=False, gradient_checkpointing=False))
    pairs = [text.rpartition(" ") for text in tiny.SENTENCES]
    data = {
        "prompt": [start for start, _, _ in pairs],
        "chosen": [f" {end}" for _, _, end in pairs],
        "rejected": [" sleeps" for _ in pairs],
    }
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder.parent / "model"),
        ref_model=AutoModelForCausalLM.from_pretrained(folder.parent / "model"),
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=tiny.tokenizer(),
    )
    return train(trainer, folder, mode)


def sentence_transformers(mode: str, folder: Path) -> Result:
    import tiny
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )

    arguments = SentenceTransformerTrainingArguments(**options(mode, folder))
    words = models.Transformer(str(folder.parent / "model"))
    model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")
    rows = Dataset.from_dict({"anchor": tiny.SENTENCES, "positive": tiny.SENTENCES[1:] + tiny.SENTENCES[:1]})
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss)
    trainer.train()
    return {"losses": losses_of(trainer)}


def logged(folder: Path) -> list[float]:
    """The losses that a Trainer has saved."""
    (state,) = sorted(folder.rglob("trainer_state.json"))[:1]
    history = json.loads(state.read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def llamafactory(mode: str, folder: Path, **more: Any) -> Result:
    if find_spec("torchaudio") is None:  # imported for audio, and its builds on the index may need CUDA
        sys.modules["torchaudio"] = ModuleType("torchaudio")
        sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp

    given = options(mode, folder, do_train=True, stage="sft", finetuning_type="full", template="empty", cutoff_len=32)
    given |= {
        "model_name_or_path": str(folder.parent / "model"), "dataset": "tiny", "dataset_dir": str(folder.parent),
        "overwrite_output_dir": True, "overwrite_cache": True, "bf16": False, "preprocessing_num_workers": 1,
    }  # fmt: skip
    run_exp(given | more)
    return {"losses": logged(folder / f"run-{mode}")}


def llamafactory_lora(mode: str, folder: Path) -> Result:
    return llamafactory(mode, folder, finetuning_type="lora", lora_rank=4, lora_target="q_proj,v_proj")


def ms_swift(mode: str, folder: Path, **more: Any) -> Result:
    try:
        from swift.pipelines import sft_main
    except ImportError:
        from swift.llm import sft_main

    given = options(
        mode, folder, model=str(folder.parent / "model"), model_type="llama", template="default", max_length=32
    )
    given |= {
        "dataset": str(folder.parent / "tiny.json"), "tuner_type": "full", "torch_dtype": "float32",
        "add_version": "false",
        "dataset_num_proc": 1, "dataloader_num_workers": 0, "save_strategy": "steps", "eval_strategy": "no",
        "bf16": "false", "attn_impl": "sdpa", "gradient_checkpointing": "false", "split_dataset_ratio": 0,
        "load_from_cache_file": "false",
    }  # fmt: skip
    given |= {} if mode == "plain" else {"deepspeed": f"zero{mode}"}
    sft_main([str(word) for name, value in (given | more).items() for word in (f"--{name}", value)])
    return {"losses": logged(folder / f"run-{mode}")}


def ms_swift_lora(mode: str, folder: Path) -> Result:
    return ms_swift(mode, folder, tuner_type="lora", lora_rank=4)


# -- frameworks with loops of their own ---------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(8, 16, generator=made), torch.randn(8, 4, generator=made)


def mean(loss: torch.Tensor) -> float:
    """The loss of all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def plain_losses(steps: int = STEPS, **options: Any) -> list[float]:
    """Losses of DDP with torch's AdamW."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | options))
    found = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(mean(loss))
    return found


def accelerate(mode: str, folder: Path) -> Result:
    """A loop with `prepare`, `save_state` and `load_state`: the last step is taken twice."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    if mode == "plain":
        return {"losses": plain_losses()}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=int(mode), gradient_clipping=None),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    for step in [*range(STEPS), STEPS - 1]:
        if len(found) == STEPS - 1:
            accelerator.save_state(str(folder / f"state-{mode}"))
        if len(found) == STEPS:
            accelerator.load_state(str(folder / f"state-{mode}"))
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss))
    weights = accelerator.get_state_dict(model) if mode == "2" else model._zero3_consolidated_16bit_state_dict()
    if RANK == 0:
        assert weights["0.weight"].shape == (32, 16)
    assert abs(found.pop() - found[-1]) < 1e-6, "the step after load_state differs"
    return {"losses": found}


def lightning(mode: str, folder: Path) -> Result:
    """Lightning's Trainer. Its strategy takes CUDA devices only; here it takes a CPU for one."""
    import lightning
    import lightning.pytorch.strategies.deepspeed as strategies

    before = dict(os.environ)
    os.environ |= {"NODE_RANK": str(RANK), "LOCAL_RANK": "0"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    strategies.CUDAAccelerator = lightning.pytorch.accelerators.CPUAccelerator
    if hasattr(strategies, "_validate_device_index_selection"):
        strategies._validate_device_index_selection = lambda devices: None
    found: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, rows: list[torch.Tensor]) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(rows[0]), rows[1])
            found.append(mean(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    rows = torch.utils.data.TensorDataset(
        *(torch.cat(parts) for parts in zip(*(batch(step) for step in range(STEPS)), strict=True))
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, max_steps=STEPS, logger=False, enable_progress_bar=False,
        strategy="ddp" if mode == "plain" else strategies.DeepSpeedStrategy(stage=int(mode)),
        default_root_dir=folder / f"run-{mode}", use_distributed_sampler=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    trainer.save_checkpoint(folder / f"saved-{mode}.ckpt")
    os.environ |= before
    return {"losses": found}


def mmengine(mode: str, folder: Path) -> Result:
    """mmengine's DeepSpeedStrategy. Its launcher asks for CUDA, so that the process group exists before."""
    if mode == "plain":
        return {"losses": plain_losses()}
    import deepspeed
    from mmengine._strategy.deepspeed import DeepSpeedStrategy
    from mmengine.model import BaseModel

    deepspeed.init_distributed(dist_backend="gloo")

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.net(x), y)}

    strategy = DeepSpeedStrategy(
        zero_optimization={"stage": int(mode)}, train_micro_batch_size_per_gpu=8, work_dir=str(folder)
    )
    wrapper = {"type": "DeepSpeedOptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-2}}
    strategy.prepare(Model(), optim_wrapper=wrapper, dispatch_kwargs={})
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        logs = strategy.model.train_step({"x": x, "y": y}, strategy.optim_wrapper)
        found.append(mean(logs["loss"]))
    strategy.save_checkpoint(str(folder / f"state-{mode}" / "last"))
    strategy.resume(str(folder / f"state-{mode}" / "last"))
    return {"losses": found}


# -- call sequences of frameworks that need a GPU or are not on the index -----------------------------------------


def openrlhf(mode: str, folder: Path) -> Result:
    """What OpenRLHF's DeepspeedStrategy does: policy and reference engines, sleep, save, load, consolidate."""
    if mode == "plain":
        return {"losses": plain_losses(betas=(0.9, 0.95), weight_decay=0.0)}
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    deepspeed.init_distributed()
    zero = {
        "stage": int(mode), "offload_param": {"device": "none"}, "sub_group_size": "auto", "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": True}, "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto", "stage3_param_persistence_threshold": "auto", "overlap_comm": False,
        "stage3_prefetch_bucket_size": "auto", "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
        "zero_quantized_gradients": False, "round_robin_gradients": True,
    }  # fmt: skip
    config = {
        "steps_per_print": 100, "zero_optimization": zero, "bf16": {"enabled": False}, "gradient_clipping": 1000.0,
        "prescale_gradients": False, "wall_clock_breakdown": False, "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 16, "data_types": {"grad_accum_dtype": None}, "checkpoint": {"load_universal": False},
        "compile": {"deepcompile": False}, "tensor_parallel": {"autotp_size": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0}},
    }  # fmt: skip
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        args={"local_rank": int(os.environ["LOCAL_RANK"])},
        config=config,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.ConstantLR(made, factor=1.0),
        dist_init_required=True,
    )
    engine.compile()
    shared = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}} if mode == "3" else {"stage": 0}
    reference, *_ = deepspeed.initialize(
        model=net(),
        args={"local_rank": int(os.environ["LOCAL_RANK"])},
        config={"zero_optimization": shared, "bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": 8},
        dist_init_required=True,
    )
    reference.eval()
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        with torch.no_grad():
            reference(x)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        found.append(mean(loss))
        # `--ds.enable_sleep`: the states make room while samples are generated.
        engine.empty_partition_cache()
        included = [
            OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer,
            OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads,
        ]  # fmt: skip
        if engine.config["zero_optimization"]["offload_optimizer"]["device"] == "none" and mode == "3":
            engine.optimizer.offload_states(
                include=included, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True
            )
            engine.reload_states(non_blocking=True)
    assert engine.get_global_grad_norm() > 0
    assert engine.zero_optimization_stage() == int(mode)
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=mode == "3"):
            assert parameter.numel() > 0
    weights = engine._consolidated_16bit_state_dict() if mode == "3" else engine.module.state_dict()
    if RANK == 0:
        assert weights["0.weight"].shape == (32, 16)
    engine.save_checkpoint(str(folder / f"state-{mode}"), tag="step_1", client_state={"step": 1}, save_latest=True)
    path, states = engine.load_checkpoint(
        str(folder / f"state-{mode}"), "step_1", load_module_strict=True, load_optimizer_states=True,
        load_lr_scheduler_states=True, load_module_only=False,
    )  # fmt: skip
    assert path is not None
    assert states["step"] == 1
    return {"losses": found}


def open_instruct(mode: str, folder: Path) -> Result:
    """What open-instruct's GRPO imports and calls when it starts."""
    if mode == "plain":
        return {"losses": plain_losses(weight_decay=0.0)}
    import deepspeed
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.runtime.utils import see_memory_usage

    torch_checkpoint_engine.TorchCheckpointEngine.load  # noqa: B018
    deepspeed.init_distributed()
    found = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="none", core_attn_implementation="sdpa", sequence_parallel_size=1, micro_batch_size=8
    )
    assert found is None
    see_memory_usage("start", force=False)
    model = net()
    config = {
        "steps_per_print": 100, "bf16": {"enabled": False}, "gradient_clipping": 1000.0, "prescale_gradients": False,
        "zero_optimization": {"stage": int(mode)}, "train_micro_batch_size_per_gpu": 8, "wall_clock_breakdown": False,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return {"losses": losses}


def axolotl_configs(mode: str, folder: Path) -> Result:
    """Train with each of axolotl's configs of a stage, in fp32, through the Trainer."""
    import tiny
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    found: Result = {}
    paths = (folder.parent / "configs").glob(f"zero{mode}*.json")  # DeepSpeed refuses those for torch.compile
    names = [""] if mode == "plain" else sorted(path.stem for path in paths if "torch_compile" not in path.stem)
    assert names, "the package has no configs"
    for name in names:
        more: dict[str, Any] = {}
        if mode != "plain":
            config = json.loads((folder.parent / "configs" / f"{name}.json").read_text())
            config.pop("bf16", None)
            config.pop("fp16", None)
            more["deepspeed"] = config
        arguments = TrainingArguments(**options(mode, folder, **more))
        model = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
        trainer = Trainer(model=model, args=arguments, train_dataset=tiny.examples(tiny.tokenizer()))
        trainer.train()
        losses = losses_of(trainer)
        assert (
            found.setdefault("losses", losses) == losses
            or max(abs(a - b) for a, b in zip(found["losses"], losses, strict=True)) < 1e-4
        ), f"{name}: {losses}, other configs {found['losses']}"
    return found


# -- running ------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[str, Path], Result]] = {
    case.__name__: case
    for case in (
        trainer_llama, trainer_qwen_bf16, trainer_new_head, peft_lora, trl_sft, trl_dpo, sentence_transformers,
        llamafactory, llamafactory_lora, ms_swift, ms_swift_lora, accelerate, lightning, mmengine, openrlhf,
        open_instruct, axolotl_configs,
    )
}  # fmt: skip


def make(folder: Path) -> None:
    """Save a Llama, a Qwen2 with tied embeddings, and a dataset."""
    import tiny
    from transformers import AutoModelForCausalLM, Qwen2Config

    words = tiny.tokenizer()
    torch.manual_seed(5)
    llama = tiny.llama(words)
    qwen = Qwen2Config(**{
        name: getattr(llama, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                     "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    }, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
    for name, config in (("model", llama), ("tied", qwen)):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    rows = [text.split(" ", 2) for text in tiny.SENTENCES]
    rows_of_dicts = [{"instruction": " ".join(row[:2]), "input": "", "output": row[2]} for row in rows]
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    (folder / "rows.json").write_text(json.dumps(rows_of_dicts))
    (folder / "rows.json").rename(folder / "tiny.json")  # the other rank waits for it


def main() -> None:
    runs, folder = [tuple(run.split(":")) for run in sys.argv[1].split(",")], Path(sys.argv[2])
    sys.argv = sys.argv[:1]
    if find_spec("transformers") and not (folder / "tiny.json").exists():
        if RANK == 0:
            make(folder)
        while not (folder / "tiny.json").exists():
            time.sleep(0.1)
    for name, mode in runs:
        (folder / name).mkdir(exist_ok=True)
        found = CASES[name](mode, folder / name)
        if dist.is_initialized():
            dist.barrier()
        if RANK == 0:
            (folder / name / f"{mode}.json").write_text(json.dumps(found))
        forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def forget() -> None:
    """Remove what the Trainer of one case would leave to the next one in this process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()


if __name__ == "__main__":
    main()
