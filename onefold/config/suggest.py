"""What an unknown key was probably meant to be."""

import difflib

from onefold.config.errors import ConfigError
from onefold.config.keys import spellings

_FEW = 12
_MANY = 2


def unknown_key(top: type, path: str, name: str, full: str) -> ConfigError:
    """The error for `name`, which the section at `path` does not know; `full` is the key as the file spells it."""
    section = _section_at(top, path)
    hints = _nearest(top, path, section, name)
    where = f"in {path}" if path else "at the top of a config"
    if hints:
        return ConfigError(f"{full}: there is no key {name!r} {where}; did you mean {' or '.join(hints)}?")
    known = list(spellings(section))
    if len(known) <= _FEW:
        return ConfigError(f"{full}: there is no key {name!r} {where}; known there: {', '.join(known)}")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return ConfigError(f"{full}: there is no key {name!r} {where}, and none like it (the nearest is {nearest})")


def _nearest(top: type, path: str, section: type, name: str) -> list[str]:
    everywhere = _all_spellings(top)
    leaf = name.rpartition(".")[2]
    # The right key in the wrong section, unless it is a name that half of the sections have.
    misplaced = [full for full in everywhere if full.rpartition(".")[2] == leaf]
    if 0 < len(misplaced) <= _MANY:
        return misplaced
    near = difflib.get_close_matches(name, spellings(section), n=1, cutoff=0.6)
    if near:
        return [f"{path}.{near[0]}" if path else near[0]]
    if "params" in spellings(section):
        return [f"{path}.params.{name}"]
    leaves = {full.rpartition(".")[2]: full for full in reversed(everywhere)}
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if near and len(misplaced) <= _MANY:
        return [leaves[near[0]]]
    return difflib.get_close_matches(name, everywhere, n=1, cutoff=0.7) if "." in name else []


def _section_at(top: type, path: str) -> type:
    section = top
    for part in path.split(".") if path else ():
        inner = spellings(section)[part].section
        assert inner is not None
        section = inner
    return section


def _all_spellings(section: type, path: str = "") -> list[str]:
    found = []
    for name, entry in spellings(section).items():
        full = f"{path}.{name}" if path else name
        found.append(full)
        if entry.section is not None and name == entry.name:
            found += _all_spellings(entry.section, full)
    return found
