"""Peer copies: copies of the training state in the memory of the nodes, for restarts.

[Note: peer copies]
The launcher of each node owns a private folder in shared memory, which outlives its ranks. Every n steps, each rank
writes its shard to the folder of its node, in the background and in the format of checkpoints. With several nodes, the
launcher of the next node mirrors the files, so that each file is on two nodes:

    NODE_FOLDER/
      complete                                the name of the newest copy that is whole and mirrored
      rejected                                the name of the newest copy that must not be resumed from, if any
      copy-START-NUMBER-ENGINE-RANKS/
        data-.../rank-00000.safetensors       a shard, of a rank of this node or of the node before it
        data-.../rank-00000.json              its record, written when the shard is complete
        header.json                           what rank 0 adds, written when the shards of all ranks are complete
        manifest.json                         joined from header and records, at a restart

Names are ordered by time: by the start of the ranks, then by the number of the copy. A new copy begins only when the
last one is complete, and replaces the one before that. At a restart the launchers exchange lists of their files, fetch
the missing ones, and pass the names of whole copies to the ranks, newest first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.manifest import MAX_BYTES, NAME, Manifest, join_parts
from onefold.checkpoint.format.shard_files import ShardRecord
from onefold.storage.place import read_small, replace_file

# The variables with the folder of the node, and with the names of the copies from which a restarted rank may resume.
FOLDER_VARIABLE, RESUME_VARIABLE = "ONEFOLD_PEER_COPIES", "ONEFOLD_PEER_COPIES_TO_RESUME"
# The variable that names a node without a folder for copies, and the reason.
PROBLEM_VARIABLE = "ONEFOLD_PEER_COPIES_PROBLEM"
HEADER, COMPLETE, REJECTED = "header.json", "complete", "rejected"
# The newest complete copy, and one that is being written or was complete before.
SLOTS = 2
_COPY = re.compile(r"copy-(?P<start>\d{6})-(?P<number>\d{8})-(?P<engine>\d{4})-(?P<ranks>\d{6})")
_FILE = re.compile(r"header\.json|data-[0-9A-Za-z-]{1,40}/rank-(?P<rank>\d{5,6})\.(json|safetensors)")
_MOST_BYTES_OF_NAME = 200
# The field of a header with the identity of the program.
_PROGRAM = "program"


def copy_name(start: int, number: int, engine: int, num_ranks: int) -> str:
    """Return the name of a copy. Later copies have later names."""
    return f"copy-{start:06}-{number:08}-{engine:04}-{num_ranks:06}"


def engine_of(name: str) -> int:
    """Return the number of the engine whose state a copy has."""
    match = _COPY.fullmatch(name)
    assert match is not None, name
    return int(match["engine"])


def is_file_of_copy(path: str) -> bool:
    """Return whether a path `copy/file` names a file that ranks write to a copy."""
    name, _, file = path.partition("/")
    return _COPY.fullmatch(name) is not None and _FILE.fullmatch(file) is not None


def node_folder() -> Path:
    """Return the folder of this node. A rank finds it in its environment."""
    return Path(os.environ[FOLDER_VARIABLE])


def program_identity() -> str:
    """Return a text that differs between programs, because a rank may run several ones, one after the other."""
    return hashlib.blake2b("\0".join(sys.argv).encode(), digest_size=16).hexdigest()


def program_of(copy: Path) -> str | None:
    """Return the identity of the program that has made a whole copy."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads(read_small(copy / HEADER, MAX_BYTES)).get(_PROGRAM)
        return found if isinstance(found, str) else None
    return None


def num_nodes() -> int:
    """Return the number of nodes of this start, as the launcher of this rank has set it."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def list_copies(folder: Path) -> list[str]:
    """Return the names of all copies in a folder, newest first."""
    return sorted((name for name in os.listdir(folder) if _COPY.fullmatch(name)), reverse=True)


def files_of(copy: Path) -> dict[str, int]:
    """Return the complete files of a copy with their sizes. A shard is complete when its record is there."""
    found = {}
    for path in (*copy.glob("data-*/rank-*"), copy / HEADER):
        name = path.relative_to(copy).as_posix()
        with suppress(FileNotFoundError):  # removed in the meantime
            if _FILE.fullmatch(name) and (path.name == HEADER or path.with_suffix(".json").exists()):
                found[name] = path.stat().st_size
    return found


def missing_files(files: Collection[str], ranks: Collection[int]) -> bool:
    """Return whether files of any of these ranks are missing; rank 0 also writes the header."""
    present = {path.rpartition("/")[2] for path in files}
    needed = {f"rank-{rank:05}.{kind}" for rank in ranks for kind in ("json", "safetensors")}
    return not (needed | ({HEADER} if 0 in ranks else set())) <= present


def is_whole(name: str, files: Collection[str]) -> bool:
    """Return whether these are all files of a copy."""
    match = _COPY.fullmatch(name)
    return match is not None and not missing_files(files, range(int(match["ranks"])))


def rank_of(file: str) -> int:
    """Return the rank that has written a file of a copy."""
    match = _FILE.fullmatch(file)
    assert match is not None, file
    return int(match["rank"] or 0)


def read_complete(folder: Path) -> str | None:
    """Return the name of the newest complete copy."""
    return _read_name(folder / COMPLETE)


def write_complete(folder: Path, name: str) -> None:
    """Record the name of the newest complete copy."""
    replace_file(folder / COMPLETE, name.encode())


def read_rejected(folder: Path) -> str | None:
    """Return the name of the newest copy that was rejected."""
    return _read_name(folder / REJECTED)


def reject(folder: Path, name: str) -> None:
    """Let no restart resume from this copy, or from an earlier one."""
    replace_file(folder / REJECTED, name.encode())


def is_copy_name(name: object) -> bool:
    """Return whether this is the name of a copy."""
    return isinstance(name, str) and _COPY.fullmatch(name) is not None


def _read_name(path: Path) -> str | None:
    with suppress(OSError):
        name = read_small(path, _MOST_BYTES_OF_NAME).decode(errors="replace")
        return name if is_copy_name(name) else None
    return None


def make_room(folder: Path, kept: Collection[str], rank: int, *, is_first_of_node: bool) -> None:
    """Remove all copies but those that are kept. Each rank removes its own shard before it writes a new one."""
    for copy in (folder / name for name in list_copies(folder) if name not in kept):
        for path in copy.glob(f"data-*/rank-{rank:05}.*"):
            path.unlink(missing_ok=True)
        if is_first_of_node:
            shutil.rmtree(copy, ignore_errors=True)


def keep_parts_of_node(copy: Path, node: int, num_nodes: int) -> None:
    """Remove parts of a whole copy, so that each part stays on two nodes, next to each other."""
    match = _COPY.fullmatch(copy.name)
    assert match is not None, copy
    for path in copy.glob("data-*/rank-*"):
        first = rank_of(path.relative_to(copy).as_posix()) * num_nodes // int(match["ranks"])
        if node not in (first, (first + 1) % num_nodes):
            path.unlink(missing_ok=True)


def write_header(copy: Path, **fields: Any) -> None:
    """Write what rank 0 adds to the records of all ranks: the fields of a manifest without files and tensors.

    On one node the copy is complete then. On several, the launcher of rank 0 waits until all of it is mirrored.
    """
    own = {"tag": copy.name, "saved": datetime.now(UTC).isoformat(), _PROGRAM: program_identity()}
    text = json.dumps({**fields, **own})
    replace_file(copy / HEADER, text.encode())
    if num_nodes() == 1:
        write_complete(copy.parent, copy.name)


def join_copy(copy: Path) -> Manifest:
    """Write the manifest of a whole copy, so that it can be read as a checkpoint."""
    fields: dict[str, Any] = json.loads(read_small(copy / HEADER, MAX_BYTES))
    fields.pop(_PROGRAM, None)
    paths = sorted((file for file in files_of(copy) if file != HEADER and file.endswith(".json")), key=rank_of)
    records = [ShardRecord.from_json(json.loads(read_small(copy / path, MAX_BYTES))) for path in paths]
    parts = (part for rank, record in enumerate(records) for part in record.numbered(rank))
    manifest = Manifest(
        **{**fields, "world_size": len(records)},
        files=tuple(record.file for record in records),
        tensors=join_parts(parts),
        ranks=[record.own for record in records],
    )
    replace_file(copy / NAME, manifest.to_text())
    return manifest
