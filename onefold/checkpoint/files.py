"""Files of a checkpoint's folder: only regular files are read, and small ones only up to a size.

A folder may come from anywhere. A FIFO in it would be waited for without end, a device be read until memory is gone.
Opened without blocking and asked what it is, neither is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, also by way of a link. Anything else is an OSError that says what it is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file", os.fspath(path))
    return descriptor


def read_small(path: Path, most: int) -> bytes:
    """All of a file that has at most so many bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, more than the {most} that it may", str(path))
    return data


def told(error: OSError) -> str:
    """What went wrong, without the path."""
    return error.strerror or str(error)
