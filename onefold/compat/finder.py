"""The import finder that serves the tables of `deepspeed_names.py`.

`import onefold.compat.deepspeed.runtime.zero` finds the module in the tables. Its names are fetched from where they
live when they are first read, so importing a module costs little.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from onefold.compat import deepspeed_names, not_offered

ROOT = "onefold.compat.deepspeed"
MODULES = {path: module for module, paths in deepspeed_names.MODULES.items() for path in paths.split()}
NOT_OFFERED = {
    path: (what, names.split()) for what, paths in deepspeed_names.NOT_OFFERED.items() for path, names in paths.items()
}
PATHS = {*MODULES, *deepspeed_names.NAMES, *NOT_OFFERED}


def install() -> None:
    """Make the modules of the tables importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    """Finds the modules of the tables, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        is_package = _is_package(name)
        if name == fullname or not (name in PATHS or is_package):
            return None
        file = _spec_of(name).origin if name in MODULES else deepspeed_names.__file__
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(name), origin=file, is_package=is_package)
        spec.has_location = True  # modules have a `__file__`
        return spec


class _Loader(Loader):
    """Returns the module of `onefold.compat` that a path stands for, or makes one that has only names."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        if self._path not in MODULES:
            return None  # a plain module
        module = importlib.import_module(f"onefold.compat.{MODULES[self._path]}")
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        path = self._path
        if path in MODULES:
            module.__spec__ = self._own_spec  # the import system has replaced it
        else:
            module.__doc__ = f"Names of `deepspeed.{path}` that live in other modules."
        if path in NOT_OFFERED:
            what, names = NOT_OFFERED[path]
            module.__doc__ = f"Not offered: {what}."
            for name in names:
                setattr(module, name, not_offered.class_of(name, what, module.__name__))
        if path in deepspeed_names.NAMES or _is_package(path):
            vars(module)["__getattr__"], vars(module)["__dir__"] = lazy_names(module, path)
        if path not in MODULES:
            vars(module)["__all__"] = [name for name in dir(module) if not name.startswith("_")]

    def get_code(self, fullname: str) -> Any:
        """Return the code that `python -m` runs, or None for a module that has only names."""
        if self._path not in MODULES:
            return None
        spec = _spec_of(self._path)
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def lazy_names(module: ModuleType, path: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module with the names of a path in the table, and its submodules."""
    sources = {}
    for source, names in deepspeed_names.NAMES.get(path, {}).items():
        for name in names.split():
            new, _, old = name.partition("=")
            sources[new] = (_absolute(source), old or new)

    def get(name: str) -> Any:
        submodule = f"{path}.{name}".removeprefix(".")
        if name in sources:
            source, old = sources[name]
            value = getattr(importlib.import_module(source), old)
        elif submodule in PATHS or _is_package(submodule):
            value = importlib.import_module(f"{ROOT}.{submodule}")
        else:
            shown = f"deepspeed.{path}".removesuffix(".")
            raise AttributeError(f"module {shown!r} has no attribute {name!r}")
        vars(module)[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*vars(module), *sources})

    return get, listed


def _absolute(source: str) -> str:
    """Return the full name of a module that the table gives as a source."""
    if source.startswith("."):
        return f"{ROOT}{source}".removesuffix(".")
    return source if "." in source else f"onefold.compat.{source}"


def _is_package(path: str) -> bool:
    return any(other.startswith(f"{path}.") for other in PATHS)


def _spec_of(path: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(f"onefold.compat.{MODULES[path]}")
    assert spec is not None
    return spec
