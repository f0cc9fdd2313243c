"""What others see of an optimizer: hooks around its steps, and its groups as text that ranks can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from onefold.comm import Agreement
from onefold.optim.instance import is_plain


def run_pre_hooks(outer: torch.optim.Optimizer, instance: torch.optim.Optimizer | None) -> None:
    """Torch's for all optimizers, those on the user's instance, those on the one he got. They may change rates."""
    shared = ((hook, outer) for hook in torch_optimizer._global_optimizer_pre_hooks.values())
    own = ((hook, of) for of in _each(outer, instance) for hook in of._optimizer_step_pre_hooks.values())
    for hook, optimizer in chain(list(shared), list(own)):
        given: tuple[Any, dict[str, Any]] = (optimizer,), {}
        result: Any = hook(optimizer, *given)
        if result is not None and result != given:
            raise RuntimeError(
                "a step pre hook of the optimizer returned other arguments for step(), and engine.step() passes none "
                "on: let it return None"
            )


def run_post_hooks(outer: torch.optim.Optimizer, instance: torch.optim.Optimizer | None) -> None:
    own = ((hook, of) for of in _each(outer, instance) for hook in of._optimizer_step_post_hooks.values())
    shared = ((hook, outer) for hook in torch_optimizer._global_optimizer_post_hooks.values())
    for hook, optimizer in chain(list(own), list(shared)):
        hook(optimizer, (optimizer,), {})


def has_post_hooks(outer: torch.optim.Optimizer, instance: torch.optim.Optimizer | None) -> bool:
    own = any(of._optimizer_step_post_hooks for of in _each(outer, instance))
    return own or bool(torch_optimizer._global_optimizer_post_hooks)


def _each(outer: torch.optim.Optimizer, instance: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    return [outer] if instance is None else [instance, outer]


# -- groups of all ranks --------------------------------------------------------------------------------------------


def spell_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every value that is plain data, under a name that says where it stands."""
    return {
        f"param_groups[{index}][{key!r}]": _spell(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key != "params" and is_plain(value)
    }


def _spell(value: Any) -> str:
    # One rank may hold as a tensor what another holds as a number, or 1 as 1.0.
    value = _number(value)
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def digest(spelled: Mapping[str, str]) -> int:
    """A number that fits in a row."""
    text = "\0".join(f"{key}={value}" for key, value in sorted(spelled.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Spelled:
    """The keys that groups began with, whoever writes to them, as text. It is made anew when a value has changed."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._keys = [[key for key in group if key != "params"] for group in groups]
        self._held: list[list[Any]] | None = None
        self.text: dict[str, str] = {}
        self.digest = 0

    def update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        values = [[_number(group.get(key)) for key in keys] for group, keys in zip(groups, self._keys, strict=True)]
        if values != self._held:
            self._held = values
            named = zip(self._keys, values, strict=True)
            self.text = spell_groups([dict(zip(keys, held, strict=True)) for keys, held in named])
            self.digest = digest(self.text)


@dataclass(frozen=True)
class Held:
    """What one rank holds under a key."""

    key: str
    rank: int
    value: str | None


def tell_difference(agreement: Agreement, what: str, mine: Mapping[str, str]) -> tuple[Held, Held]:
    """A key that two ranks hold differently, the same on all ranks, which call this together. They do differ."""
    told = [json.loads(agreement.tell(what, json.dumps(mine), rank)) for rank in range(agreement.group.size)]
    for key in dict.fromkeys(key for one in told for key in one):
        for rank, one in enumerate(told):
            if one.get(key) != told[0].get(key):
                return Held(key, 0, told[0].get(key)), Held(key, rank, one.get(key))
    raise AssertionError("ranks hold the same")
