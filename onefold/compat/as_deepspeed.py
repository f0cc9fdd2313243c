"""Let `import deepspeed` find `onefold.compat.deepspeed`, module by module.

The distribution in `packaging/deepspeed` calls `answer_imports` when `deepspeed` is imported. Without it a script or a
notebook calls `onefold.register_as_deepspeed()` before its other imports, which answers for the distribution too:
transformers, accelerate and Lightning ask for the metadata of a package named `deepspeed`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from onefold.compat.finder import ROOT, AliasLoader

VERSION = "0.19.8+onefold"
"""DeepSpeed's version whose names and behaviour are followed, marked as ours."""

NAME = "deepspeed"

# Modules that ask once, when they are imported, whether there is a DeepSpeed.
_ASK_EARLY = (
    "transformers.integrations.deepspeed",
    "accelerate.accelerator",
    "lightning.fabric.strategies.deepspeed",
    "pytorch_lightning.strategies.deepspeed",
    "trl.import_utils",
)


def register_as_deepspeed() -> None:
    """Make `import deepspeed` and queries for its version find onefold, in this process.

    Call it before transformers, accelerate, TRL or Lightning are imported. Processes that `accelerate launch` or
    `deepspeed` start import `deepspeed` before a line of the script runs: for those, install the distribution
    (`pip install ./packaging/deepspeed`).
    """
    found = sys.modules.get(NAME)
    if found is not None and found is not sys.modules.get(ROOT):
        raise RuntimeError(
            f"DeepSpeed itself is already imported, from {getattr(found, '__file__', None)}. Call "
            "onefold.register_as_deepspeed() before deepspeed is imported."
        )
    if _is_answered():
        return
    early = [name for name in _ASK_EARLY if name in sys.modules]
    if early and importlib.util.find_spec(NAME) is None:
        raise RuntimeError(
            f"{early[0]} was imported before onefold.register_as_deepspeed() and found no deepspeed. Call it "
            "before the other imports."
        )
    sys.meta_path.insert(0, _Finder(with_metadata=True))


def answer_imports() -> ModuleType:
    """Make `deepspeed` and its submodules find onefold, for the installed distribution. Return the package."""
    if not _is_answered():
        sys.meta_path.insert(0, _Finder(with_metadata=False))
    sys.modules[NAME] = importlib.import_module(ROOT)
    return sys.modules[NAME]


def _is_answered() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(DistributionFinder):
    def __init__(self, *, with_metadata: bool) -> None:
        self._with_metadata = with_metadata

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        ours = ROOT + fullname.removeprefix(NAME)
        found = importlib.util.find_spec(ours)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        spec = importlib.machinery.ModuleSpec(fullname, AliasLoader(ours), origin=found.origin, is_package=is_package)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if self._with_metadata and (context is None or context.name in (None, NAME)):
            yield _Metadata()


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nRequires-Dist: onefold\n",
            "top_level.txt": f"{NAME}\n",
        }
        return files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path
