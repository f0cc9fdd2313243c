"""Options of `onefold train`, and the config it trains with. No torch is imported, so `--help` is instant."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onefold.storage.object_path import StorageError
from onefold.storage.place import local_path, place

SHIPPED_CONFIG = Path(__file__).with_name("config.json")
PRESET_NAMES = ("tiny", "small", "25m", "120m", "1.3b")
# Defaults for values that a config does not have.
MICRO_BATCH_SIZE = 4
LEARNING_RATE = 2e-3
# Learning rates for a pretrained model.
ADAPTER_RATE, MODEL_RATE = 2e-4, 2e-5
LORA_RANK = 16
# Schedulers whose learning rates do not follow from that of the optimizer, and their keys.
_RATES_OF_SCHEDULERS = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "LRRangeTest": ("lr_range_test_min_lr",),
    "OneCycleLR": ("max_lr",),
    "CyclicLR": ("base_lr", "max_lr"),
}

CHECKPOINTS, SUMMARY = "checkpoints", "summary.json"
PRECISIONS = ("bf16", "fp16", "fp32")


class OptionError(ValueError):
    """Options contradict each other, or name missing files."""


@dataclass(frozen=True)
class TrainOptions:
    """The options of `onefold train`, as each rank reads them."""

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
    save: bool = True
    save_every: int = 0
    checkpoints: str | None = None
    resume: bool = False
    epochs: float | None = None
    lr: float | None = None
    batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    eval_every: int = 0
    eval_data: tuple[str, ...] = ()
    qlora: int = 0

    @property
    def folder(self) -> Path:
        """The folder of all results of this run."""
        return Path(self.out or default_out(self))

    @property
    def checkpoint_place(self) -> str:
        """The folder or the URL of the checkpoints of this run."""
        return self.checkpoints or str(self.folder / CHECKPOINTS)

    @property
    def adapter_rank(self) -> int:
        """The rank of the adapter, or 0 if all weights are trained."""
        return self.lora or self.qlora

    def describe_adapter(self) -> str:
        """Describe the adapter."""
        return f"{'QLoRA' if self.qlora else 'LoRA'} of rank {self.adapter_rank}"

    def to_arguments(self) -> tuple[str, ...]:
        """Return the flags of these options, with which the ranks are started."""
        flags = {
            **vars(self),
            **dict.fromkeys(("data", "eval_data", "save"), None),
            "resume": self.out if self.resume else None,
            "lora": self.lora or None,
            "qlora": self.qlora or None,
            "steps": self.steps if self.epochs is None else None,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
        given += ["--no-save"] * (not self.save)
        for flag, paths in (("--data", self.data), ("--eval-data", self.eval_data)):
            given += [flag, *paths] if paths else []
        return tuple(given)


def default_out(options: TrainOptions) -> str:
    """Return a new folder under runs/, named after the time and the model."""
    stage = "" if options.stage is None else f"-stage{options.stage}"
    name = options.preset if options.model is None else Path(options.model).stem
    return str(Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{name}{stage}"))


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command that starts the ranks."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--ranks", type=at_least_one, metavar="N", help="number of processes (default: one per GPU, or 2 without GPUs)")
    add("--max-restarts", type=not_negative, metavar="N",
        help="restart all ranks after a failure, at most N times; with --save-every they continue from the last "
        "checkpoint")  # fmt: skip


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe."""
    parser.add_argument("recipe", nargs="?", default=argparse.SUPPRESS, metavar="RECIPE",
        help="YAML file whose keys are the flags below, without --")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags without defaults, because a resumed run takes missing ones from its recipe."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    default = TrainOptions()
    add("--model", metavar="PATH",
        help="a causal language model of Hugging Face: a folder with its weights, config and tokenizer, or a "
        "config.json to start from random weights; nothing is downloaded (default: the built-in GPT)")  # fmt: skip
    add("--data", nargs="+", metavar="PATH",
        help="text files or folders (default: the source of Python's standard library); with --model also rows: "
        ".jsonl, .json with an array, .parquet")  # fmt: skip
    adapter = parser.add_mutually_exclusive_group()
    for name, what in (("lora", "and freeze the model"), ("qlora", "on the model with frozen 4-bit weights")):
        adapter.add_argument(f"--{name}", type=at_least_one, nargs="?", const=LORA_RANK, default=argparse.SUPPRESS,
            metavar="RANK",
            help=f"with --model: train a LoRA adapter of this rank (default rank: {LORA_RANK}) {what}")  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=at_least_one, default=argparse.SUPPRESS, metavar="N",
        help=f"optimizer steps (default: {default.steps})")  # fmt: skip
    length.add_argument("--epochs", type=above_zero, default=argparse.SUPPRESS, metavar="N",
        help="instead of --steps: number of passes over the rows, e.g. 3 or 0.5")  # fmt: skip
    add("--lr", type=above_zero, metavar="RATE",
        help="learning rate, overrides the config and a resumed run (default: "
        f"{ADAPTER_RATE:g} with --lora, {MODEL_RATE:g} with --model, {LEARNING_RATE:g} for the GPT)")  # fmt: skip
    add("--batch", type=at_least_one, metavar="N",
        help=f"sequences per micro-batch and rank, overrides the config (default: {MICRO_BATCH_SIZE})")  # fmt: skip
    add("--accumulation", type=at_least_one, metavar="N",
        help="micro-batches per step, overrides the config (default: 1)")  # fmt: skip
    add("--sequence-length", type=at_least_one, metavar="N",
        help="with --model: tokens per sequence (default: 512, or the model's limit if it is lower)")  # fmt: skip
    add("--precision", choices=PRECISIONS,
        help="overrides the config (default: bf16 on GPUs unless a config is given, otherwise fp32)")  # fmt: skip
    add("--bf16", dest="precision", action="store_const", const="bf16", help=argparse.SUPPRESS)
    add("--config", metavar="FILE", help="DeepSpeed config (default: the one shipped with onefold: stage 3, AdamW)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage, overrides zero_optimization.stage")
    add("--preset", choices=PRESET_NAMES,
        help=f"size of the GPT; tiny has 1.0M parameters, small 1.3M (default: {default.preset})")  # fmt: skip
    add("--out", metavar="FOLDER",
        help="folder for weights, record, page, plot, metrics and summary (default: a new one in runs/)")  # fmt: skip
    add("--seed", type=not_negative, metavar="N", help=f"seed of weights, data and sample (default: {default.seed})")
    add("--eval-every", type=not_negative, metavar="N",
        help="compute the held-out loss every N steps (default: at the end only)")  # fmt: skip
    add("--eval-data", nargs="+", metavar="PATH",
        help="rows for the held-out loss, all of which are evaluated (default: 64 of the last twentieth of "
        "--data)")  # fmt: skip
    saved = parser.add_mutually_exclusive_group()
    saved.add_argument("--no-save", dest="save", action="store_false", default=argparse.SUPPRESS,
        help="do not write the trained weights (default: into OUT/adapter with --lora, else OUT/model)")  # fmt: skip
    saved.add_argument("--save-16bit-model", "--zero3_save_16bit_model", dest="save", action="store_true",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    add("--save-every", type=not_negative, metavar="N",
        help="save a checkpoint every N steps, and at the end, in OUT/checkpoints, for --resume and --max-restarts "
        "(default: none)")  # fmt: skip
    add("--checkpoints", metavar="PLACE",
        help="folder, or URL such as s3://bucket/run, for the checkpoints instead of OUT/checkpoints")  # fmt: skip
    add("--resume", metavar="FOLDER",
        help="continue the run in this folder from its last checkpoint, with its model, data and settings, on any "
        "number of ranks and in any stage, up to --steps in total")  # fmt: skip
    add("--prompt", metavar="TEXT", help=f"prompt of the generated sample (default: {default.prompt!r})")
    add("--sample-length", type=not_negative, metavar="N",
        help=f"length of the sample in bytes, or tokens with --model (default: {default.sample_length})")  # fmt: skip


# -- checks, and the config --------------------------------------------------------------------------------------------


def check_inputs(options: TrainOptions) -> None:
    """Raise OptionError for missing files and contradictions that can be found without torch."""
    prepare_config(options, on_gpus=False)
    try:
        local_path(options.out or "", "--out")
        place(options.checkpoints or "")
    except StorageError as error:
        raise OptionError(f"{error}. Give a URL as --checkpoints.") from None
    if options.out is not None and Path(options.out).exists() and not Path(options.out).is_dir():
        raise OptionError(f"--out {options.out}: not a folder")
    for flag, paths in (("--data", options.data), ("--eval-data", options.eval_data)):
        for path in paths:
            if not Path(path).exists():
                raise OptionError(f"{flag} {path}: no such file or folder")
    if options.model is None:
        return
    if not Path(options.model).exists():
        raise OptionError(f"--model {options.model}: no such file or folder (nothing is downloaded)")
    if not Path(options.model).is_file() and not Path(options.model).is_dir():
        raise OptionError(f"--model {options.model}: neither a folder nor a file")
    for package in ("transformers", *(["peft"] if options.adapter_rank else [])):
        if find_spec(package) is None:
            raise OptionError(f"--model needs {package}, which is missing. Run pip install 'onefold[huggingface]'.")
    if options.qlora and find_spec("bitsandbytes") is None:
        raise OptionError(
            "--qlora needs bitsandbytes, which is missing. Run pip install bitsandbytes, or use --lora, which keeps "
            "the weights of the model in 16 or 32 bits."
        )


@dataclass(frozen=True)
class PreparedConfig:
    """A complete config, and notes about what was filled in."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def prepare_config(options: TrainOptions, *, on_gpus: bool) -> PreparedConfig:
    """Return the given config, or the default one, with the flags applied and missing values filled in."""
    from onefold.config import load_config

    if options.model is not None and options.preset != TrainOptions.preset:
        raise OptionError("--preset is for the built-in GPT. Leave it out with --model.")
    for flag in ("lora", "qlora", "sequence_length", "epochs", "eval_data"):
        if options.model is None and getattr(options, flag):
            raise OptionError(f"--{flag.replace('_', '-')} is for a Hugging Face model. Give --model PATH, too.")
    given = load_config(options.config or SHIPPED_CONFIG)
    document: dict[str, Any] = copy.deepcopy(dict(given.raw))
    notes: list[str] = []
    learning_rate = LEARNING_RATE if options.model is None else ADAPTER_RATE if options.adapter_rank else MODEL_RATE
    learning_rate = options.lr or learning_rate
    if options.config is None or (options.lr is not None and given.optimizer is not None and given.optimizer.type):
        _set_parameter(document, "optimizer", "lr", learning_rate)
    if options.lr is not None:
        _set_maximum_rate(document, given, options.lr)
    precision = options.precision or ("bf16" if options.config is None and on_gpus else None)
    if precision is not None:
        _set_precision(document, precision)
    if options.stage is not None:
        document.pop("zero_optimization.stage", None)
        zero = document.get("zero_optimization")
        document["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": options.stage}
    keeps_batch = given.train_batch_size is not None and options.accumulation is None
    if options.accumulation is not None:
        document["gradient_accumulation_steps"] = options.accumulation
        document.pop("train_batch_size", None)
    if options.batch is not None:
        document["train_micro_batch_size_per_gpu"] = options.batch
        if keeps_batch:  # the accumulation follows from the global batch
            document.pop("gradient_accumulation_steps", None)
    elif not keeps_batch and given.train_micro_batch_size_per_gpu is None:
        document["train_micro_batch_size_per_gpu"] = MICRO_BATCH_SIZE
        notes.append(f"train_micro_batch_size_per_gpu = {MICRO_BATCH_SIZE}")
    if given.optimizer is None or not given.optimizer.type:
        document["optimizer"] = {"type": "AdamW", "params": {"lr": learning_rate}}
        notes.append(f"optimizer = AdamW with lr {learning_rate:g}")
    elif "lr" not in given.optimizer.params and options.lr is None:
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
    line = (f"defaults for missing keys: {', '.join(notes)}",) if notes else ()
    return PreparedConfig(document, line)


def _set_maximum_rate(document: dict[str, Any], config: Any, rate: float) -> None:
    """Replace the rate of a scheduler by --lr. Raise OptionError for keys of a config that override it."""
    optimizer = config.optimizer.params if config.optimizer is not None else {}
    scheduler = config.scheduler
    rates = [f"optimizer.params.{name}" for name in ("muon_lr", "adam_lr") if name in optimizer]
    if scheduler is not None and scheduler.type in _RATES_OF_SCHEDULERS:
        rates += [f"scheduler.params.{name}" for name in _RATES_OF_SCHEDULERS[scheduler.type]]
    if rates:
        raise OptionError(
            f"--lr {rate:g} has no effect, because the config has {' and '.join(rates)}. Leave out --lr, and change "
            "the config."
        )
    # Without the key, the maximum of WarmupDecayLR is a constant, and that of WarmupLR the rate of the optimizer.
    if scheduler is not None and (scheduler.type == "WarmupDecayLR" or "warmup_max_lr" in scheduler.params):
        _set_parameter(document, "scheduler", "warmup_max_lr", rate)


def _set_precision(document: dict[str, Any], precision: str) -> None:
    """Enable the section of a precision, and disable the other one."""
    document.pop("bfloat16", None)  # the alias of bf16
    for name in ("bf16", "fp16"):
        document.pop(f"{name}.enabled", None)
        section = document.get(name)
        if name == precision or section is not None:
            document[name] = {**(section if isinstance(section, Mapping) else {}), "enabled": name == precision}


def _set_parameter(document: dict[str, Any], section: str, name: str, value: float) -> None:
    inner = document[section]
    document[section] = {**inner, "params": {**(inner.get("params") or {}), name: value}}


# -- argument types --------------------------------------------------------------------------------------------------


def at_least_one(text: str) -> int:
    """Return an argument as a positive integer."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def not_negative(text: str) -> int:
    """Return an argument as an integer of at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def above_zero(text: str) -> float:
    """Return an argument as a positive number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
