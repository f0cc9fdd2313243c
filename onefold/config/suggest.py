"""What an unknown key was probably meant to be."""

import difflib
from collections.abc import Iterable

from onefold.config.errors import ConfigError
from onefold.config.keys import spellings

_FEW = 12
_MANY = 2

# Other libraries' names for hyperparameters, and what they may be called here; the first that is known counts.
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
# Nobody uses these for anything else.
_CERTAIN = {
    "learning_rate",
    "learn_rate",
    "wd",
    "epsilon",
    "adam_epsilon",
    "beta1",
    "beta2",
    "adam_beta1",
    "adam_beta2",
}


def meant_key(name: str, known: Iterable[str], *, certain: bool = False) -> str | None:
    """The known name that another one stands for: its spelling, its name elsewhere, or what looks like it.

    `certain`: the other name may also be somebody's own, so it has to be as good as the known one.
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


def unknown_key(top: type, section: type, path: str, name: str, full: str) -> ConfigError:
    """The error for `name`, which the section at `path` does not know; `full` is the key as the file spells it."""
    hints = _nearest(top, path, section, name)
    where = f"in {path}" if path else "at the top of a config"
    if hints:
        return ConfigError(f"{full}: there is no key {name!r} {where}; did you mean {' or '.join(hints)}?")
    known = list(spellings(section))
    if len(known) <= _FEW:
        return ConfigError(f"{full}: there is no key {name!r} {where}; known there: {', '.join(known)}")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return ConfigError(f"{full}: there is no key {name!r} {where}, and none like it (the nearest is {nearest})")


def unknown_param(path: str, name: str, owner: str, known: Iterable[str]) -> ConfigError:
    """The error for a parameter that a class of torch does not take."""
    meant = meant_key(name, known := list(known))
    hint = f"did you mean {path}.{meant}?" if meant else f"known: {', '.join(known)}"
    return ConfigError(f"{path}.{name}: {owner} has no parameter {name!r}; {hint}")


def _nearest(top: type, path: str, section: type, name: str) -> list[str]:
    everywhere = _all_spellings(top)
    leaf = name.rpartition(".")[2]
    # The right key in the wrong section, unless it is a name that half of the sections have.
    misplaced = [full for full in everywhere if full.rpartition(".")[2] == leaf]
    if 0 < len(misplaced) <= _MANY:
        return misplaced
    meant = meant_key(name, spellings(section))
    if meant:
        return [f"{path}.{meant}" if path else meant]
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
        full = f"{path}.{name}" if path else name
        found.append(full)
        if entry.section is not None and name == entry.name:
            found += _all_spellings(entry.section, full)
    return found
