"""Train with transformers' Trainer and a ds_config.json. The script does not import onefold.

deepspeed --num_gpus 2 trainer.py --deepspeed ds_zero3.json --output_dir out --max_steps 20
"""

from __future__ import annotations

from pathlib import Path

import tiny
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    words = tiny.tokenizer()
    data = tiny.examples(words)
    trainer = Trainer(
        model_init=lambda: tiny.model(words),
        args=arguments,
        train_dataset=data[:96],
        eval_dataset=data[96:],
    )
    last = any(Path(arguments.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=last or None)
    trainer.save_model(f"{arguments.output_dir}/final")
    tiny.show(trainer)


if __name__ == "__main__":
    main()
