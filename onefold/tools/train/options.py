"""Options of `onefold train`, and the config it trains with. No torch is imported, so `--help` is instant."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onefold.storage.object_path import StorageError
from onefold.storage.place import absolute, local_path, place

SHIPPED_CONFIG = Path(__file__).with_name("config.json")
PRESET_NAMES = ("tiny", "small", "25m", "120m", "1.3b")
# Defaults for values that a config does not have.
MICRO_BATCH_SIZE = 4
LEARNING_RATE = 2e-3
# Learning rates for a pretrained model.
ADAPTER_RATE, MODEL_RATE = 2e-4, 2e-5
LORA_RANK = 16

CHECKPOINTS = "checkpoints"
SETTINGS, GIVEN_CONFIG = "settings.json", "ds_config.json"
# Options that a resumed run may not change.
KEPT = ("preset", "model", "data", "lora", "sequence_length", "seed", "checkpoints")


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
    bf16: bool = False
    eval_every: int = 0

    @property
    def folder(self) -> Path:
        """The folder of all results of this run."""
        return Path(self.out or default_out(self))

    @property
    def checkpoint_place(self) -> str:
        """The folder or the URL of the checkpoints of this run."""
        return self.checkpoints or str(self.folder / CHECKPOINTS)

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> TrainOptions:
        """Return the options of parsed flags. A resumed run has all others from its folder."""
        names = {field.name for field in fields(TrainOptions)}
        given = {name: value for name, value in vars(arguments).items() if name in names}
        if "data" in given:
            given["data"] = tuple(given["data"])
        if "resume" in given:
            return _resumed(given.pop("resume"), given)
        return TrainOptions(**given)

    def to_arguments(self) -> tuple[str, ...]:
        """Return the flags of these options, with which the ranks are started."""
        flags = {
            **vars(self),
            **dict.fromkeys(("data", "save", "bf16"), None),
            "resume": self.out if self.resume else None,
            "lora": self.lora or None,
            "steps": self.steps if self.epochs is None else None,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
        given += ["--bf16"] * self.bf16 + ["--no-save"] * (not self.save)
        return (*given, *(("--data", *self.data) if self.data else ()))


def default_out(options: TrainOptions) -> str:
    """Return a new folder under runs/, named after the time and the model."""
    stage = "" if options.stage is None else f"-stage{options.stage}"
    name = options.preset if options.model is None else Path(options.model).stem
    return str(Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{name}{stage}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags without defaults, because a resumed run takes missing ones from its record."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    default = TrainOptions()
    add("--model", metavar="PATH",
        help="a causal language model of Hugging Face: a folder with its weights, config and tokenizer, or a "
        "config.json to start from random weights; nothing is downloaded (default: the built-in GPT)")  # fmt: skip
    add("--data", nargs="+", metavar="PATH",
        help="text files or folders (default: the source of Python's standard library); with --model also rows of "
        "JSON (.jsonl)")  # fmt: skip
    add("--lora", type=at_least_one, nargs="?", const=LORA_RANK, metavar="RANK",
        help=f"with --model: train a LoRA adapter of this rank (default rank: {LORA_RANK}) and freeze the "
        "model")  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=at_least_one, default=argparse.SUPPRESS, metavar="N",
        help=f"optimizer steps (default: {default.steps})")  # fmt: skip
    length.add_argument("--epochs", type=above_zero, default=argparse.SUPPRESS, metavar="N",
        help="instead of --steps: number of passes over the rows of JSON, e.g. 3 or 0.5")  # fmt: skip
    add("--lr", type=above_zero, metavar="RATE",
        help=f"learning rate, overrides the config (default: {ADAPTER_RATE:g} with --lora, {MODEL_RATE:g} with "
        f"--model, {LEARNING_RATE:g} for the GPT)")  # fmt: skip
    add("--batch", type=at_least_one, metavar="N",
        help=f"sequences per micro-batch and rank, overrides the config (default: {MICRO_BATCH_SIZE})")  # fmt: skip
    add("--accumulation", type=at_least_one, metavar="N",
        help="micro-batches per step, overrides the config (default: 1)")  # fmt: skip
    add("--sequence-length", type=at_least_one, metavar="N",
        help="with --model: tokens per sequence (default: 512, or the model's limit if it is lower)")  # fmt: skip
    add("--bf16", action="store_true", help="train in bf16 (default: on GPUs, unless a config is given)")
    add("--config", metavar="FILE", help="DeepSpeed config (default: the one shipped with onefold: stage 3, AdamW)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage, overrides zero_optimization.stage")
    add("--preset", choices=PRESET_NAMES,
        help=f"size of the GPT; tiny has 1.0M parameters, small 1.3M (default: {default.preset})")  # fmt: skip
    add("--out", metavar="FOLDER",
        help="folder for weights, record, page, plot, metrics and summary (default: a new one in runs/)")  # fmt: skip
    add("--seed", type=not_negative, metavar="N", help=f"seed of weights, data and sample (default: {default.seed})")
    add("--eval-every", type=not_negative, metavar="N",
        help="compute the held-out loss every N steps (default: at the end only)")  # fmt: skip
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


# -- settings of a run -----------------------------------------------------------------------------------------------


def write_settings(options: TrainOptions) -> None:
    """Write the options and the given config into the folder of the run, for `--resume`."""
    from onefold.config import load_config

    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: _comparable(name, value) for name, value in asdict(options).items()}
    if options.config is not None:
        given = folder / GIVEN_CONFIG
        if not given.exists() or not given.samefile(options.config):
            _replace(given, load_config(options.config).raw)
        kept["config"] = GIVEN_CONFIG
    del kept["out"], kept["resume"], kept["epochs"]
    _replace(folder / SETTINGS, kept)


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=2) + "\n")
    part.replace(path)


def _resumed(folder: str, given: dict[str, Any]) -> TrainOptions:
    """Merge the recorded options of a run with the given ones. Raise if they contradict each other."""
    recorded = _read_settings(Path(folder))
    if given.pop("out", folder) != folder:
        raise OptionError(f"--resume {folder}: a resumed run writes to its own folder. Leave out --out.")
    for name in KEPT:
        then, now = (_comparable(name, options.get(name, getattr(TrainOptions, name))) for options in (recorded, given))
        if name in given and then != now:
            flag = f"--{name.replace('_', '-')}"
            if not then and name != "seed":
                raise OptionError(f"--resume {folder}: the run does not use {flag}. Leave it out.")
            words = f"{flag} {' '.join(then) if isinstance(then, tuple) else then}"
            raise OptionError(f"--resume {folder}: the run uses {words}. Leave {flag} out, or give {words}.")
    recorded |= {"data": tuple(recorded.get("data", ())), "resume": True, "out": folder}
    if recorded.get("config") is not None:
        recorded["config"] = str(Path(folder, recorded["config"]))
    return TrainOptions(**{**recorded, **given})


def _read_settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise OptionError(f"--resume {folder}: no such folder")
    path = folder / SETTINGS
    if not path.is_file():
        raise OptionError(f"--resume {folder}: not a folder of `onefold train`, because {SETTINGS} is missing")
    try:
        recorded = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise OptionError(f"--resume {folder}: {path} cannot be read ({error})") from error
    unknown = set(recorded) - {field.name for field in fields(TrainOptions)} if isinstance(recorded, dict) else {"?"}
    if unknown:
        raise OptionError(f"--resume {folder}: {path} has unknown settings: {', '.join(unknown)}")
    checkpoints = folder / CHECKPOINTS
    if recorded.get("checkpoints") is not None:  # the load finds whether they exist
        return dict(recorded)
    if not checkpoints.is_dir() or not any(entry.is_dir() for entry in checkpoints.iterdir()):
        raise OptionError(f"--resume {folder}: no checkpoint in {checkpoints}. Run with --save-every N to save some.")
    return dict(recorded)


def _comparable(name: str, value: Any) -> Any:
    if name == "data":
        return tuple(os.path.abspath(path) for path in value)
    if name == "checkpoints":
        return value and str(absolute(place(value)))
    return os.path.abspath(value) if name == "model" and value is not None else value


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
    for path in options.data:
        if not Path(path).exists():
            raise OptionError(f"--data {path}: no such file or folder")
    if options.model is None:
        return
    if not Path(options.model).exists():
        raise OptionError(f"--model {options.model}: no such file or folder (nothing is downloaded)")
    if not Path(options.model).is_file() and not Path(options.model).is_dir():
        raise OptionError(f"--model {options.model}: neither a folder nor a file")
    for package in ("transformers", *(["peft"] if options.lora else [])):
        if find_spec(package) is None:
            raise OptionError(f"--model needs {package}, which is missing. Run pip install 'onefold[huggingface]'.")


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
    for flag in ("lora", "sequence_length", "epochs"):
        if options.model is None and getattr(options, flag):
            raise OptionError(f"--{flag.replace('_', '-')} is for a Hugging Face model. Give --model PATH, too.")
    given = load_config(options.config or SHIPPED_CONFIG)
    document: dict[str, Any] = copy.deepcopy(dict(given.raw))
    notes: list[str] = []
    learning_rate = LEARNING_RATE if options.model is None else ADAPTER_RATE if options.lora else MODEL_RATE
    learning_rate = options.lr or learning_rate
    if options.config is None or (options.lr is not None and given.optimizer is not None and given.optimizer.type):
        _set_parameter(document, "optimizer", "lr", learning_rate)
    if options.config is None and on_gpus:
        document["bf16"] = {"enabled": True}
    if options.stage is not None:
        document.pop("zero_optimization.stage", None)
        zero = document.get("zero_optimization")
        document["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": options.stage}
    if options.bf16:
        document["bf16"] = {"enabled": True}
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
