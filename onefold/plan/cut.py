"""Split a model into units. The result depends only on the module tree, not on the stage or the world size.

[Note: the structural cut]
Blocks are chosen by the first of these rules that matches a module: the names in `onefold.units`; the classes that a
Hugging Face model lists in `_no_split_modules`; the children of a ModuleList, Sequential or ModuleDict in which one
class repeats. Blocks never nest: the outermost one is used, so the experts of a block belong to that block. Leaf
modules, named in the config or marked by `set_z3_leaf_modules`, are blocks too. Every module outside the blocks that
directly owns at least `LARGE` elements (embeddings, heads) is a separate block. All other parameters belong to the
root, and so does a tied parameter of two blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from onefold.config import ConfigError, LeafModule

LARGE = 1 << 20

# The attribute by which DeepSpeed, and libraries that support it, mark a module that is never split.
LEAF_MARK = "_z3_leaf"


@dataclass(frozen=True)
class UnitCut:
    """One unit of a model."""

    module: str
    """The path of the module whose forward uses the unit."""
    parameters: tuple[str, ...]
    has_tied: bool
    """Some of the parameters are tied: they have two names in the model."""
    is_block: bool = False
    """The module is one of several blocks of a class, not the root, an embedding or a head."""


def cut(
    model: nn.Module,
    names: Sequence[str] = (),
    leaves: LeafModule | None = None,
    numel: Callable[[nn.Parameter], int] = nn.Parameter.numel,
) -> list[UnitCut]:
    """Split a model into units: the root first, then the blocks in module order.

    `numel` returns the unsharded size of a parameter, which may be a placeholder.
    """
    repeated, blocks = _blocks(model, names, leaves or LeafModule(), numel)
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)

    members: dict[str, list[str]] = {"": [], **{block: [] for block in blocks}}
    tied: set[str] = set()
    for occurrences in places.values():
        owners = {_owner(name, blocks) for name in occurrences}
        owner = owners.pop() if len(owners) == 1 else ""
        members[owner].append(occurrences[0])
        if len(occurrences) > 1:
            tied.add(owner)
    return [
        UnitCut(module, tuple(found), module in tied, module in repeated) for module, found in members.items() if found
    ]


def _owner(parameter: str, blocks: Container[str]) -> str:
    path = parameter
    while path:
        path = path.rpartition(".")[0]
        if path in blocks:
            return path
    return ""


def persistent_parameters(sizes: Mapping[str, int], threshold: int, in_all: int) -> set[str]:
    """Return the names of the parameters of at most `threshold` elements, up to a total of `in_all` elements."""
    found: set[str] = set()
    total = 0
    for name, size in sizes.items():
        if size <= threshold and total + size <= in_all:
            found.add(name)
            total += size
    return found


def _blocks(
    model: nn.Module, names: Sequence[str], leaves: LeafModule, numel: Callable[[nn.Parameter], int]
) -> tuple[set[str], list[str]]:
    """Return the paths of the repeated blocks, and of all blocks in module order."""
    chosen = named_blocks(model, names) if names else _no_split(model) or _outermost(_repeated(model))
    chosen = _outermost(chosen | _leaves(model, leaves))
    large = {
        path
        for path, module in model.named_modules()
        if sum(numel(parameter) for parameter in module.parameters(recurse=False)) >= LARGE
        and path
        and not _owner(f"{path}.", chosen)
    }
    kinds = {path: type(model.get_submodule(path)) for path in chosen}
    counts = Counter(kinds.values())
    repeated = {path for path in chosen if counts[kinds[path]] > 1} or chosen
    return repeated, [path for path, _ in model.named_modules() if path in chosen | large]


def named_blocks(model: nn.Module, names: Sequence[str], key: str = "onefold.units") -> set[str]:
    """Return the outermost modules whose class name or path matches a pattern. Raise if a pattern matches none."""
    found: set[str] = set()
    for pattern in names:
        hits = {
            path
            for path, module in model.named_modules()
            if path and (type(module).__name__ == pattern or fnmatchcase(path, pattern))
        }
        if not hits:
            classes = sorted({type(module).__name__ for _, module in model.named_modules()})
            raise ConfigError(
                f"{key}: {pattern!r} matches no module of this model, neither by class nor by path. "
                f"Its classes are {', '.join(classes)}."
            )
        found |= hits
    return _outermost(found)


def _leaves(model: nn.Module, leaves: LeafModule) -> set[str]:
    """Return the leaf modules: those that the config names and those marked as leaves. Raise if a name matches none."""
    found = {path for path, module in model.named_modules() if getattr(module, LEAF_MARK, False)}
    named = {"classes": leaves.classes, "names": leaves.names, "name_suffixes": leaves.name_suffixes}
    for kind, names in named.items():
        for name in names:
            hits = {path for path, module in model.named_modules() if path and _matches(path, module, kind, name)}
            if not hits:
                raise ConfigError(f"zero_optimization.leaf_module.{kind}: no module of this model matches {name!r}")
            found |= hits
    return found


def _matches(path: str, module: nn.Module, kind: str, name: str) -> bool:
    if kind == "classes":
        of = type(module)
        return name in (of.__name__, f"{of.__module__}.{of.__qualname__}")
    return path == name if kind == "names" else path.endswith(name)


def _no_split(model: nn.Module) -> set[str]:
    classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return _outermost({path for path, module in model.named_modules() if type(module).__name__ in classes})


def _repeated(model: nn.Module) -> set[str]:
    """Return the children with parameters of every container in which a class occurs at least twice."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
        counts = Counter(type(child) for child in children.values())
        if counts and max(counts.values()) >= 2:
            found.update(f"{path}.{name}" if path else name for name in children)
    return found


def _outermost(paths: set[str]) -> set[str]:
    """Remove the paths that lie inside another one, and the root, which is never a block."""
    return {path for path in paths if path and not _owner(path, paths - {path})}
