"""Sequence parallelism by accelerate's and transformers' own switches. The script does not import onefold.

Run by `test_compat_sequence.py` on ranks under the name of DeepSpeed. Each part trains with SGD, in parts of sequences
and, as plain torch, with whole ones, and prints the losses and the largest difference between the weights.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH, SAMPLES, RATE = 32, 8, 0.5


def make_model() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 300}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def sample(index: int) -> dict[str, torch.Tensor]:
    """Return a sample whose prompt, without labels, fills more than the first half for odd indices."""
    ids = torch.randint(0, 300, (LENGTH,), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[: 20 if index % 2 else 3] = -100
    return {"input_ids": ids, "labels": labels}


def together(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def parallelism(size: int) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    replicas = int(os.environ["WORLD_SIZE"]) // size
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, dp_shard_size=replicas, sp_handler=handler)


def train_plainly(replicas: int, steps: int, times: int) -> tuple[list[float], Any]:
    """Train on samples in order, one for each replica in a step, each sample in so many steps."""
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        of_step = [model(**together([sample(step // times * replicas + at)])).loss for at in range(replicas)]
        (sum(of_step) / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(of_step[0]))
    return losses, model


def difference(weights: dict[str, torch.Tensor], expected: Any) -> float:
    return max(float((weights[name] - value).abs().max()) for name, value in expected.named_parameters())


def with_accelerate(size: int) -> dict[str, Any]:
    """Train in the loop of accelerate's test of sequence parallelism."""
    import deepspeed
    from deepspeed.utils import groups

    accelerator = Accelerator(
        parallelism_config=parallelism(size),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_clipping=100.0),
    )
    replicas = accelerator.num_processes // size
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader([sample(at) for at in range(SAMPLES)], batch_size=1, collate_fn=together)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group, losses = groups._get_sequence_parallel_group(), []
    assert groups._get_sequence_parallel_world_size() == size == model.seq_parallel_group.size()
    for batch in loader:
        optimizer.zero_grad()
        targets = batch["shift_labels"]
        outputs = model(**batch)
        loss = accelerator.unwrap_model(model).loss_function(
            logits=outputs.logits, labels=None, shift_labels=targets, vocab_size=300
        )
        of_ranks = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather((targets != -100).sum(), group=group)
        pairs = [(each, count) for each, count in zip(of_ranks, counts, strict=True) if count]
        mean = sum(each * count for each, count in pairs) / sum(counts)
        accelerator.backward(mean)
        optimizer.step()
        losses.append(float(mean))
    with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
        weights = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    assert len(loader) == len(losses) == SAMPLES // replicas
    return {"losses": losses, "weights": weights, "replicas": replicas}


def with_trainer(size: int, folder: str) -> dict[str, Any]:
    """Train with Trainer, and compute whole sequences in evaluation mode.

    Without a GPU, Trainer takes each rank for the only one, so that all ranks of a sequence load the same samples.
    """
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, max_steps=4, max_grad_norm=100.0, logging_steps=1, report_to=[],
        save_strategy="no",
        parallelism_config=parallelism(size), lr_scheduler_type="constant", learning_rate=RATE, ddp_backend="gloo",
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": {"stage": 2},
            "gradient_clipping": 100.0, "gradient_accumulation_steps": "auto", "zero_force_ds_cpu_optimizer": False,
            "onefold": {"tiled_loss": 2},
        },
    )  # fmt: skip
    model = make_model()
    data = [sample(at) for at in range(SAMPLES)]
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=together)
    trainer.create_optimizer = lambda *_: setattr(trainer, "optimizer", torch.optim.SGD(model.parameters(), lr=RATE))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.model_wrapped.eval()
    with torch.no_grad():
        evaluated = float(trainer.model_wrapped(**together(data[:1])).loss)
    return {"losses": losses, "weights": weights, "replicas": 1, "times": size, "evaluated": evaluated}


def main() -> None:
    name, size, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    found = with_accelerate(size) if name == "accelerate" else with_trainer(size, folder)
    losses, expected = train_plainly(found["replicas"], len(found["losses"]), found.get("times", 1))
    printed = {"losses": found["losses"], "plain": losses, "difference": difference(found["weights"], expected)}
    if "evaluated" in found:
        expected.eval()
        with torch.no_grad():
            printed["evaluated"] = [found["evaluated"], float(expected(**together([sample(0)])).loss)]
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps(printed), flush=True)


if __name__ == "__main__":
    main()
