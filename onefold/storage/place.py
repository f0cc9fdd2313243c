"""The place of a file or a folder: a path of the local file system, or the URL of an object.

The folder of a checkpoint may be untrusted. Opening a FIFO would block forever, and reading a device would exhaust
memory. Files are therefore opened without blocking, and their type is checked before they are read.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from typing import Self

from onefold.disk_waits import waiting_for_disk
from onefold.storage.object_path import STORES, ObjectFile, ObjectPath, ObjectUpload, StorageError

Place = Path | ObjectPath
PlaceLike = str | os.PathLike[str] | ObjectPath
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*):(/+)(.*)", re.DOTALL)


def place(path: PlaceLike) -> Place:
    """Return the place that a path or a URL names. `file://` URLs are paths of the local file system."""
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    found = _URL.fullmatch(text)
    if found is None:
        return Path(text)
    protocol, slashes, rest = found[1].lower(), found[2], found[3]
    if slashes == "/" and protocol not in STORES:  # a folder whose name ends with a colon
        return Path(text)
    if slashes == "/":
        raise StorageError(f"{text}: a URL that pathlib has changed. Pass {protocol}://{rest} as a string.")
    if protocol in ("file", "local"):
        if not slashes.startswith("///"):
            raise StorageError(f"{text}: must be an absolute path, such as {protocol}:///data/run")
        return Path(slashes[2:] + rest)
    return ObjectPath.parse(f"{protocol}://{rest}")


def absolute(path: Place) -> Place:
    """Return a path that does not depend on the working folder."""
    return path if isinstance(path, ObjectPath) else Path(os.path.abspath(path))


def local_path(path: PlaceLike, what: str) -> Path:
    """Return a path of the local file system. Raise for the URL of an object. `what` names the option."""
    found = place(path)
    if isinstance(found, ObjectPath):
        raise StorageError(f"{what} {found}: must be a path of a file system, not a URL")
    return found


# -- reading -----------------------------------------------------------------------------------------------------------

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file, or a link to one, and return its descriptor. Raise an OSError for other file types."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file", os.fspath(path))
    return descriptor


class OpenFile(AbstractContextManager["OpenFile"]):
    """A file or an object that is open for reading."""

    def __init__(self, path: Place) -> None:
        self._object = ObjectFile(path) if isinstance(path, ObjectPath) else None
        self._descriptor = open_regular(path) if isinstance(path, Path) else -1

    @property
    def size(self) -> int:
        return self._object.size if self._object is not None else os.fstat(self._descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer and return the number of bytes read. The kernel reads at most 2 GiB per call."""
        if self._object is not None:
            return self._object.read_into(buffer, offset)
        done = 0
        while done < len(buffer) and (got := os.preadv(self._descriptor, [buffer[done:]], offset + done)):
            done += got
        return done

    def release(self) -> None:
        """Free the memory for bytes that were read ahead."""
        if self._object is not None:
            self._object.release()

    def close(self) -> None:
        self.release()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_file(path: Place) -> OpenFile:
    """Open a regular file or an object. Raise an OSError for other file types."""
    return OpenFile(path)


def read_small(path: Place, most: int) -> bytes:
    """Read a whole file of at most `most` bytes."""
    if isinstance(path, ObjectPath):
        size = path.size()
        data = path.read_ranges([(0, size)])[0] if 0 < size <= most else b""
    else:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size + 1) if size <= most else b""  # allocates as much as is asked for
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, more than the limit of {most}", str(path))
    return data


def reason(error: Exception) -> str:
    """Return the reason of an OSError without the path, or the message of another error."""
    return getattr(error, "strerror", None) or str(error)


def file_size(path: Place) -> int:
    """Return the number of bytes of a file. Raise FileNotFoundError if there is none."""
    return path.size() if isinstance(path, ObjectPath) else path.stat().st_size


def tree_size(folder: Place) -> int:
    """Return the number of bytes of all files in a folder."""
    if isinstance(folder, ObjectPath):
        return folder.tree_size()
    total = 0
    with suppress(FileNotFoundError):  # the folder may be removed in the meantime
        for path in folder.rglob("*"):
            with suppress(OSError):  # a save may remove its temporary files in the meantime
                total += path.stat().st_size if path.is_file() else 0
    return total


# -- writing -----------------------------------------------------------------------------------------------------------


class NewFile(AbstractContextManager["NewFile"]):
    """A new file or object. On a file system, ranges may be written in any order; in an object store, in order."""

    def __init__(self, path: Place, nbytes: int) -> None:
        """`nbytes` is the size that the file will have."""
        self._path = str(path)
        self._upload = ObjectUpload(path, nbytes) if isinstance(path, ObjectPath) else None
        self._file = _create(path, os.O_TRUNC, file_mode(path.parent)) if isinstance(path, Path) else None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if self._upload is not None:
            self._upload.write(data, offset)
            return
        assert self._file is not None
        with waiting_for_disk("the write of", self._path):
            write_all(self._file.fileno(), data, offset)

    def finish(self) -> int:
        """Flush the file to disk, or complete the object, and return its size."""
        if self._upload is not None:
            return self._upload.finish()
        assert self._file is not None
        with self._file:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def __exit__(self, *exc_info: object) -> None:
        if self._upload is not None:
            self._upload.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest, done = memoryview(data), 0
    while done < len(rest):
        done += os.pwrite(descriptor, rest[done:], offset + done)


def sync(path: Place) -> None:
    """Flush a file or a directory to disk. An object is stored when its upload has returned."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with waiting_for_disk("the flush of", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_mode(folder: Place) -> int:
    """Return the mode of new files in a folder: 0600 if no other user can enter it, otherwise what the umask leaves."""
    is_open = isinstance(folder, ObjectPath) or stat.S_IMODE(folder.stat().st_mode) & 0o077
    return 0o666 if is_open else 0o600


def make_private_folder(path: Path) -> None:
    """Create a folder that no other user can enter, with its parents if they do not exist."""
    for folder in (*reversed(path.parents), path):
        if folder == path or not folder.exists():
            with suppress(FileExistsError):  # another rank has created it
                folder.mkdir(0o700)


def _create(path: Path, flags: int, mode: int) -> FileIO:
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, mode), "r+")


def replace_file(path: Place, content: bytes, *, mode: int | None = None) -> None:
    """Write a file atomically: after a crash it has either the old content or the new content.

    The mode is that of new files in its folder unless another one is given.
    """
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return
    mode = file_mode(path.parent) if mode is None else mode
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}.partial")
    try:
        with waiting_for_disk("the write of", path), _create(partial, os.O_EXCL, mode) as file:
            write_all(file.fileno(), content, 0)
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    sync(path.parent)


def remove_tree(folder: Place) -> None:
    """Remove a folder and its content."""
    if isinstance(folder, ObjectPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder)
