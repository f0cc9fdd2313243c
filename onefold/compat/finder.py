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
    path: (what, names.split())
    for what, rows in deepspeed_names.NOT_OFFERED.items()
    for paths, names in rows.items()
    for path in paths.split()
}
PATHS = {*MODULES, *deepspeed_names.NAMES, *NOT_OFFERED}


def install() -> None:
    """Make the modules of the tables importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before folders that an older version left, which would be packages


class _Finder(MetaPathFinder):
    """Finds the modules of the tables, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        if name == fullname or not (name in PATHS or _is_package(name)):
            return None
        loader = AliasLoader(f"onefold.compat.{MODULES[name]}", name) if name in MODULES else _NamesLoader(name)
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=loader.file, is_package=_is_package(name))
        spec.has_location = True  # modules have a `__file__`
        return spec


class AliasLoader(Loader):
    """Loads a module under a second name, so that there is one module and one set of classes.

    A `path` of the table adds the names that it lists for this module.
    """

    def __init__(self, module: str, path: str | None = None) -> None:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        self._spec, self._path = spec, path
        self.file = spec.origin

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._spec.name)
        self._first_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._first_spec  # the import system has set that of the second name
        if self._path is not None:
            _add_names(module, self._path)

    def get_code(self, fullname: str) -> Any:
        """Return the code that `python -m deepspeed.launcher.runner` runs."""
        return self._spec.loader.get_code(self._spec.name)  # type: ignore[union-attr]


class _NamesLoader(Loader):
    """Makes a module that has only names."""

    file = deepspeed_names.__file__

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None  # a plain module

    def exec_module(self, module: ModuleType) -> None:
        what, names = NOT_OFFERED.get(self._path, ("", []))
        module.__doc__ = f"Not offered: {what}." if what else "Names that live in other modules."
        for name in names:
            setattr(module, name, not_offered.class_of(name, what, module.__name__))
        _add_names(module, self._path)
        vars(module)["__all__"] = [name for name in dir(module) if not name.startswith("_")]

    def get_code(self, fullname: str) -> None:
        return None  # nothing for `python -m` to run


def _add_names(module: ModuleType, path: str) -> None:
    if path in deepspeed_names.NAMES or _is_package(path):
        vars(module)["__getattr__"], vars(module)["__dir__"] = lazy_names(module, path)


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
