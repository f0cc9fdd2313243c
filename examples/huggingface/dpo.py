"""Train with direct preference optimization of TRL, with a frozen reference model.

The script does not import onefold.

deepspeed --num_gpus 2 dpo.py --deepspeed ds_zero3.json --output_dir out --max_steps 20
"""

from __future__ import annotations

import tiny
from datasets import Dataset
from transformers import HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer


def main() -> None:
    (arguments,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    words = tiny.tokenizer()
    pairs = [text.rpartition(" ") for text in tiny.SENTENCES]
    data = {
        "prompt": [start for start, _, _ in pairs],
        "chosen": [f" {end}" for _, _, end in pairs],
        "rejected": [" sleeps" for _ in pairs],
    }
    model = tiny.model(words)
    set_seed(arguments.seed)
    reference = tiny.model(words)
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_dict(data), processing_class=words
    )
    trainer.train()
    tiny.show(trainer)


if __name__ == "__main__":
    main()
