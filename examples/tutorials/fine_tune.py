"""Fine-tune with transformers' Trainer: the whole model, LoRA, and QLoRA, with loss, memory and files of each.

    python fine_tune.py --make-base                                 # a small pretrained model; nothing is downloaded
    onefold launch --nproc 2 fine_tune.py --method full             # without --nproc one rank per GPU
    onefold launch --nproc 2 fine_tune.py --method lora
    onefold launch --nproc 2 fine_tune.py --method qlora
    python fine_tune.py --draw

docs/tutorials/fine-tune.md explains the results.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import onefold

onefold.register_as_deepspeed()  # before the next import, so that Trainer finds onefold under the name of DeepSpeed

from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from onefold.report.run_file import RunFile  # noqa: E402

LENGTH, STEPS = 32, 20
METHODS = ("full", "lora", "qlora")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COLORS = ("#2f6fc1", "#e08a2e", "#3a9a6a", "#8a62c9")


def read_windows(module: str) -> list[dict[str, torch.Tensor]]:
    """Divide the source of a module of Python into windows of bytes, which are tokens and labels."""
    text = torch.tensor(list(Path(module).read_bytes()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def settings(out: Path, learning_rate: float, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=8,
        learning_rate=learning_rate,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **more,
    )


def make_base(folder: Path) -> None:
    """Train a small Llama on the source of `argparse`, and save it as the base model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    data = read_windows(argparse.__file__)
    trainer = Trainer(LlamaForCausalLM(config), settings(folder, 3e-3, max_steps=60), train_dataset=data)
    trainer.train()
    trainer.save_model(str(folder))


def load(base: Path, method: str) -> Any:
    """Load the base model. LoRA adds an adapter to it, and QLoRA also loads its linear layers in 4 bits."""
    if method == "full":
        return LlamaForCausalLM.from_pretrained(base)
    from peft import LoraConfig, get_peft_model

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM.from_pretrained(base, quantization_config=in_4_bits if method == "qlora" else None)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))


def train(base: Path, method: str, out: Path) -> None:
    """Fine-tune on the source of `os`."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,  # shards even these small parameters
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "onefold": {"report": str(out)},
        "log_level": "warning",
    }
    rate = 5e-4 if method == "full" else 2e-3
    arguments = settings(out, rate, max_steps=STEPS, bf16=True, deepspeed=config)
    trainer = Trainer(load(base, method), arguments, train_dataset=read_windows(os.__file__))
    trainer.train()
    trainer.save_model(str(out / "model"))
    if trainer.is_world_process_zero():
        steps = RunFile.read(out).steps
        print(f"{method}: loss {steps[0].loss:.3f} in the first step, {steps[-1].loss:.3f} in the last")


def draw(out: Path) -> None:
    """Compare the runs of all methods: model states, traffic and files, and the loss of each step."""
    from matplotlib.figure import Figure

    runs = {method: RunFile.read(out / method).steps for method in METHODS}
    held = {method: steps[-1].memory.by_kind() for method, steps in runs.items()}
    print(f"{'method':<8}" + "".join(f"{kind:>12}" for kind in held["full"]) + "       total        sent       files")
    for method, kinds in held.items():
        sent = sum(row.bytes for row in runs[method][-1].traffic)
        saved = sum(file.stat().st_size for file in (out / method / "model").glob("*.safetensors"))
        cells = [*kinds.values(), sum(kinds.values()), sent, saved]
        print(f"{method:<8}" + "".join(f"{size / 1e6:>12.3f}" for size in cells))
    print("in MB: model states of rank 0 at the end of backward, bytes that it sent in the last step, saved weights")

    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    memory, losses = figure.subplots(1, 2)
    below = dict.fromkeys(METHODS, 0.0)
    for kind, color in zip(held["full"], COLORS, strict=False):
        heights = {method: held[method][kind] / 1e6 for method in METHODS}
        memory.bar(METHODS, list(heights.values()), 0.6, list(below.values()), label=kind, color=color)
        below = {method: low + heights[method] for method, low in below.items()}
    for place, total in enumerate(below.values()):
        memory.text(place, total, f"{total:.2f}", ha="center", va="bottom", fontsize="small")
    memory.set_ylabel("MB of model states per rank")
    for (method, steps), color in zip(runs.items(), COLORS, strict=False):
        style = "--" if method == "qlora" else "-"
        losses.plot([step.step for step in steps], [step.loss for step in steps], style, label=method, color=color)
    losses.set_xlabel("step")
    losses.set_ylabel("loss of rank 0")
    for axes in (memory, losses):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "fine-tune.png")
    print(f"picture: {out}/fine-tune.png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/fine-tune"))
    parser.add_argument("--make-base", action="store_true", help="make the model that is fine-tuned")
    parser.add_argument("--method", choices=METHODS, help="fine-tune by this method")
    parser.add_argument("--draw", action="store_true", help="compare the runs of all methods")
    options = parser.parse_args()
    base = options.out / "base"
    if options.make_base:
        make_base(base)
    elif options.method is not None:
        train(base, options.method, options.out / options.method)
    elif options.draw:
        draw(options.out)


if __name__ == "__main__":
    main()
