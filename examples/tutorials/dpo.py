"""Preferences with TRL: direct preference optimization (DPO) of a whole model, and of an adapter (LoRA).

    onefold launch --nproc 2 dpo.py --method full     # two ranks on CPUs; without --nproc one rank per GPU
    onefold launch --nproc 2 dpo.py --method lora
    python dpo.py --draw

docs/tutorials/dpo.md explains the results.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import onefold

onefold.register_as_deepspeed()  # before the next imports, so that they find onefold under the name of DeepSpeed

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

STEPS, METHODS = 30, ("full", "lora")
ANIMALS = ["cat", "dog", "horse", "mouse", "owl", "fox"]
VERBS = ["sleeps", "runs", "eats", "waits", "sings"]
CHOSEN, REJECTED = "at home", ["in the garden", "under a tree", "near the river"]
COLORS = ("#2f6fc1", "#e08a2e")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of whole words."""
    words = " ".join(["the", CHOSEN, *ANIMALS, *VERBS, *REJECTED]).split()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", "<pad>", "<eos>", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a Llama with random weights. A real job loads a fine-tuned model here."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(method: str, out: Path) -> None:
    """Prefer that animals are at home, against all other places. Write the measurements to a file on rank 0."""
    tokenizer = make_tokenizer()
    pairs = [(f"the {animal} {verb}", place) for animal in ANIMALS for verb in VERBS for place in REJECTED]
    data = {
        "prompt": [prompt for prompt, _ in pairs],
        "chosen": [f" {CHOSEN}" for _ in pairs],
        "rejected": [f" {place}" for _, place in pairs],
    }
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "log_level": "warning",
    }
    arguments = DPOConfig(
        output_dir=str(out / method),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-4 if method == "full" else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=config,
    )
    adapter = None
    if method == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        model=make_model(tokenizer),
        # With an adapter TRL turns the adapter off to get the reference.
        ref_model=make_model(tokenizer) if method == "full" else None,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    rows = [row for row in trainer.state.log_history if "loss" in row]
    reference = trainer.ref_model
    result = {
        "losses": [row["loss"] for row in rows],
        "margins": [row["rewards/margins"] for row in rows],
        "accuracy": rows[-1]["rewards/accuracies"],
        "policy": trainer.model_wrapped.model_memory.held_bytes().total,
        "reference": 0 if reference is None else reference.model_memory.held_bytes().total,
    }
    (out / f"{method}.json").write_text(json.dumps(result))
    print(f"{method}: loss {rows[0]['loss']:.4f} in the first step, {rows[-1]['loss']:.4f} in the last")


def draw(out: Path) -> None:
    """Compare the methods: bytes of policy and reference, loss and margin of each step."""
    from matplotlib.figure import Figure

    results = {method: json.loads((out / f"{method}.json").read_text()) for method in METHODS}
    print("method      policy   reference  accuracy  last margin")
    for method, each in results.items():
        held = f"{each['policy'] / 1e6:>12.3f}{each['reference'] / 1e6:>12.3f}"
        print(f"{method:<6}{held}{each['accuracy']:>10.2f}{each['margins'][-1]:>13.3f}")
    print("MB of model states of rank 0; share of pairs of the last step whose chosen answer has the higher reward")

    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    memory, losses, margins = figure.subplots(1, 3)
    policy, reference = ([each[part] / 1e6 for each in results.values()] for part in ("policy", "reference"))
    memory.bar(METHODS, policy, 0.6, label="policy", color=COLORS[0])
    memory.bar(METHODS, reference, 0.6, policy, label="reference", color=COLORS[1])
    memory.set_ylabel("MB of model states per rank")
    for (method, each), color in zip(results.items(), COLORS, strict=True):
        steps = range(1, STEPS + 1)
        losses.plot(steps, each["losses"], label=method, color=color)
        margins.plot(steps, each["margins"], label=method, color=color)
    losses.set_ylabel("loss")
    margins.set_ylabel("margin: reward of chosen minus rejected")
    for axes in (losses, margins):
        axes.set_xlabel("step")
    for axes in (memory, losses, margins):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "dpo.png")
    print(f"picture: {out}/dpo.png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/dpo"))
    parser.add_argument("--method", choices=METHODS, help="train by this method")
    parser.add_argument("--draw", action="store_true", help="compare the runs of both methods")
    options = parser.parse_args()
    if options.method is not None:
        train(options.method, options.out)
    elif options.draw:
        draw(options.out)


if __name__ == "__main__":
    main()
