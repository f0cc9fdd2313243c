"""A folder of checkpoints on disk: publishing, listing, cleaning and retention.

[Note: publishing]
A save writes its data to a new folder (`data-...`) inside the folder of the tag, and flushes files and folders to disk.
The rename of the manifest then switches the tag atomically from the old data to the new data. `latest` is replaced by a
rename too. Data folders that no manifest refers to are removed last. The job that writes a data folder holds a lock on
it, so that other jobs do not remove it. The lock is released when the process exits.

In an object store, a request that replaces the manifest takes the place of the rename. There are no locks: the object
`.lock` marks a data folder that is being written. It is removed at the end of the save, and ignored after a day,
because a killed job leaves it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import NAME, Manifest, ShardFile, checksum
from onefold.storage.file_lock import lock_file
from onefold.storage.object_path import ObjectPath, StorageError
from onefold.storage.place import (
    Place,
    file_mode,
    make_private_folder,
    open_file,
    read_small,
    reason,
    remove_tree,
    replace_file,
    sync,
)

LATEST = "latest"
# DeepSpeed puts a script of this name next to its checkpoints, and users expect it there.
SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = b'''#!/usr/bin/env python
"""The weights of the checkpoints in this folder, whole and in fp32.

    python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER [--tag TAG] [--max_shard_size 5GB] [--safe_serialization]

Needs onefold (`pip install onefold`), no GPU and no process group. `onefold export` does the same and more.
"""

from onefold.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
_DEEPSPEEDS_FILES = "*_states.pt"
_POINTER = b'{"format": "onefold-checkpoint", "see": "manifest.json"}\n'
_MAX_LATEST_BYTES = 4096
_DATA = re.compile(r"data-\d{8}T\d{6}-[0-9a-f]{8}")
_TIME = "%Y%m%dT%H%M%S"
LOCK = ".lock"
_PARTIAL = re.compile(rf"\.(manifest\.json|latest|zero_to_fp32\.py)-[0-9a-f]{{8}}\.partial|\.{_DATA.pattern}")
_STALE_SECONDS = 600
# Without locks, data folders that were not modified for this long count as abandoned.
_ABANDONED_SECONDS = 24 * 3600
# Files of one checkpoint that are examined at the same time.
_MOST_REQUESTS = 16


def check_tag(tag: object) -> str:
    """Return the tag as a string. Raise unless it is a plain folder name."""
    name = str(tag)
    plain = name == name.strip() and name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not plain or len(name.encode()) > 200:
        raise CheckpointError(f"tag {name!r} must be a plain folder name")
    if name == LATEST:
        raise CheckpointError("tag 'latest' is reserved for the file of that name. Use another tag.")
    return name


def data_folders(tag_folder: Place) -> list[str]:
    """Return the names of all data folders of a tag, published or not."""
    with suppress(FileNotFoundError):  # removed in the meantime
        return sorted(entry.name for entry in tag_folder.iterdir() if _DATA.fullmatch(entry.name) and entry.is_dir())
    return []


@contextmanager
def locked(folder: Place) -> Iterator[bool]:
    """Hold the lock of a data folder, and yield whether it was acquired. It is released when the process exits."""
    if isinstance(folder, ObjectPath):
        started = datetime.strptime(folder.name[len("data-") : -len("-00000000")], _TIME).replace(tzinfo=UTC)
        age = (datetime.now(UTC) - started).total_seconds()
        yield age > _ABANDONED_SECONDS or not (folder / LOCK).exists()
        return
    with os.fdopen(
        os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644 & file_mode(folder)), "rb"
    ) as file:
        try:
            lock_file(file, wait=False)
            ours = True
        except BlockingIOError:
            ours = False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise
            ours = time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
        yield ours


@contextmanager
def new_data_folder(tag_folder: Place, *, private: bool = False) -> Iterator[Place]:
    """Create a uniquely named data folder for one save, and hold its lock.

    With `private`, no other user can enter the folders of the tag, and files in them are created for this user only.
    """
    name = f"data-{datetime.now(UTC).strftime(_TIME)}-{secrets.token_hex(4)}"
    if isinstance(tag_folder, ObjectPath):
        if private:
            raise StorageError(
                f"checkpoint.private: {tag_folder} is in an object store, whose objects have no modes. Restrict the "
                "access to the bucket instead, and remove the key."
            )
        data = tag_folder / name
        (data / LOCK).write_bytes(b"")
        try:
            yield data
        finally:
            with suppress(OSError):  # the mark of a lost connection is ignored after a day
                (data / LOCK).unlink(missing_ok=True)
        return
    # The folder is renamed after it is locked, so that other jobs never see it unlocked.
    hidden = tag_folder / f".{name}"
    if private:
        make_private_folder(hidden)
        tag_folder.chmod(0o700)  # it may be that of an earlier save
    else:
        hidden.mkdir(parents=True)
    with locked(hidden):
        hidden.rename(tag_folder / name)
        yield tag_folder / name


def publish(save_dir: Place, manifest: Manifest, *, save_latest: bool) -> None:
    """Publish a manifest whose data files have been flushed, by renaming it into the folder of its tag."""
    tag_folder = save_dir / manifest.tag
    script = save_dir / SCRIPT_NAME
    if not script.exists():
        replace_file(script, SCRIPT)
        with suppress(OSError):  # some file systems do not support modes
            if isinstance(script, Path):
                mode = script.stat().st_mode
                script.chmod(mode | (mode & 0o444) >> 2)  # make it executable for users who may read it
    for folder in [*(tag_folder / name for name in manifest.data_folders), tag_folder, save_dir]:
        sync(folder)
    with suppress(PermissionError):  # the parent folder may not be readable
        sync(save_dir.parent)
    replace_file(tag_folder / NAME, manifest.to_text())
    if save_latest:
        replace_file(save_dir / LATEST, manifest.tag.encode(), mode=file_mode(tag_folder))


def put_pointer_files(tag_folder: Place, names: Sequence[str]) -> None:
    """Write files under the names by which other tools recognize a DeepSpeed checkpoint. They refer to the manifest."""
    for path in (tag_folder / name for name in names):
        if not path.exists():
            replace_file(path, _POINTER)


def _is_pointer(path: Place) -> bool:
    with suppress(OSError):  # includes files that are too large
        return read_small(path, len(_POINTER)) == _POINTER
    return False


def is_published(data: Place, *, as_latest: bool) -> bool:
    """Return whether the tag's manifest refers to this data folder and, with `as_latest`, `latest` names the tag."""
    tag_folder = data.parent
    try:
        latest = read_latest(tag_folder.parent) if as_latest else tag_folder.name
        return data.name in Manifest.read(tag_folder).data_folders and latest == tag_folder.name
    except (ValueError, OSError):
        return False


def clean(tag_folder: Place) -> None:
    """Remove data folders that the tag's manifest does not refer to and that no job is writing."""
    for folder in [tag_folder / name for name in data_folders(tag_folder)]:
        with suppress(FileNotFoundError), locked(folder) as ours:
            # Read the manifest under the lock, because the previous holder may have published the folder.
            if ours and folder.name not in _named(tag_folder):
                remove_tree(folder)
    if isinstance(tag_folder, ObjectPath):  # objects have no temporary names
        return
    for entry in [*tag_folder.iterdir(), *tag_folder.parent.iterdir()]:
        with suppress(FileNotFoundError):
            if _PARTIAL.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                remove_tree(entry) if entry.is_dir() else entry.unlink()


def _named(tag_folder: Place) -> set[str]:
    try:
        return Manifest.read(tag_folder).data_folders
    except CheckpointError:
        if (tag_folder / NAME).exists():  # damaged: it may refer to any folder, so nothing is removed
            return {entry.name for entry in tag_folder.iterdir()}
        return set()


def remove(tag_folder: Place) -> None:
    """Remove a checkpoint: first its manifest, then its data. Files that onefold did not write are kept."""
    (tag_folder / NAME).unlink(missing_ok=True)
    for path in tag_folder.glob(_DEEPSPEEDS_FILES):
        if _is_pointer(path):
            path.unlink()
    sync(tag_folder)
    clean(tag_folder)
    with suppress(OSError):  # not empty: it contains other files
        tag_folder.rmdir()


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint found in a folder, with its manifest or its problems."""

    tag: str
    folder: Place
    manifest: Manifest | None
    problems: tuple[str, ...]
    removed: bool = False
    """The checkpoint was removed by another process while it was examined, and is not damaged."""

    @property
    def age(self) -> tuple[str, int, str]:
        """Sort key that orders older checkpoints before newer ones."""
        if self.manifest is not None:
            return (self.manifest.saved, self.manifest.global_steps, self.tag)
        with suppress(OSError):  # removed in the meantime
            if isinstance(self.folder, ObjectPath):
                return ("", 0, self.tag)
            return (datetime.fromtimestamp(self.folder.stat().st_mtime, UTC).isoformat(), 0, self.tag)
        return ("", 0, self.tag)


def is_deepspeeds(path: Place) -> bool:
    """Return whether a folder contains a checkpoint that DeepSpeed wrote."""
    with suppress(FileNotFoundError):  # removed in the meantime
        return any(not _is_pointer(file) for file in path.glob("*_model_states.pt"))
    return False


def is_dcp(path: Place) -> bool:
    """Return whether a folder contains a checkpoint of torch.distributed.checkpoint."""
    return (path / ".metadata").exists()


def is_tag_folder(folder: Place) -> bool:
    """Return whether a folder contains a published checkpoint, of onefold or of DeepSpeed."""
    return (folder / NAME).exists() or is_deepspeeds(folder)


def examine(folder: Place) -> FoundCheckpoint:
    """Check whether a checkpoint is complete: its manifest, and the sizes and headers of all its files."""
    try:
        manifest = Manifest.read(folder)
    except (CheckpointError, OSError) as error:
        hint = f". It is DeepSpeed's: use onefold import-deepspeed {folder.parent} OUT" if is_deepspeeds(folder) else ""
        return FoundCheckpoint(folder.name, folder, None, (f"{error}{hint}",))
    with ThreadPoolExecutor(_MOST_REQUESTS) as pool:
        found = pool.map(lambda file: _file_problem(folder / file.name, file), manifest.files)
        problems = tuple(problem for problem in found if problem)
    gone = removal(folder, manifest) if problems else ""
    return FoundCheckpoint(folder.name, folder, manifest, (gone,) if gone else problems, removed=bool(gone))


def removal(folder: Place, manifest: Manifest) -> str:
    """Return an error message if a checkpoint was removed or replaced after its manifest was read, otherwise ""."""
    try:
        now = Manifest.read(folder)
    except CheckpointError:
        if (folder / NAME).exists():  # damaged, but not removed
            return ""
        return (
            f"{folder} was removed while it was read, by a job (checkpoint.keep_last) or by onefold ckpt rm. "
            "Read another checkpoint, or keep more (checkpoint.keep_last, keep_every)."
        )
    if now.data_folders == manifest.data_folders:
        return ""
    return f"{folder} was replaced by a new save while it was read. Read it again."


def _file_problem(path: Place, file: ShardFile) -> str:
    """Return what is wrong with the size or the header of a file, or "" if nothing is."""
    try:
        with open_file(path) as opened:
            if opened.size != file.nbytes:
                return f"{path}: truncated or overwritten: it has {opened.size} bytes, but {file.nbytes} were written"
            header = memoryview(bytearray(file.header_bytes))
            opened.read_into(header, 0)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {reason(error)}"
    if checksum(header) != file.header_checksum:
        return f"{path}: the header is damaged: its checksum does not match"
    return ""


def list_tags(save_dir: Place) -> list[FoundCheckpoint]:
    """List all onefold checkpoints in a folder, complete or not, newest first."""
    if not save_dir.is_dir():
        return []
    found = []
    for entry in save_dir.iterdir():
        with suppress(OSError):
            if entry.is_dir() and ((entry / NAME).exists() or any(_DATA.fullmatch(e.name) for e in entry.iterdir())):
                one = examine(entry)
                if entry.is_dir():  # otherwise retention has removed it in the meantime
                    found.append(one)
    return sorted(found, key=lambda tag: tag.age, reverse=True)


def read_latest(save_dir: Place) -> str | None:
    """Return the tag that `latest` names, or None if there is no such file. Raise if its content is not a tag."""
    try:
        return check_tag(read_small(save_dir / LATEST, _MAX_LATEST_BYTES).decode().strip())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{save_dir / LATEST} does not name a checkpoint: {reason(error)}") from None


def latest_of(save_dir: Place) -> tuple[str | None, str | None]:
    """Return the tag that `latest` names and the problem with it, either of which may be None."""
    try:
        latest = read_latest(save_dir)
    except CheckpointError as error:
        return None, str(error)
    if latest is not None and not (save_dir / latest).is_dir():
        return latest, f"{save_dir / LATEST} names {latest}, which does not exist"
    return latest, None


def choose(save_dir: Place, tag: str | None) -> tuple[list[FoundCheckpoint], list[str]]:
    """Return the checkpoints to try, in order of preference, and warnings.

    With `tag`, only that checkpoint is returned. Otherwise the checkpoint that `latest` names comes first, followed by
    all others, newest first.
    """
    if tag is not None:
        return [examine(save_dir / check_tag(tag))], []
    warnings = []
    try:
        latest = read_latest(save_dir)
    except CheckpointError as error:
        latest, warnings = None, [str(error)]
    found = list_tags(save_dir)
    if latest is not None:
        named = [entry for entry in found if entry.tag == latest] or [examine(save_dir / latest)]
        found = named + [entry for entry in found if entry.tag != latest]
    return found, warnings


def retain(save_dir: Place, *, keep_last: int | None, keep_every: int | None) -> None:
    """Remove all checkpoints but the `keep_last` newest and those whose step is a multiple of `keep_every`.

    Damaged checkpoints are not counted and not removed.
    """
    complete = [found for found in list_tags(save_dir) if not found.problems] if keep_last else []
    try:
        kept = {found.tag for found in complete[:keep_last]} | {read_latest(save_dir)}
    except CheckpointError:  # `latest` is damaged: it may name any checkpoint, so nothing is removed
        return
    for found in complete[keep_last:]:
        assert found.manifest is not None
        every = keep_every is not None and found.manifest.global_steps % keep_every == 0
        if found.tag not in kept and not every:
            remove(found.folder)
