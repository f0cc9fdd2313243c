"""Attributes of submodules by a dotted name."""

from __future__ import annotations

from functools import reduce
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    *path, name = module_name.split(".")
    setattr(reduce(getattr, path, model), name, module)
