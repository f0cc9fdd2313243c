"""Fine-tune with TRL: the whole model, LoRA (`--lora`), or LoRA on a frozen 4-bit base (`--qlora`).

The script does not import onefold.

deepspeed --num_gpus 2 sft.py --deepspeed ds_zero2.json --output_dir out --max_steps 20 [--lora | --qlora]
"""

from __future__ import annotations

import sys

import tiny
from datasets import Dataset
from transformers import HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer


def main() -> None:
    ways = {"--lora", "--qlora"} & {*sys.argv}
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses([a for a in sys.argv[1:] if a not in ways])
    set_seed(arguments.seed)
    words = tiny.tokenizer()
    adapter = None
    if ways:
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=tiny.model_in_4_bits() if "--qlora" in ways else tiny.model(words),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": tiny.SENTENCES}),
        processing_class=words,
        peft_config=adapter,
    )
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/final")
    tiny.show(trainer)


if __name__ == "__main__":
    main()
