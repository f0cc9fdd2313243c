"""Fine-tune a model of transformers in `onefold train`, from a folder or a config, whole or with LoRA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint.state.weights import consolidate
from onefold.config import load_config
from onefold.engine import Engine
from onefold.tools.train.data import Batch, DataError, files_of
from onefold.tools.train.options import TrainOptions
from onefold.tools.train.rows import is_rows
from onefold.tools.train.tokens import NOT_PREDICTED, Row, Rows, SequenceSource, Tokens, Windows

SEQUENCE_LENGTH = 512
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class HuggingFaceTask:
    """A causal language model, trained on windows of text or on lines of JSON."""

    unit = "token"

    def __init__(self, options: TrainOptions) -> None:
        assert options.model is not None
        # transformers must know of stage 3 when it is first imported, to load weights into shards module by module.
        onefold.register_as_deepspeed()
        self._options, self._path = options, Path(options.model)
        self._settings = _settings(self._path)
        longest = getattr(self._settings, "max_position_embeddings", None) or SEQUENCE_LENGTH
        self.sequence_length = options.sequence_length or min(SEQUENCE_LENGTH, longest)
        if self.sequence_length > longest:
            raise DataError(f"--sequence-length {self.sequence_length} exceeds the {longest} positions of {self._path}")
        if self.sequence_length < 2:
            raise DataError("--sequence-length 1: a single token has no target. Give at least 2.")
        if self._path.is_dir() and not _has_weights(self._path):
            raise DataError(
                f"--model {self._path}: the folder has no weights (*.safetensors). To start from random weights, "
                "give its config.json; the tokenizer next to it is used."
            )
        if options.adapter_rank and not _has_weights(self._path):
            raise DataError(
                f"{options.describe_adapter()}: --model {self._path} has no weights. An adapter is trained on the "
                "weights of a model, which it needs again when it is used. Give a folder with weights, or train all "
                "weights without --lora and --qlora."
            )
        self._tokens = _tokenizer(self._path, self._settings)
        files, held_out = ([str(file) for path in paths for file in files_of(Path(path))]
                           for paths in (options.data, options.eval_data))  # fmt: skip
        rows = [file for file in files if is_rows(file)]
        if rows and len(rows) < len(files):
            raise DataError("--data mixes rows (.jsonl, .json, .parquet) and text. Give one of them.")
        if held_out and not (rows and all(map(is_rows, held_out))):
            raise DataError("--eval-data needs rows (.jsonl, .json, .parquet) in --data and --eval-data")
        sequences = self._tokens, self.sequence_length, options.seed
        self._source: SequenceSource = Rows(rows, *sequences, held_out) if rows else Windows(options.data, *sequences)
        self.data, self.num_rows, self.row_formats = self._source.name, self._source.num_train, self._source.formats
        lora = f", {options.describe_adapter()}" if options.adapter_rank else ""
        self.name = f"{(self._settings.architectures or [self._settings.model_type])[0]} of {self._path}{lora}"

    def describe_data(self) -> str:
        return f"{self._source.describe()}; {self._tokens.describe()}, at most {self.sequence_length} per sequence"

    def build(self, config: dict[str, Any], *, sharded: bool) -> nn.Module:
        from transformers import AutoModelForCausalLM

        _only_first_rank_talks()
        with ExitStack() as stack:
            if not _has_weights(self._path):
                stack.enter_context(onefold.zero.Init(config_dict_or_path=config, enabled=sharded))
                model = AutoModelForCausalLM.from_config(self._settings)
            else:
                if sharded:
                    from transformers.integrations.deepspeed import HfDeepSpeedConfig

                    alive = HfDeepSpeedConfig(config)  # transformers looks it up while it loads
                    stack.callback(lambda: alive)
                model = AutoModelForCausalLM.from_pretrained(self._path, **self._quantization(config))
        if self._options.adapter_rank:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(r=self._options.adapter_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapter)
        return model  # type: ignore[no-any-return]

    def _quantization(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the argument of `from_pretrained` for 4-bit weights, with --qlora."""
        if not self._options.qlora or getattr(self._settings, "quantization_config", None) is not None:
            return {}  # a model whose files are quantized keeps its format
        from transformers import BitsAndBytesConfig

        # 16-bit products if the run trains in bf16 or fp16.
        settings = load_config(config)
        dtype = torch.bfloat16 if settings.bf16.enabled else torch.float16 if settings.fp16.enabled else torch.float32
        return {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            ),
            "dtype": dtype,
        }

    def train_batch(self, first: int, batch_size: int) -> Batch:
        return self._pad(self._source.train_rows(first, batch_size))

    def held_out_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Batch, int]]:
        for rows, num_rows in self._source.held_out_rows(rank, world_size, batch_size):
            yield self._pad(rows), num_rows

    def _pad(self, rows: Sequence[Row]) -> Batch:
        longest = max(len(tokens) for tokens, _ in rows)
        batch = torch.full((2, len(rows), longest), NOT_PREDICTED)
        for index, (tokens, labels) in enumerate(rows):
            batch[0, index, : len(tokens)] = torch.tensor(tokens)
            batch[1, index, : len(labels)] = torch.tensor(labels)
        # Padding is at the end and has no targets, so the token does not matter.
        return batch[0].masked_fill(batch[0] == NOT_PREDICTED, self._tokens.end), batch[1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1], use_cache=False).loss
        return loss

    def sample(self, model: nn.Module, device: torch.device) -> str:
        prompt = torch.tensor([self._tokens.encode(self._options.prompt) or [self._tokens.end]], device=device)
        torch.manual_seed(self._options.seed)
        num = min(self._options.sample_length, max(self.sequence_length - prompt.shape[1], 1))
        written = model.generate(
            prompt, max_new_tokens=num, do_sample=True, temperature=0.7, pad_token_id=self._tokens.end
        )  # type: ignore[operator]
        return self._tokens.decode(written[0].tolist())

    def save_weights(self, engine: Engine, folder: Path) -> str:
        model: Any = engine.module
        place = folder / ("adapter" if self._options.adapter_rank else "model")
        weights = consolidate(model, exclude_frozen=bool(self._options.adapter_rank))
        if weights is not None:
            model.save_pretrained(place, state_dict=weights)
            self._tokens.save(place)
        if not self._options.adapter_rank:
            load = f"AutoModelForCausalLM.from_pretrained({str(place)!r})"
            return f"the trained model is in {place}; load it with\n  transformers.{load}"
        base = f"AutoModelForCausalLM.from_pretrained({str(self._path)!r})"
        return (
            f"the trained adapter is in {place}; load it with\n"
            f"  peft.PeftModel.from_pretrained(transformers.{base}, {str(place)!r})\n"
            f"merge it into the model with onefold merge {folder}; chat with it with onefold chat {folder}"
        )


def _settings(path: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise DataError(f"--model needs transformers: pip install 'onefold[huggingface]' ({error})") from error
    if not path.exists():
        raise DataError(f"--model {path}: no such file or folder (nothing is downloaded)")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--model {path}: not a config of a model that transformers supports: {error}") from error


def _tokenizer(path: Path, settings: Any) -> Tokens:
    """Return the tokenizer next to the model's config.json, or bytes as tokens."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    folder = path if path.is_dir() else path.parent
    if any((folder / name).exists() for name in names):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else settings.eos_token_id
        end = end[0] if isinstance(end, list) else end
        if end is None:
            raise DataError(f"--model {path}: neither its tokenizer nor its config has an end-of-sequence token")
        return Tokens(tokenizer, end)
    if settings.vocab_size < 256:
        raise DataError(
            f"--model {path}: no tokenizer next to the config, and {settings.vocab_size} tokens are too few for bytes"
        )
    return Tokens(None, 0)


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) for pattern in WEIGHTS)


def _only_first_rank_talks() -> None:
    from transformers.utils import logging

    if os.environ.get("RANK", "0") != "0":
        logging.set_verbosity_error()
        logging.disable_progress_bar()
