"""Which parameters an optimizer of whole matrices takes where the user has not said: hidden matrices, no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from onefold.config import ConfigError
from onefold.plan.matrices import Splits
from onefold.runtime.param_handle import unsharded_shape

# Modules by name: tables of tokens and positions, and what turns hidden states into scores. Anything that is called an
# embedding is one.
_OUTER = {"lm_head", "head", "wte", "wpe", "score", "classifier"}
_EMBEDDING = "embed"


def divide(groups: Sequence[Mapping[str, Any]], flag: str, model: nn.Module | None, others: Sequence[str]) -> list[Any]:
    """The same groups, each with `flag`, those in two that have both kinds. A group that has it already is as it is;
    then a parameter's own attribute of that name counts (DeepSpeed's way), then names among `others` and the default.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
    tables = _tables(model) if model is not None else set()
    found = []
    for group in groups:
        if flag in group:
            found.append(dict(group))
            continue
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for parameter in group["params"]:
            kinds[_takes(parameter, names.get(id(parameter), ""), flag, tables, others)].append(parameter)
        found += [{**group, "params": some, flag: kind} for kind, some in kinds.items() if some]
    _check_names(others, list(names.values()), "adamw_names")
    return found


def _takes(parameter: Any, name: str, flag: str, tables: set[int], others: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in others):
        return False
    if (own := getattr(parameter, flag, None)) is not None:
        return bool(own)
    is_outer = id(parameter) in tables or _EMBEDDING in name or bool(_OUTER & set(name.split(".")))
    return len(unsharded_shape(parameter)) > 1 and not is_outer


def _tables(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def read_splits(texts: Sequence[str], model: nn.Module | None) -> Splits:
    """`*.qkv.weight=3` is three equal parts of its rows, `*.kv.weight=512,512` parts of so many."""
    found: dict[str, Sequence[int] | int] = {}
    for text in texts:
        pattern, _, parts = text.rpartition("=")
        try:
            numbers = [int(part) for part in parts.split(",")]
        except ValueError:
            numbers = []
        if not pattern or not numbers or min(numbers) < 1:
            raise ConfigError(
                f"optimizer.params.split_rows: {text!r} is no pattern with parts, as in *.qkv.weight=3 (equal parts) "
                "or *.qkv.weight=1024,256,256 (rows of each)"
            )
        found[pattern] = numbers[0] if len(numbers) == 1 else numbers
    if model is not None:
        _check_names(list(found), [name for name, _ in model.named_parameters()], "split_rows")
    return found


def _check_names(patterns: Sequence[str], names: Sequence[str], key: str) -> None:
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optimizer.params.{key}: no parameter has a name like {pattern!r}; names are as in "
                f"model.named_parameters(), {names[0]} for one"
            )
