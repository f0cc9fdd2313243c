"""Errors for unknown keys and names, with the known name that the user probably means."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from onefold.config.keys import join, spellings
from onefold.config.params import OPTIMIZERS, SCHEDULES
from onefold.config.schema import Config
from onefold.errors import ConfigError

_FEW = 12  # Errors list the known keys of a section that has at most so many.
_MANY = 2  # A key that more sections have is not suggested as misplaced.
_NEAR = 0.8  # The similarity from which a top-level key counts as misspelled.
_LONG = 8  # Names of fewer letters are compared with top-level keys only.

# Hyperparameter names of other libraries, by the name here. The first match that the section has is suggested.
_MEANT = {
    "lr": ("learning_rate", "rate", "step_size", "eta", "learn_rate", "base_lr", "initial_lr"),
    "betas": ("beta", "beta1", "beta2", "beta_1", "beta_2", "adam_beta1", "adam_beta2", "b1", "b2", "momentum"),
    "eps": ("epsilon", "adam_epsilon", "eps_adam", "delta"),
    "weight_decay": ("wd", "decay", "l2", "l2_reg", "l2_penalty", "regularization", "lambda", "weight_decay_rate"),
    "momentum": ("mom", "mu", "beta", "beta1", "velocity", "betas"),
    "nesterov": ("use_nesterov", "nesterov_momentum"),
    "amsgrad": ("ams_grad", "ams"),
    "decoupled_weight_decay": ("decoupled", "decouple", "adamw"),
    "initial_accumulator_value": ("initial_accumulator", "init_acc"),
    "warmup_num_steps": ("num_warmup_steps", "warmup_steps", "warmup_iters", "warmup", "num_steps"),
    "warmup_max_lr": ("max_lr", "lr", "peak_lr", "learning_rate"),
    "warmup_min_lr": ("min_lr", "start_lr", "warmup_start_lr", "warmup_init_lr"),
    "total_num_steps": ("total_steps", "num_training_steps", "max_steps", "t_max", "num_steps", "total_iters"),
    "cos_min_ratio": ("min_ratio", "min_lr_ratio", "eta_min", "min_lr"),
    "cycle_min_lr": ("min_lr", "base_lr"),
    "cycle_max_lr": ("max_lr",),
    "cycle_first_step_size": ("step_size", "step_size_up"),
    "cycle_second_step_size": ("step_size_down",),
    "lr_range_test_min_lr": ("min_lr", "start_lr"),
    "lr_range_test_step_size": ("step_size",),
    "lr_range_test_step_rate": ("step_rate",),
}
# These names have no other common meaning.
_CERTAIN = {"learning_rate", "learn_rate", "wd", "epsilon", "adam_epsilon", "beta1", "beta2"}
_CERTAIN |= {"adam_beta1", "adam_beta2"}


def meant_key(name: str, known: Iterable[str], *, certain: bool = False) -> str | None:
    """Return the known name that `name` probably means: another spelling, another library's name, or a similar name.

    With `certain`, require a near-certain match, because `name` may also be a user-defined key.
    """
    by_plain = {_plain(candidate): candidate for candidate in known}
    if _plain(name) in by_plain:
        return by_plain[_plain(name)]
    for right, others in _MEANT.items():
        sure = [other for other in others if other in _CERTAIN or not certain]
        if _plain(right) in by_plain and _plain(name) in map(_plain, sure):
            return right
    near = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.9 if certain else 0.6)
    return by_plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def unknown_key(section: type, path: str, name: str, full: str, value: Any) -> ConfigError:
    """Make the error for a key `name` that the section at `path` does not have. `full` is its path in the file."""
    where = f"in {path}" if path else "at the top of a config"
    hints, known = _nearest(section, path, name, value), list(spellings(section))
    if hints:
        text = f"; did you mean {' or '.join(hints)}?"
    elif len(known) <= _FEW:
        text = f"; known there: {', '.join(known)}"
    else:
        text = f", and none like it (the nearest is {difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]})"
    return ConfigError(f"{full}: there is no key {name!r} {where}{text}")


def resembles_known(name: str, value: Any) -> bool:
    """Return whether a top-level key is known, or is probably a misspelled, shortened or misplaced known key."""
    known, leaf, everywhere = spellings(Config), name.rpartition(".")[2], _all_spellings(Config)
    if name.partition(".")[0] in known:
        return True
    params = {key for kind in (*OPTIMIZERS.values(), *SCHEDULES.values()) for key in spellings(kind)}
    leaves = {full.rpartition(".")[2] for full in everywhere} | params | _CERTAIN
    if leaf in leaves or name in {full.replace(".", "_") for full in everywhere}:
        return True
    like = [_plain(key) for key in (leaves if len(leaf) >= _LONG else known)]
    if difflib.get_close_matches(_plain(leaf), like, n=1, cutoff=_NEAR):
        return True
    sections = [key for key, entry in known.items() if entry.section is not None]
    if isinstance(value, Mapping) and any(key.startswith(f"{name}_") for key in sections):
        return True
    words = name.lower().replace("-", "_").split("_")
    of_several = [key.split("_") for key in known if "_" in key]
    return any(_abbreviates(full, words) or (len(words) > 1 and _abbreviates(words, full)) for full in of_several)


def _abbreviates(words: list[str], full: list[str]) -> bool:
    """Return whether each word is a prefix of a word in `full`, in order: `grad_clip`, `gradient_clipping`."""
    rest = iter(full)
    return all(any(whole.startswith(word) for whole in rest) for word in words)


def unknown_param(path: str, name: str, owner: str, known: Iterable[str]) -> ConfigError:
    """Make the error for a parameter that a torch class does not accept."""
    meant = meant_key(name, known := list(known))
    hint = f"did you mean {path}.{meant}?" if meant else f"known: {', '.join(known)}"
    return ConfigError(f"{path}.{name}: {owner} has no parameter {name!r}; {hint}")


def _nearest(section: type, path: str, name: str, value: Any) -> list[str]:
    everywhere = _all_spellings(Config)
    leaf = name.rpartition(".")[2]
    # The key may be in the wrong section. Names that many sections have, such as `enabled`, are not suggested, and
    # sections only for an object.
    sections = set() if isinstance(value, Mapping) else {full.rpartition(".")[0] for full in everywhere}
    misplaced = [full for full in everywhere if full.rpartition(".")[2] == leaf and full not in sections]
    if 0 < len(misplaced) <= _MANY:
        return misplaced
    meant = meant_key(name, spellings(section))
    if meant:
        return [join(path, meant)]
    if "params" in spellings(section):
        return [f"{path}.params.{name}"]
    leaves = {full.rpartition(".")[2]: full for full in reversed(everywhere)}
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if near and len(misplaced) <= _MANY:
        return [leaves[near[0]]]
    return difflib.get_close_matches(name, everywhere, n=1, cutoff=0.7) if "." in name else []


def _all_spellings(section: type, path: str = "") -> list[str]:
    found = []
    for name, entry in spellings(section).items():
        full = join(path, name)
        found.append(full)
        if entry.section is not None and name == entry.name:
            found += _all_spellings(entry.section, full)
    return found
