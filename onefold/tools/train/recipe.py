"""Recipes of `onefold train`: YAML files whose keys are its flags. A run writes one, and `--resume` reads it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from onefold.storage.place import absolute, place, read_small
from onefold.tools.train.options import CHECKPOINTS, OptionError, TrainOptions, add_arguments, add_job_arguments

RECIPE, GIVEN_CONFIG = "recipe.yaml", "ds_config.json"
# Options that a resumed run may not change.
KEPT = ("preset", "model", "data", "eval_data", "lora", "qlora", "sequence_length", "seed", "checkpoints")
# Flags of which a command and its recipe may give one.
_EXCLUSIVE = ("steps", "epochs"), ("lora", "qlora")
# The keys for flags that the command accepts for other tools, and a recipe does not.
_INSTEAD = {"bf16": "precision", "save-16bit-model": "no-save", "zero3_save_16bit_model": "no-save"}


def options_of(arguments: argparse.Namespace) -> TrainOptions:
    """Return the options of parsed flags. A resumed run has all others from its folder."""
    given = _options_in(arguments)
    if "resume" in given:
        return _resumed(given.pop("resume"), given)
    return TrainOptions(**given)


def _options_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options among parsed flags."""
    names = {field.name for field in fields(TrainOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return given | {name: tuple(given[name]) for name in ("data", "eval_data") if name in given}


class _RecipeParser(argparse.ArgumentParser):
    """A parser that raises OptionError."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message.removeprefix('argument ')}")


def with_recipe(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return parsed flags with those of the recipe that they name. Flags of the command replace those of the recipe."""
    given = dict(vars(arguments))
    if "recipe" not in given:
        return arguments
    recipe = given.pop("recipe")
    if "resume" in given:
        raise OptionError(f"--resume {given['resume']} reads the recipe in its folder. Leave out {recipe}.")
    found = vars(read_recipe(Path(recipe)))
    for group in _EXCLUSIVE:
        if any(name in given for name in group):
            found = {name: value for name, value in found.items() if name not in group}
    return argparse.Namespace(**{**found, **given})


def read_recipe(path: Path) -> argparse.Namespace:
    """Return the flags of a recipe: a YAML file whose keys are flags. Paths of inputs are relative to its folder."""
    from onefold.config import ConfigError
    from onefold.config.config_files import parse_yaml

    try:
        document = parse_yaml(read_small(path, 1 << 20).decode(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"{path}: the recipe cannot be read ({text})") from error
    parser = _RecipeParser(prog=str(path), add_help=False, allow_abbrev=False)
    add_arguments(parser)
    add_job_arguments(parser)
    flags_of = {option.removeprefix("--"): each for each in parser._actions for option in each.option_strings}
    actions = {key: each for key, each in flags_of.items() if each.help != argparse.SUPPRESS and key != "resume"}
    flags: list[str] = []
    for key, value in document.items():
        action = actions.get(str(key))
        if action is None:
            near = [_INSTEAD[key]] if key in _INSTEAD else get_close_matches(str(key), actions, n=1)
            hint = f" Did you mean {near[0]}?" if near else " Keys are the flags of onefold train, without --."
            raise OptionError(f"{path}: {key} is not a key of a recipe.{hint}")
        flags += _flags_of(path, action, str(key), value)
    found = parser.parse_args(flags)
    for name in ("model", "data", "eval_data", "config"):
        if hasattr(found, name):
            here = getattr(found, name)
            inside = [str(path.parent / each) for each in ([here] if isinstance(here, str) else here)]
            setattr(found, name, inside[0] if isinstance(here, str) else inside)
    return found


def _flags_of(path: Path, action: argparse.Action, key: str, value: Any) -> list[str]:
    """Return the flags that a key of a recipe means."""
    if isinstance(value, bool) and (action.nargs == 0 or action.const is not None):
        return [f"--{key}"] * value
    if action.nargs == "+" and isinstance(value, list) and value:
        texts = [str(each) for each in value if isinstance(each, str | int | float) and not isinstance(each, bool)]
        if len(texts) == len(value):
            return [f"--{key}", *texts]
    if action.nargs == 0 or isinstance(value, bool) or not isinstance(value, str | int | float):
        wanted = "true or false" if action.nargs == 0 else "a list" if action.nargs == "+" else "one value"
        raise OptionError(f"{path}: {key} is {value!r}. Give {wanted}.")
    return [f"--{key}={value}"]


def write_recipe(options: TrainOptions) -> None:
    """Write the options and the given config into the folder of the run, as a recipe that `--resume` reads."""
    from onefold.config import load_config

    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.config is not None:
        given = folder / GIVEN_CONFIG
        if not given.exists() or not given.samefile(options.config):
            _replace(given, json.dumps(load_config(options.config).raw, indent=2) + "\n")
    kept: dict[str, Any] = {}
    left_out = ("out", "resume", *(["steps"] if options.epochs is not None else []))
    for name, value in vars(options).items():
        if value == getattr(TrainOptions, name) or name in left_out:
            continue
        comparable = GIVEN_CONFIG if name == "config" else _comparable(name, value)
        kept[name.replace("_", "-")] = list(comparable) if isinstance(comparable, tuple) else comparable
    if kept.pop("save", True) is False:
        kept["no-save"] = True
    head = "# Written by onefold train. To train so again: onefold train THIS_FILE\n"
    _replace(folder / RECIPE, head + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
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
    for group in _EXCLUSIVE:
        if any(name in given for name in group):
            recorded = {name: value for name, value in recorded.items() if name not in group}
    return TrainOptions(**{**recorded, "resume": True, "out": folder, **given})


def _read_settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise OptionError(f"--resume {folder}: no such folder")
    path = folder / RECIPE
    if not path.is_file():
        raise OptionError(f"--resume {folder}: not a folder of `onefold train`, because {RECIPE} is missing")
    try:
        recorded = _options_in(read_recipe(path))
    except OptionError as error:
        raise OptionError(f"--resume {folder}: {error}") from error
    checkpoints = folder / CHECKPOINTS
    if recorded.get("checkpoints") is not None:  # the load finds whether they exist
        return recorded
    if not checkpoints.is_dir() or not any(entry.is_dir() for entry in checkpoints.iterdir()):
        raise OptionError(f"--resume {folder}: no checkpoint in {checkpoints}. Run with --save-every N to save some.")
    return recorded


def _comparable(name: str, value: Any) -> Any:
    if name in ("data", "eval_data"):
        return tuple(os.path.abspath(path) for path in value)
    if name == "checkpoints":
        return value and str(absolute(place(value)))
    return os.path.abspath(value) if name == "model" and value is not None else value
