"""The options of `onefold train`, and the config that it trains with. No torch here: `--help` is instant."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

SHIPPED_CONFIG = Path(__file__).with_name("config.json")
PRESET_NAMES = ("tiny", "small", "25m", "120m", "1.3b")
# What the job fills in where a config says nothing.
MICRO_BATCH_SIZE = 4
LEARNING_RATE = 2e-3
# The same for a model of transformers: one that has learnt already is moved gently.
ADAPTER_RATE, MODEL_RATE = 2e-4, 2e-5


@dataclass(frozen=True)
class TrainOptions:
    """The flags of `onefold train`, as each rank reads them."""

    config: str | None = None
    stage: int | None = None
    steps: int = 300
    preset: str = "small"
    model: str | None = None
    sequence_length: int | None = None
    lora: int = 0
    out: str | None = None
    seed: int = 0
    data: tuple[str, ...] = ()
    prompt: str = "def "
    sample_length: int = 200
    save_16bit_model: bool = False
    save_every: int = 0
    resume: bool = False

    @property
    def folder(self) -> Path:
        """Where everything of this run goes."""
        return Path(self.out or default_out(self))

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> TrainOptions:
        given = {field.name: getattr(arguments, field.name) for field in fields(TrainOptions)}
        out, resume = arguments.resume or arguments.out, arguments.resume is not None
        return TrainOptions(**{**given, "data": tuple(arguments.data), "out": out, "resume": resume})

    def to_arguments(self) -> tuple[str, ...]:
        """The flags that give these options again: how the command hands them to its ranks."""
        flags = {
            **vars(self),
            "resume": self.out if self.resume else None,
            "save_16bit_model": None,
            "data": None,
            "lora": self.lora or None,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
        given += ["--save-16bit-model"] * self.save_16bit_model
        return (*given, *(("--data", *self.data) if self.data else ()))


def default_out(options: TrainOptions) -> str:
    """A new folder under runs/ for each run, named after when it started and what it was."""
    stage = "" if options.stage is None else f"-stage{options.stage}"
    name = options.preset if options.model is None else Path(options.model).stem
    return str(Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{name}{stage}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE", help="a DeepSpeed config (default: the one shipped with onefold: stage 3, AdamW)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="in place of the config's zero_optimization.stage")
    add("--steps", type=_at_least_one, default=TrainOptions.steps, metavar="N",
        help="optimizer steps (default: %(default)s)")  # fmt: skip
    add("--preset", choices=PRESET_NAMES, default=TrainOptions.preset, help="size of the GPT (default: %(default)s)")
    add("--model", metavar="PATH",
        help="in place of the GPT a causal language model of transformers: a folder with its weights, config and "
        "tokenizer, or a config.json to start from nothing; nothing is downloaded")  # fmt: skip
    add("--lora", type=_at_least_one, nargs="?", const=16, default=0, metavar="RANK",
        help="with --model: train a LoRA adapter of this rank and leave the model as it is (rank without a number: "
        "%(const)s)")  # fmt: skip
    add("--sequence-length", type=_at_least_one, metavar="N",
        help="with --model: tokens a sequence (default: 512, or all positions that the model knows)")  # fmt: skip
    add(
        "--out",
        metavar="FOLDER",
        help="where record, page, plot, metrics and summary go (default: a new folder under runs/)",
    )
    add("--seed", type=_not_negative, default=0, metavar="N", help="of weights, data and sample (default: %(default)s)")
    add("--data", nargs="+", default=[], metavar="PATH",
        help="text files or folders (default: the Python standard library's own source); with --model also lines of "
        "JSON (.jsonl) with text, with prompt and completion, or with messages")  # fmt: skip
    add("--prompt", default="def ", metavar="TEXT", help="what the sample at the end continues (default: %(default)r)")
    add("--save-16bit-model", "--zero3_save_16bit_model", dest="save_16bit_model", action="store_true",
        help="write the trained weights, whole, as model.safetensors beside the summary; with --model as a folder that "
        "from_pretrained loads, with --lora the adapter alone")  # fmt: skip
    add("--save-every", type=_not_negative, default=0, metavar="N",
        help="save a checkpoint every N steps, and at the end, in OUT/checkpoints; ranks that are started again go on "
        "from the last one (default: none)")  # fmt: skip
    add("--resume", metavar="FOLDER",
        help="go on with the run in this folder from its last checkpoint, on any number of ranks and in any stage, up "
        "to --steps in all")  # fmt: skip
    add("--sample-length", type=_not_negative, default=200, metavar="N",
        help="bytes of sample, or tokens with --model (default: %(default)s)")  # fmt: skip


@dataclass(frozen=True)
class PreparedConfig:
    """A config that the job can run, and what was done to it, a line each."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def prepare_config(options: TrainOptions, *, on_gpus: bool) -> PreparedConfig:
    """The user's config, or the shipped one, with the flags in it and its gaps filled."""
    from onefold.config import ConfigError, load_config

    if options.model is not None and options.preset != TrainOptions.preset:
        raise ConfigError("--preset is the size of the built-in GPT; with --model the model's own config says its size")
    for flag in ("lora", "sequence_length"):
        if options.model is None and getattr(options, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} is for a model of transformers: give --model PATH too")
    given = load_config(options.config or SHIPPED_CONFIG)
    document: dict[str, Any] = copy.deepcopy(dict(given.raw))
    notes: list[str] = []
    learning_rate = LEARNING_RATE if options.model is None else ADAPTER_RATE if options.lora else MODEL_RATE
    if options.config is None:
        _set_parameter(document, "optimizer", "lr", learning_rate)
    if options.config is None and on_gpus:
        document["bf16"] = {"enabled": True}
    if options.stage is not None:
        document.pop("zero_optimization.stage", None)
        zero = document.get("zero_optimization")
        document["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": options.stage}
    if given.train_batch_size is None and given.train_micro_batch_size_per_gpu is None:
        document["train_micro_batch_size_per_gpu"] = MICRO_BATCH_SIZE
        notes.append(f"train_micro_batch_size_per_gpu = {MICRO_BATCH_SIZE}")
    if given.optimizer is None or not given.optimizer.type:
        document["optimizer"] = {"type": "AdamW", "params": {"lr": learning_rate}}
        notes.append(f"optimizer = AdamW with lr {learning_rate:g}")
    elif "lr" not in given.optimizer.params:
        _set_parameter(document, "optimizer", "lr", learning_rate)
        notes.append(f"optimizer.params.lr = {learning_rate:g}")
    if given.scheduler is not None and given.scheduler.type.startswith("Warmup"):
        counts = {"warmup_num_steps": max(2, options.steps // 10)}
        if given.scheduler.type != "WarmupLR":
            counts["total_num_steps"] = max(options.steps, counts["warmup_num_steps"] + 1)
        for name, value in counts.items():
            if name not in given.scheduler.params:
                _set_parameter(document, "scheduler", name, value)
                if options.config is not None:
                    notes.append(f"scheduler.params.{name} = {value}")
    line = (f"the config leaves these open, filled in: {', '.join(notes)}",) if notes else ()
    return PreparedConfig(document, line)


def _set_parameter(document: dict[str, Any], section: str, name: str, value: float) -> None:
    inner = document[section]
    document[section] = {**inner, "params": {**(inner.get("params") or {}), name: value}}


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value
