"""Safe access to the files of a checkpoint: open regular files only, and check JSON field by field.

The folder of a checkpoint may be untrusted. Opening a FIFO would block forever, and reading a device would exhaust
memory. Files are therefore opened without blocking, and their type is checked before they are read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from onefold.disk_waits import waiting_for_disk


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or incompatible. The message names the file, the problem and the fix."""


class RemovedError(CheckpointError):
    """A checkpoint was removed or replaced by another process while it was read."""


# -- regular files -----------------------------------------------------------------------------------------------------

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


def read_small(path: Path, most: int) -> bytes:
    """Read a whole regular file of at most `most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= most else b""  # allocates as much as is asked for
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, more than the limit of {most}", str(path))
    return data


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer from a file and return the number of bytes read. The kernel reads at most 2 GiB per call."""
    done = 0
    while done < len(buffer) and (got := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += got
    return done


def reason(error: Exception) -> str:
    """Return the reason of an OSError without the path, or the message of another error."""
    return getattr(error, "strerror", None) or str(error)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with waiting_for_disk("the flush of", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_mode(folder: Path) -> int:
    """Return the mode of new files in a folder: 0600 if no other user can enter it, otherwise what the umask leaves."""
    return 0o666 if stat.S_IMODE(folder.stat().st_mode) & 0o077 else 0o600


def make_private_folder(path: Path) -> None:
    """Create a folder that no other user can enter, with its parents if they do not exist."""
    for folder in (*reversed(path.parents), path):
        if folder == path or not folder.exists():
            with suppress(FileExistsError):  # another rank has created it
                folder.mkdir(0o700)


def replace_file(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write a file atomically: after a crash it has either the old content or the new content.

    The mode is that of new files in its folder unless another one is given.
    """
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}.partial")
    mode = file_mode(path.parent) if mode is None else mode
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with waiting_for_disk("the write of", path), os.fdopen(os.open(partial, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    sync(path.parent)


# -- JSON fields -------------------------------------------------------------------------------------------------------

_HEXADECIMAL = re.compile("[0-9a-f]{16}")
_MOST = 2**63 - 1


def parse_json(text: bytes) -> Any:
    """Parse JSON strictly, without duplicate keys and NaN."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is given twice: {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def check_text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} must be a string, not {spell(value)}")
    return value


def check_whole(value: Any, where: str, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where} must be a whole number from {least} to {most}, not {spell(value)}")
    return value


def check_finite(value: Any, where: str) -> float:
    require(type(value) in (int, float) and math.isfinite(value), value, "a finite number", where)
    return float(value)


def check_list(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{where} must be a list, not {spell(value)}")
    return value


def check_object(value: Any, where: str, *keys: str) -> dict[str, Any]:
    """Require an object that has at least these keys."""
    if type(value) is not dict:
        raise ValueError(f"{where} must be an object, not {spell(value)}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return value


def check_hexadecimal(value: Any, where: str) -> int:
    require(type(value) is str and _HEXADECIMAL.fullmatch(value), value, "16 hexadecimal digits", where)
    return int(value, 16)


def require(fits: object, value: Any, what: str, where: str) -> None:
    if not fits:
        raise ValueError(f"{where} must be {what}, not {spell(value)}")


def spell(value: Any) -> str:
    """Format a value for an error message, on one short line."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python formats
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:57]}..."
