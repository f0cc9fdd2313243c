"""Train with group relative policy optimization of TRL, with a reward for long words.

The script does not import onefold.

    deepspeed --num_gpus 2 grpo.py --deepspeed ds_zero3.json --output_dir out --max_steps 20 --num_generations 2
"""

from __future__ import annotations

import tiny
from datasets import Dataset
from transformers import HfArgumentParser, set_seed
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(sum(map(len, text.split()))) for text in completions]


def main() -> None:
    (arguments,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    words = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.model(words),
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"the {animal}" for animal in tiny.ANIMALS] * 8}),
        processing_class=words,
    )
    trainer.train()
    tiny.show(trainer)


if __name__ == "__main__":
    main()
