"""Modules that are lists of names: each name is fetched from where it really lives when it is first read.

    __getattr__, __dir__ = names(__name__, {"Init": "onefold.zero.Init", ...})

Submodules of a package are found the same way, so that `deepspeed.runtime.zero` works after `import deepspeed`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names(module: str, table: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module whose names are objects of other modules."""

    def get(name: str) -> Any:
        if name in table:
            value = fetch(table[name])
        elif not name.startswith("__") and _is_submodule(module, name):
            value = importlib.import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"module {_as_deepspeed(module)!r} has no attribute {name!r}")
        vars(sys.modules[module])[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[module]), *table})

    return get, listed


def same(source: str, *listed: str) -> dict[str, str]:
    """Return a table of names that are the same in both modules."""
    return {name: f"{source}.{name}" for name in listed}


def fetch(path: str) -> Any:
    """Return the object at a dotted path: a module, or a name of one."""
    source, _, name = path.rpartition(".")
    found = importlib.import_module(source)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(path)


def _is_submodule(module: str, name: str) -> bool:
    is_package = hasattr(sys.modules[module], "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


def _as_deepspeed(module: str) -> str:
    return module.removeprefix("onefold.compat.")
