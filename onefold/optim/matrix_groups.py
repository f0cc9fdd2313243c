"""The division of parameter groups into matrices, for Muon or Shampoo, and other parameters, for AdamW.

Unless the user chooses otherwise, hidden matrices are stepped as matrices, and embeddings, heads and vectors are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from torch import nn

from onefold.errors import ConfigError
from onefold.optim.matrix_rules import MatrixRule
from onefold.plan import HYPERPARAMETERS, OptimizerSpec, check_names
from onefold.plan.matrices import Splits
from onefold.runtime.param_handle import unsharded_shape

# Names of modules that are embeddings or output heads. A parameter with "embed" in its name is an embedding, too.
_OUTER = {"lm_head", "head", "wte", "wpe", "score", "classifier"}
_EMBEDDING = "embed"
NORM_EPS = 1e-7
"""The smallest norm that a matrix is divided by, torch's default."""
DIVISION_KEYS = ("muon_lr", "adam_lr", "adamw_names", "split_rows")
"""The keys that control how parameters are divided, and the learning rates of both kinds."""


def divide_groups(
    rule: MatrixRule, spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]], model: nn.Module | None
) -> tuple[list[dict[str, Any]], Splits]:
    """Divide each group into matrices, with the hyperparameters of the rule, and others, with those of AdamW.

    Return the groups, and how parameters are split into matrices.
    """
    hyper, adamw = HYPERPARAMETERS[rule.name], HYPERPARAMETERS["adamw"]
    division = _Division(rule.flag, model, spec.params["adamw_names"])
    found = []
    for index, group in enumerate(groups):
        path, is_matrices = f"model_parameters[{index}]", group.get(rule.flag)
        read = {**group, **hyper.read(group, path)}
        known = [*hyper.names, rule.flag]
        if is_matrices is not None and not is_matrices:  # AdamW steps the whole group, which may have all of its keys
            read |= adamw.read({key: value for key, value in group.items() if key not in known}, path)
            known += adamw.names
        check_names(group, known, path, spec.type)
        if is_matrices is not None:
            _check_division(read, rule.flag, path)
        for part in division.divide(read, path):
            rate = "muon_lr" if part[rule.flag] else "adam_lr"
            rates = (part.get(rate), part.get("lr"), spec.params.get(rate), spec.params["lr"])
            values = {**spec.params, **part, "lr": next(rate for rate in rates if rate is not None)}
            if part[rule.flag]:
                values["eps"] = part.get("eps", NORM_EPS)
            else:
                values["decoupled_weight_decay"] = True
            found.append({key: value for key, value in values.items() if key not in DIVISION_KEYS})
    return found, division.splits(spec.params["split_rows"])


def _check_division(group: Mapping[str, Any], flag: str, path: str) -> None:
    """Raise if a group that is only matrices, or only others, has keys for the other kind."""
    wrong = ["adam_lr"] if group[flag] and not group.get("adamw_names") else []
    wrong = wrong if group[flag] else ["muon_lr", "split_rows"]
    for key in wrong:
        if group.get(key) not in (None, ()):
            raise ConfigError(
                f"{path}.{key}: it has no effect in a group with {flag} = {bool(group[flag])}. Leave it out, or leave "
                f"{flag} out."
            )


class _Division:
    """The division of groups into matrices and others, recorded under the key `flag`.

    `others` are the name patterns that the config lists for AdamW (`adamw_names`).
    """

    def __init__(self, flag: str, model: nn.Module | None, others: Sequence[str]) -> None:
        self._flag, self._others = flag, others
        named = list(model.named_parameters()) if model is not None else []
        self._names = {id(parameter): name for name, parameter in named}
        self._embeddings = _embeddings(model) if model is not None else set()
        self._splits: dict[str, Sequence[int] | int] = {}
        _check_names(others, list(self._names.values()), "optimizer.params.adamw_names")

    def divide(self, group: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
        """Return the group with `flag`, as two groups if it has both kinds of parameters.

        In order of precedence, the kind of a parameter is given by `adamw_names` of the group, by `flag` of the group,
        by the config's `adamw_names`, by an attribute of the parameter named `flag` (as in DeepSpeed), and by default.
        """
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        adamw_names, flag = group.get("adamw_names") or (), group.get(self._flag)
        names = [self._names.get(id(parameter), "") for parameter in group["params"]]
        _check_names(adamw_names, names, f"{path}.adamw_names")
        for parameter, name in zip(group["params"], names, strict=True):
            as_matrix = bool(flag)
            if flag is None:
                as_matrix = _is_matrix(parameter, name, self._flag, self._embeddings, self._others)
            kinds[as_matrix and not any(fnmatchcase(name, pattern) for pattern in adamw_names)].append(parameter)
        parts = [{**group, "params": params, self._flag: kind} for kind, params in kinds.items() if params]
        self._split(group.get("split_rows") or (), kinds[True], f"{path}.split_rows")
        return parts or [{**group, self._flag: bool(flag)}]

    def _split(self, texts: Sequence[str], matrices: Sequence[Any], path: str) -> None:
        names = [self._names[id(parameter)] for parameter in matrices if id(parameter) in self._names]
        if texts and self._names and not names:
            raise ConfigError(f"{path}: no parameter of the group is updated as a matrix. Leave it out of the group.")
        for pattern, parts in read_splits(texts, names, path).items():
            self._splits |= {escape(name): parts for name in names if fnmatchcase(name, pattern)}

    def splits(self, texts: Sequence[str]) -> Splits:
        """Return how parameters are split into matrices. Values of a group override those of the config, `texts`."""
        of_config = read_splits(texts, list(self._names.values()), "optimizer.params.split_rows")
        return {
            **self._splits,
            **{pattern: parts for pattern, parts in of_config.items() if pattern not in self._splits},
        }


def _is_matrix(parameter: Any, name: str, flag: str, embeddings: set[int], others: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in others):
        return False
    if (attribute := getattr(parameter, flag, None)) is not None:
        return bool(attribute)
    is_outer = id(parameter) in embeddings or _EMBEDDING in name or bool(_OUTER & set(name.split(".")))
    return len(unsharded_shape(parameter)) > 1 and not is_outer


def _embeddings(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def read_splits(texts: Sequence[str], names: Sequence[str], path: str) -> Splits:
    """Parse splits: `*.qkv.weight=3` is three equal parts of the rows, `*.kv.weight=512,512` two parts of 512 rows."""
    found: dict[str, Sequence[int] | int] = {}
    for text in texts:
        pattern, _, parts = text.rpartition("=")
        try:
            numbers = [int(part) for part in parts.split(",")]
        except ValueError:
            numbers = []
        if not pattern or not numbers or min(numbers) < 1:
            raise ConfigError(
                f"{path}: {text!r} is not a pattern with parts. Write *.qkv.weight=3 for equal parts, or "
                "*.qkv.weight=1024,256,256 for the rows of each."
            )
        found[pattern] = numbers[0] if len(numbers) == 1 else numbers
    _check_names(list(found), names, path)
    return found


def _check_names(patterns: Sequence[str], names: Sequence[str], path: str) -> None:
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{path}: {pattern!r} matches no parameter. Use names of model.named_parameters(), such as {names[0]}."
            )
