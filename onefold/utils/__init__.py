"""Helpers under the names that DeepSpeed scripts import from its utils."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from onefold.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from onefold.log import logger
from onefold.plan.cut import LEAF_MARK
from onefold.report.memory_usage import memory_status, see_memory_usage

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "logger",
    "memory_status",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "see_memory_usage",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_module",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


# -- modules that are never cut into smaller units. Set them before initialize -----------------------------------


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(getattr(model, LEAF_MARK, False))


def z3_leaf_parameter(parameter: nn.Parameter, model: nn.Module) -> bool:
    """Whether a parameter of a model lies in one of its leaf modules."""
    return any(parameter is own for leaf in get_z3_leaf_modules(model) for own in leaf.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    setattr(model, LEAF_MARK, flag)


def unset_z3_leaf_module(model: nn.Module) -> None:
    set_z3_leaf_module(model, False)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given as classes or by name."""
    return _mark(model, leaf_module_classes, _is_of_class, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(model, leaf_module_classes, _is_of_class, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(model, module_names, lambda path, _, name: path == name, True, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(model, module_name_suffixes, lambda path, _, end: path.endswith(end), True, raise_if_not_found)


def _is_of_class(path: str, module: nn.Module, wanted: Any) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)


def _mark(
    model: nn.Module, wanted: Iterable[Any], fits: Callable[[str, nn.Module, Any], bool], flag: bool, strict: bool
) -> list[nn.Module]:
    wanted = list(wanted)
    found = [module for path, module in model.named_modules() if any(fits(path, module, one) for one in wanted)]
    if not found and strict:
        raise ValueError(f"no module of {type(model).__name__} answers to {', '.join(map(str, wanted))}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


class RepeatingLoader:
    """A loader that starts over when it is exhausted, with a new shuffle each time."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader: Any = loader
        self._num_passes = 0
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._num_passes = self.epoch + 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._num_passes)
            self._batches = iter(self.loader)
            return next(self._batches)

    @property
    def epoch(self) -> int:
        """The sampler's where it has one: it may have been resumed."""
        epoch: int = getattr(getattr(self.loader, "sampler", None), "epoch", self._num_passes)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
