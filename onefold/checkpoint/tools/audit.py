"""Listing, description and verification of checkpoints, for the commands of `onefold ckpt`. No file is modified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.files import RemovedError
from onefold.checkpoint.format.manifest import NAME, RANGE_BYTES, Manifest, ShardFile, StoredPart, checksum
from onefold.checkpoint.format.safetensors_files import DTYPE_NAMES
from onefold.storage.place import OpenFile, Place, open_file, reason, tree_size

# -- listing ---------------------------------------------------------------------------------------------------------


def list_all(folder: Place) -> list[folders.FoundCheckpoint]:
    """List all checkpoints of a folder, DeepSpeed's last. For the folder of a tag, return that checkpoint only."""
    if folders.is_tag_folder(folder):
        return [folders.examine(folder)]
    ours = folders.list_tags(folder)
    known = {found.tag for found in ours}
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in known and entry.is_dir())
    return ours + [folders.examine(folder / name) for name in others if folders.is_deepspeeds(folder / name)]


def summary(found: folders.FoundCheckpoint) -> dict[str, Any]:
    """Summarize one checkpoint for a list."""
    manifest = found.manifest
    if manifest is not None:
        state = "damaged" if found.problems else "complete"
    elif folders.is_deepspeeds(found.folder):
        state = "DeepSpeed's"
    else:
        state = "damaged" if folders.is_tag_folder(found.folder) else "not published"
    return {
        "tag": found.tag,
        "steps": manifest.global_steps if manifest is not None else None,
        "saved": manifest.saved if manifest is not None else None,
        "bytes": manifest.nbytes if manifest is not None else tree_size(found.folder),
        "ranks": manifest.world_size if manifest is not None else None,
        "state": state,
        "complete": state == "complete",
        "problems": list(found.problems),
        "unpublished_bytes": unpublished_bytes(found),
    }


def unpublished_bytes(found: folders.FoundCheckpoint) -> int:
    """Return the number of bytes in data folders that no manifest refers to: being written, or left over.

    Return 0 for a damaged manifest, which may refer to any of them.
    """
    if found.manifest is None and folders.is_tag_folder(found.folder):
        return 0
    named = found.manifest.data_folders if found.manifest is not None else set()
    return sum(tree_size(found.folder / name) for name in folders.data_folders(found.folder) if name not in named)


# -- description -----------------------------------------------------------------------------------------------------

_KINDS = ("trained parameters", "frozen parameters", "buffers", "optimizer", "buffers of ranks", "other state")


def describe(folder: Place, manifest: Manifest, problems: Sequence[str]) -> dict[str, Any]:
    """Describe a checkpoint, without tensor values, as JSON.

    `optimizer`, `lr_scheduler`, `loss_scale` and `config` are tagged JSON.
    """
    state = manifest.state
    return {
        "tag": manifest.tag,
        "folder": str(folder),
        "saved": manifest.saved,
        "writer": manifest.writer,
        "ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        "complete": not problems,
        "problems": list(problems),
        "counters": state.get("counters"),
        "kinds": _kinds(manifest),
        "aliases": dict(manifest.aliases),
        "left_out": list(manifest.left_out),
        "optimizer": state.get("optimizer"),
        "parameters_by_group": Counter(
            "frozen" if group is None else str(group) for group in manifest.parameters.values()
        ),
        "lr_scheduler": state.get("lr_scheduler"),
        "loss_scale": state.get("loss_scale"),
        "client_state_keys": _keys(state.get("client_state")),
        "config": state.get("config"),
        "files": [{"name": file.name, "bytes": file.nbytes} for file in manifest.files],
    }


def describe_tensors(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": list(stored.shape),
            "bytes": stored.nbytes,
            "files": sorted({manifest.files[part.file].name for part in stored.parts}),
        }
        for name, stored in sorted(manifest.tensors.items())
    ]


def _kinds(manifest: Manifest) -> list[dict[str, Any]]:
    """Count the tensors, elements and bytes of each kind (weights, buffers, states), and list their dtypes."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, stored in manifest.tensors.items():
        kind = kinds.setdefault(_kind(name, manifest), {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}})
        kind["tensors"] += 1
        kind["elements"] += stored.numel
        kind["bytes"] += stored.nbytes
        kind["dtypes"][DTYPE_NAMES[stored.dtype]] = None
    ordered = sorted(kinds, key=lambda kind: (_KINDS.index(kind.partition(":")[0]), kind))
    return [{"kind": kind, **kinds[kind], "dtypes": [*kinds[kind]["dtypes"]]} for kind in ordered]


def _kind(name: str, manifest: Manifest) -> str:
    prefix, _, rest = name.partition("/")
    if prefix == "model":
        if rest not in manifest.parameters:
            return "buffers"
        return "frozen parameters" if manifest.parameters[rest] is None else "trained parameters"
    if prefix == "optimizer":
        return f"optimizer: {rest.rpartition('/')[2]}"
    return "buffers of ranks" if prefix == "buffer" else "other state"


def _keys(tree: Any) -> list[str]:
    """Return the keys of a tagged dict."""
    if not isinstance(tree, dict):
        return []
    return [spell(key) for key, _ in tree["$dict"]] if "$dict" in tree else [*tree]


def spell(tree: Any) -> str:
    """Format tagged JSON on one readable line."""
    if isinstance(tree, list):
        return f"[{', '.join(map(spell, tree))}]"
    if not isinstance(tree, dict):
        return str(tree)
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if tag in ("$tensor", "$complex128_tensor", "$ndarray"):
        return f"a {tag.removeprefix('$')}"
    if tag.startswith("$") and tag != "$dict":
        return spell(tree[tag])
    pairs = tree[tag] if tag == "$dict" else tree.items()
    return f"{{{', '.join(f'{spell(key)}: {spell(value)}' for key, value in pairs)}}}"


# -- verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """Damage of a file, or of bytes [start, stop) in it, with the affected tensors."""

    file: str
    problem: str
    tensors: tuple[str, ...] = ()
    start: int | None = None
    stop: int | None = None

    def as_json(self) -> dict[str, Any]:
        where = None if self.start is None else [self.start, self.stop]
        return {"file": self.file, "problem": self.problem, "tensors": list(self.tensors), "bytes": where}

    @property
    def text(self) -> str:
        """Description of the damage, without the file."""
        if self.start is not None:
            return f"{self.tensors[0]!r}, bytes {self.start} to {self.stop}: {self.problem}"
        named = ", ".join(self.tensors[:5]) + (", ..." if len(self.tensors) > 5 else "")
        return self.problem + (f"; {len(self.tensors)} tensors are affected: {named}" if named else "")


def verify(found: folders.FoundCheckpoint, advance: Callable[[int], None]) -> Iterator[Damage]:
    """Read all bytes of a checkpoint, and yield every damage. `advance` is called with the number of bytes checked."""
    if found.manifest is None:
        yield Damage(str(found.folder / NAME), "; ".join(found.problems))
        return
    for file, parts in zip(found.manifest.files, found.manifest.parts_by_file, strict=True):
        inside = [(name, stored.dtype.itemsize, part) for name, stored, part in parts]
        inside.sort(key=lambda entry: entry[2].offset)
        for damage in _verify_file(found.folder / file.name, file, inside, advance):
            if gone := folders.removal(found.folder, found.manifest):
                raise RemovedError(gone)
            yield damage


def _verify_file(
    path: Place, file: ShardFile, parts: Sequence[tuple[str, int, StoredPart]], advance: Callable[[int], None]
) -> Iterator[Damage]:
    """Check the size of a file, its header, and its tensors in the order of their offsets."""
    try:
        opened = open_file(path)
    except OSError as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {reason(error)}"
        yield Damage(str(path), problem, tuple(dict.fromkeys(name for name, _, _ in parts)))
        advance(file.nbytes)
        return
    with opened:
        if opened.size != file.nbytes:
            problem = f"truncated or overwritten: it has {opened.size} bytes, but {file.nbytes} were written"
            yield Damage(str(path), problem)
        header = memoryview(bytearray(file.header_bytes))
        if problem := _read(opened, header, 0, file.header_checksum):
            yield Damage(str(path), f"the header: {problem}")
        advance(file.header_bytes)
        left = file.nbytes - file.header_bytes
        for name, itemsize, part in parts:
            yield from _verify_part(opened, path, name, part, itemsize, advance)
            left -= (part.stop - part.start) * itemsize
        if left:
            yield Damage(str(path), f"{left} bytes belong to no tensor of the manifest and have no checksum")
            advance(left)


def _verify_part(
    opened: OpenFile, path: Place, name: str, part: StoredPart, itemsize: int, advance: Callable[[int], None]
) -> list[Damage]:
    """Check one part of a tensor. Adjacent ranges with the same problem are reported as one."""
    end = part.offset + (part.stop - part.start) * itemsize
    buffer = memoryview(bytearray(min(RANGE_BYTES, end - part.offset)))
    found: list[Damage] = []
    for number, start in enumerate(range(part.offset, end, RANGE_BYTES)):
        stop = min(start + RANGE_BYTES, end)
        problem = _read(opened, buffer[: stop - start], start, part.checksums[number])
        advance(stop - start)
        if problem and found and (found[-1].problem, found[-1].stop) == (problem, start):
            found[-1] = replace(found[-1], stop=stop)
        elif problem:
            found.append(Damage(str(path), problem, (name,), start, stop))
    return found


def _read(opened: OpenFile, buffer: memoryview, offset: int, expected: int) -> str:
    """Fill the buffer from a file and verify its checksum. Return the problem, or "" if there is none."""
    try:
        got = opened.read_into(buffer, offset)
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    if got < len(buffer):
        return "truncated, the file ends before them"
    return "" if checksum(buffer) == expected else "damaged, the checksum does not match"
