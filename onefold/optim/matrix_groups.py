"""Which parameters an optimizer of whole matrices takes where the user has not said: hidden matrices, no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from torch import nn

from onefold.config import ConfigError
from onefold.plan.matrices import Splits
from onefold.runtime.param_handle import unsharded_shape

# Modules by name: tables of tokens and positions, and what turns hidden states into scores. Anything that is called an
# embedding is one.
_OUTER = {"lm_head", "head", "wte", "wpe", "score", "classifier"}
_EMBEDDING = "embed"


class GroupsOfMatrices:
    """Divides groups into matrices and others, under the key `flag`. `others` are the patterns of names that the config
    lists for AdamW (`adamw_names`).
    """

    def __init__(self, flag: str, model: nn.Module | None, others: Sequence[str]) -> None:
        self._flag, self._others = flag, others
        named = list(model.named_parameters()) if model is not None else []
        self._names = {id(parameter): name for name, parameter in named}
        self._tables = _tables(model) if model is not None else set()
        self._splits: dict[str, Sequence[int] | int] = {}
        _check_names(others, list(self._names.values()), "optimizer.params.adamw_names")

    def divide(self, group: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
        """Return the group with `flag`, in two where it has both kinds. Names among its own `adamw_names` count first;
        then `flag` as the group has it; then a parameter's own attribute of that name (DeepSpeed's way), the names that
        the config lists, and the default.
        """
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        own, all_of_it = group.get("adamw_names") or (), group.get(self._flag)
        names = [self._names.get(id(parameter), "") for parameter in group["params"]]
        _check_names(own, names, f"{path}.adamw_names")
        for parameter, name in zip(group["params"], names, strict=True):
            takes = bool(all_of_it)
            if all_of_it is None:
                takes = _takes(parameter, name, self._flag, self._tables, self._others)
            kinds[takes and not any(fnmatchcase(name, pattern) for pattern in own)].append(parameter)
        parts = [{**group, "params": some, self._flag: kind} for kind, some in kinds.items() if some]
        self._split(group.get("split_rows") or (), kinds[True], f"{path}.split_rows")
        return parts or [{**group, self._flag: bool(all_of_it)}]

    def _split(self, texts: Sequence[str], matrices: Sequence[Any], path: str) -> None:
        names = [self._names[id(parameter)] for parameter in matrices if id(parameter) in self._names]
        if texts and self._names and not names:
            raise ConfigError(f"{path}: no parameter of the group is stepped as a matrix. Leave it out of the group")
        for pattern, parts in read_splits(texts, names, path).items():
            self._splits |= {escape(name): parts for name in names if fnmatchcase(name, pattern)}

    def splits(self, texts: Sequence[str]) -> Splits:
        """Return how parameters are split into matrices: as their groups say, or else as the config does."""
        of_config = read_splits(texts, list(self._names.values()), "optimizer.params.split_rows")
        return {
            **self._splits,
            **{pattern: parts for pattern, parts in of_config.items() if pattern not in self._splits},
        }


def _takes(parameter: Any, name: str, flag: str, tables: set[int], others: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in others):
        return False
    if (own := getattr(parameter, flag, None)) is not None:
        return bool(own)
    is_outer = id(parameter) in tables or _EMBEDDING in name or bool(_OUTER & set(name.split(".")))
    return len(unsharded_shape(parameter)) > 1 and not is_outer


def _tables(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def read_splits(texts: Sequence[str], names: Sequence[str], path: str) -> Splits:
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
                f"{path}: {text!r} is no pattern with parts, as in *.qkv.weight=3 (equal parts) or "
                "*.qkv.weight=1024,256,256 (rows of each)"
            )
        found[pattern] = numbers[0] if len(numbers) == 1 else numbers
    _check_names(list(found), names, path)
    return found


def _check_names(patterns: Sequence[str], names: Sequence[str], path: str) -> None:
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{path}: no parameter has a name like {pattern!r}; names are as in model.named_parameters(), "
                f"{names[0]} for one"
            )
