"""Model, tokenizer and data of the scripts in this folder.

The model is a small Llama built from its config, and the tokenizer is trained at the start. Nothing is downloaded.
`python tiny.py FOLDER` saves both.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

ANIMALS = ["cat", "dog", "horse", "mouse", "owl", "fox"]
VERBS = ["sleeps", "runs", "eats", "waits", "sings"]
PLACES = ["at home", "in the garden", "under a tree", "near the river"]
SENTENCES = [f"the {animal} {verb} {place}" for animal in ANIMALS for verb in VERBS for place in PLACES]


def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(models.WordLevel(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<bos>", "<eos>"]
    model.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=special))
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def model(words: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a new model, or the one in the folder in the environment variable MODEL."""
    if "MODEL" in os.environ:
        return AutoModelForCausalLM.from_pretrained(os.environ["MODEL"])
    return AutoModelForCausalLM.from_config(llama(words))


def model_in_4_bits() -> PreTrainedModel:
    """Load the model from the folder in MODEL. bitsandbytes quantizes its linear layers, which are frozen."""
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    if "MODEL" not in os.environ:
        raise SystemExit(
            "Weights are quantized while they are loaded. Run `python tiny.py base`, then this script with MODEL=base."
        )
    return AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], quantization_config=quantized)


def llama(words: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the config of a Llama with 85 thousand parameters."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=len(words),
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )


def examples(words: PreTrainedTokenizerFast) -> list[dict[str, torch.Tensor]]:
    """Return the tokens of each sentence, which are also its labels."""
    ids = [torch.tensor([*words(text)["input_ids"], words.eos_token_id]) for text in SENTENCES]
    longest = max(map(len, ids))
    rows = [torch.nn.functional.pad(row, (0, longest - len(row)), value=words.pad_token_id) for row in ids]
    return [{"input_ids": row, "labels": row.masked_fill(row == words.pad_token_id, -100)} for row in rows]


def show(trainer: Any) -> None:
    """Print the losses of a Trainer as one line of JSON, which tests compare."""
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        print(json.dumps({"losses": losses, "eval": evaluated}), flush=True)


if __name__ == "__main__":
    torch.manual_seed(5)
    model(tokenizer()).save_pretrained(sys.argv[1])
    tokenizer().save_pretrained(sys.argv[1])
