"""Whether what a manifest says of a job, once decoded, can be gone on from: types, forms, ranges.

[Note: what is compared with what]
A manifest may be edited and signed again, or be of another program. What the job's own objects would take without a
word and fail on later (a rate that is a string, one beta where two are wanted, an epoch that is a list) is refused
before anything is changed. What a value has to be is told by the live value that it would replace: a number for a
number, a list for a list. Where that is None anything plain may come, and what the live object has no key for is left
to it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from onefold.checkpoint import fields

# What no optimizer lets be negative, and what all have between 0 and 1.
_NOT_NEGATIVE = ("lr", "initial_lr", "eps", "weight_decay", "momentum")
_BELOW_ONE = ("betas",)
# Ways to the same numbers: one of two programs may have left them to torch (None).
_LEFT_TO_TORCH = ("foreach", "fused", "capturable", "differentiable")
# Where a schedule stands; and what has a number for each group.
_POSITIONS = ("last_epoch", "last_batch_iteration")
_OF_GROUPS = ("base_lrs", "_last_lr")


def check_object(found: Any, where: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"must be an object, not {fields.spell(found)}")


def check_job(state: Any, where: str) -> None:
    check_object(state, where)
    for key in ("client_state", "counters"):
        if not isinstance(state[key], dict):
            raise ValueError(f"{key} must be an object, not {fields.spell(state[key])}")
    if state["optimizer"] is not None:
        for number, group in enumerate(state["optimizer"]["groups"]):
            check_object(group, where)
            _check_ranges(group, f"optimizer.groups[{number}]")
    if state["loss_scale"] is not None:
        _check_loss_scale(state["loss_scale"])


def _check_ranges(group: Mapping[str, Any], where: str) -> None:
    for key in (*_NOT_NEGATIVE, *_BELOW_ONE):
        values = group.get(key)
        for value in values if isinstance(values, tuple | list) else [values]:
            if value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
                continue
            number = _number(value.item() if isinstance(value, torch.Tensor) else value, f"{where}.{key}")
            if number < 0 or (key in _BELOW_ONE and number >= 1):
                least = "from 0 up" if key not in _BELOW_ONE else "from 0 to below 1"
                raise ValueError(f"{where}.{key} must be {least}, not {fields.spell(values)}")


def _number(value: Any, where: str) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, not {fields.spell(value)}")
    return float(value)


def _check_loss_scale(scale: Any) -> None:
    if not isinstance(scale, dict) or "value" not in scale:
        raise ValueError(f"loss_scale must have a value, not {fields.spell(scale)}")
    if fields.finite(scale["value"], "loss_scale.value") <= 0:
        raise ValueError(f"loss_scale.value must be above 0, not {scale['value']}")
    if len(scale) > 1:  # one that is found while training
        for key, least in (("remaining_hysteresis", 0), ("iteration", 0), ("last_overflow_iteration", -1)):
            if key not in scale:
                raise ValueError(f"loss_scale lacks {key}")
            fields.whole(scale[key], f"loss_scale.{key}", least)


def check_loose(found: Any, where: str) -> None:
    """States that do not lie along a parameter: by parameter, by name."""
    check_object(found, where)
    for name, states in found.items():
        if not isinstance(name, str) or not isinstance(states, dict):
            raise ValueError(f"{fields.spell(name)} must be a parameter's name with an object of states")
        for key, value in states.items():
            if key == "step":
                single = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if _number(single, f"{name}.step") < 0:
                    raise ValueError(f"{name}.step must be from 0 up, not {fields.spell(single)}")


def check_loose_like(found: Mapping[str, Mapping[str, Any]], live: Mapping[str, Mapping[str, Any]]) -> None:
    """Against those of an optimizer that has stepped, where both know of the parameter."""
    for name in live.keys() & found.keys():
        for key, value in live[name].items():
            where = f"ranks, loose.{name}"
            if key not in found[name]:
                raise ValueError(f"{where} lacks {key}")
            _check_like(found[name][key], value, f"{where}.{key}")


def check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Hyperparameters that are about to replace those of live groups."""
    for number, (new, group) in enumerate(zip(saved, live, strict=True)):
        if new and "lr" in group and "lr" not in new:
            raise ValueError(f"state.optimizer.groups, for group {number} here: lacks lr")
        for key, value in new.items():
            if key in group and not (value is None and key in _LEFT_TO_TORCH):
                _check_like(value, group[key], f"state.optimizer.groups, for group {number} here: {key}")


def check_schedule(saved: Any, schedule: Any) -> None:
    """Whether a schedule, or anything else with `load_state_dict`, takes the state; afterwards it is as it was."""
    live = schedule.state_dict()
    if isinstance(live, dict):
        if not isinstance(saved, dict):
            raise ValueError(f"state.lr_scheduler must be an object, not {fields.spell(saved)}")
        for key in live.keys() & saved.keys():
            where = f"state.lr_scheduler.{key}"
            _check_like(saved[key], live[key], where)
            if key in _OF_GROUPS and live[key] and len(saved[key]) != len(live[key]):
                raise ValueError(f"{where} must have {len(live[key])} numbers, not {fields.spell(saved[key])}")
        for key in _POSITIONS:
            if type(live.get(key)) is int:
                fields.whole(saved.get(key), f"state.lr_scheduler.{key}", least=-1)
        hidden = [key for key in saved if isinstance(key, str) and callable(getattr(type(schedule), key, None))]
        if hidden:
            raise ValueError(f"state.lr_scheduler: {hidden[0]} is a method of {type(schedule).__name__}, and no state")


def check_taken(saved: Any, taker: Any, groups: Sequence[dict[str, Any]], where: str) -> None:
    """Whether `load_state_dict` takes it. Afterwards the taker and the groups, which it may write to, are as before."""
    before = copy.deepcopy(taker.state_dict())
    attributes = dict(vars(taker))
    values = [dict(group) for group in groups]
    rates = [{k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)} for group in groups]
    try:
        taker.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise ValueError(f"{where} is not taken by {type(taker).__name__}: {type(error).__name__}: {error}") from error
    finally:
        _put_back(vars(taker), attributes)
        taker.load_state_dict(before)  # for what lies deeper
        _put_back(vars(taker), attributes)
        for group, value, rate in zip(groups, values, rates, strict=True):
            _put_back(group, value)
            for key, number in rate.items():
                group[key].copy_(number)


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in now.keys() - before.keys():
        del now[key]
    now.update(before)


def _check_like(saved: Any, live: Any, where: str) -> None:
    if live is None:
        return
    if isinstance(live, torch.Tensor):
        if isinstance(saved, torch.Tensor):
            fits = saved.shape == live.shape and saved.is_floating_point() == live.is_floating_point()
        else:
            fits = live.numel() == 1 and _is_number(saved)
        _require(fits, saved, f"a tensor of shape {list(live.shape)}", where)
    elif isinstance(live, bool):
        _require(isinstance(saved, bool), saved, "true or false", where)
    elif _is_number(live):
        single = saved.item() if isinstance(saved, torch.Tensor) and saved.numel() == 1 else saved
        _require(_is_number(single), saved, "a number", where)
        _require(math.isfinite(single) or not math.isfinite(live), saved, "a finite number", where)
    elif isinstance(live, str):
        _require(isinstance(saved, str), saved, "a string", where)
    elif isinstance(live, tuple):
        fits = isinstance(saved, tuple | list) and len(saved) == len(live)
        _require(fits, saved, f"{len(live)} values", where)
        for number, (one, other) in enumerate(zip(saved, live, strict=True)):
            _check_like(one, other, f"{where}[{number}]")
    elif isinstance(live, list):
        _require(isinstance(saved, list), saved, "a list", where)
        if live and _is_number(live[0]):
            _require(all(_is_number(each) and math.isfinite(each) for each in saved), saved, "a list of numbers", where)
    elif isinstance(live, dict):
        _require(isinstance(saved, dict), saved, "an object", where)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # numpy's too


def _require(fits: bool, saved: Any, what: str, where: str) -> None:
    if not fits:
        raise ValueError(f"{where} must be {what}, not {fields.spell(saved)}")
