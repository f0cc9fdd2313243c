"""Train PEFT adapters other than plain LoRA, one after another, by name. The script does not import onefold.

deepspeed --num_gpus 2 peft_methods.py --deepspeed ds_zero3.json --output_dir out --max_steps 20 dora,ia3,prefix

AdaLoRA needs gradients between backward and step, where transformers' Trainer has no callback. It has a separate loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import tiny
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.integrations import HfDeepSpeedConfig

ATTENTION = ["q_proj", "v_proj"]
TASK: Any = "CAUSAL_LM"
METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"], task_type=TASK),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=ATTENTION, task_type=TASK),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=TASK
    ),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=ATTENTION, task_type=TASK),
    "oft": lambda: peft.OFTConfig(oft_block_size=16, target_modules=ATTENTION, task_type=TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=TASK),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=6, target_r=3, tinit=1, tfinal=1, total_step=6, target_modules=ATTENTION, task_type=TASK
    ),
}
# PEFT computes the saved tensors of these on rank 0 only, so their parameters must be unsharded there.
WHOLE_WHEN_SAVED = {"prompt", "prefix"}


def adapted(name: str, words: tiny.PreTrainedTokenizerFast) -> peft.PeftModel:
    set_seed(1)
    base = tiny.model(words)
    set_seed(2)
    return peft.get_peft_model(base, METHODS[name]())


def with_trainer(name: str, arguments: TrainingArguments) -> list[float]:
    words = tiny.tokenizer()
    trainer = Trainer(model=adapted(name, words), args=arguments, train_dataset=tiny.examples(words))
    trainer.train()
    if name not in WHOLE_WHEN_SAVED:
        trainer.save_model(f"{arguments.output_dir}/{name}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_a_loop(arguments: TrainingArguments) -> list[float]:
    """Train AdaLoRA, which after each backward rates its components by gradient and masks the least important."""
    import deepspeed

    config = json.loads(Path(str(arguments.deepspeed)).read_text())
    size = arguments.per_device_train_batch_size
    config |= {
        "train_batch_size": size * arguments.world_size, "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": arguments.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": arguments.learning_rate}},
    }  # fmt: skip
    del config["scheduler"]
    known = HfDeepSpeedConfig(config)  # while this object exists, transformers builds models sharded
    words = tiny.tokenizer()
    model = adapted("adalora", words)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=known.config)
    losses = []
    batches = list(torch.utils.data.DataLoader(tiny.examples(words), batch_size=size))
    for step in range(min(arguments.max_steps, len(batches) // arguments.world_size)):
        batch = batches[arguments.world_size * step + arguments.process_index]
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        with deepspeed.zero.GatheredParameters(trained, modifier_rank=0):
            model.base_model.update_and_allocate(step + 1)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    *given, names = sys.argv[1:]
    found = {}
    for name in names.split(","):
        # Parse again for each method, because Trainer writes the sizes of its model into the arguments.
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(given)
        found[name] = with_a_loop(arguments) if name == "adalora" else with_trainer(name, arguments)
    if arguments.process_index == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
