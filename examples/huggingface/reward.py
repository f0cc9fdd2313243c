"""Train a reward model with TRL: the better of two texts gets the higher score. The script does not import onefold.

deepspeed --num_gpus 2 reward.py --deepspeed ds_zero3.json --output_dir out --max_steps 20
"""

from __future__ import annotations

import os

import tiny
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, HfArgumentParser, PreTrainedModel, set_seed
from trl import RewardConfig, RewardTrainer


def model(words: tiny.PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model with a head for one score: new, or from the folder in the environment variable MODEL."""
    if "MODEL" in os.environ:
        return AutoModelForSequenceClassification.from_pretrained(os.environ["MODEL"], num_labels=1)
    config = tiny.llama(words)
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config)


def main() -> None:
    (arguments,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    words = tiny.tokenizer()
    worse = [f"{text.rpartition(' ')[0]} sleeps" for text in tiny.SENTENCES]
    data = Dataset.from_dict({"chosen": tiny.SENTENCES, "rejected": worse})
    trainer = RewardTrainer(
        model=model(words),
        args=arguments,
        train_dataset=data.select(range(96)),
        eval_dataset=data.select(range(96, len(data))),
        processing_class=words,
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{arguments.output_dir}/final")
    tiny.show(trainer)


if __name__ == "__main__":
    main()
