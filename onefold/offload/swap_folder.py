"""The folder that one rank of one job keeps its swapped tensors in: made, locked, measured, removed.

[Note: whose folder is it]
`<nvme_path>/onefold-swap/<job>-rank<r>` holds two files: `lock`, which its process holds with flock for as long as it
lives, and `data`. The kernel lets go of the lock however the process ends, so a folder whose lock can be taken belongs
to nobody, and the next job on that drive removes it. Only the two names above are ever unlinked, and folders only while
they are empty: whatever else lies there is the user's.

Ranks start together, so one may take the folder of another for a leftover while it is made and not yet locked. Whoever
makes a folder therefore looks, once it has the lock, whether the lock is still a file in a folder, and otherwise makes
another. A rank cleans up once, so this ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress

from onefold.config import ConfigError
from onefold.log import logger
from onefold.offload.host_memory import PAGE

_SHELF, _LOCK, _DATA = "onefold-swap", "lock", "data"
_OURS = re.compile(r"[0-9a-f]{16}-rank\d+")
_NUM_ATTEMPTS = 1000


class SwapFolder:
    """One locked folder on one drive, and the file in it."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self.data_path = os.path.join(path, _SHELF)
        self.data_fd = self._lock_fd = -1
        self.direct = False
        self._folder: str | None = None
        self._pid = -1

    def prepare(self) -> None:
        """Makes the user's path if need be, and removes what dead jobs left there."""
        try:
            os.makedirs(self.path, exist_ok=True)
            _remove_leftovers(os.path.join(self.path, _SHELF))
        except OSError as error:
            raise _unusable(self.path, error) from error

    def make(self, num_bytes: int) -> None:
        """Takes the bytes now, so that a drive that fills up shows here and not in a step. They read as zero."""
        try:
            self._make_and_lock()
            fd = self.data_fd = os.open(self.data_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Before O_DIRECT: where the file system cannot allocate, the C library writes single bytes instead.
            os.posix_fallocate(fd, 0, num_bytes)
            direct_fd = _open_direct(self.data_path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _too_small(self.path, num_bytes, _free_bytes(self.path), error.strerror) from error
            raise _unusable(self.path, error) from error
        if direct_fd is None:
            logger.warning(
                "nvme_path %s: its file system does not take O_DIRECT, so what is swapped passes through the page "
                "cache: slower, and host memory fills with copies",
                self.path,
            )
        else:
            os.close(fd)
            self.data_fd, self.direct = direct_fd, True

    def remove(self) -> None:
        """The lock goes last: until then nobody else takes the folder for a leftover."""
        if self._folder is None or os.getpid() != self._pid:  # A forked child's exit must not take the parent's files.
            return
        folder, self._folder = self._folder, None
        if self.data_fd >= 0:
            os.close(self.data_fd)
        _empty(folder)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self.data_fd = self._lock_fd = -1
        with suppress(OSError):  # Other ranks may still be in it.
            os.rmdir(os.path.dirname(folder))

    def _make_and_lock(self) -> None:
        self._pid = os.getpid()
        for _ in range(_NUM_ATTEMPTS):
            folder = os.path.join(self.path, _SHELF, f"{secrets.token_hex(8)}-rank{self.rank}")
            try:
                os.makedirs(folder, mode=0o700)
                self._folder = folder
                self._lock_fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # Taken for a leftover while it was empty, or the shelf was.
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if os.fstat(self._lock_fd).st_nlink:
                self.data_path = os.path.join(folder, _DATA)
                return
            os.close(self._lock_fd)
            self._lock_fd = -1
        raise FileNotFoundError(errno.ENOENT, "folders vanish as soon as they are made", self.path)


def check_space(folders: Sequence[tuple[SwapFolder, int]]) -> None:
    """Every file system must have room for all that this rank puts there; paths may share one."""
    on_device: dict[int, list[tuple[SwapFolder, int]]] = {}
    for folder, num_bytes in folders:
        on_device.setdefault(os.stat(folder.path).st_dev, []).append((folder, num_bytes))
    for found in on_device.values():
        path, needed = found[0][0].path, sum(num_bytes for _, num_bytes in found)
        free = _free_bytes(path)
        if free is not None and needed > free:
            raise _too_small(path, needed, free)


def _open_direct(path: str) -> int | None:
    """A real page there and back decides: some file systems open with O_DIRECT and then refuse."""
    fd = -1
    with mmap.mmap(-1, PAGE) as sent, mmap.mmap(-1, PAGE) as received:
        sent[:] = secrets.token_bytes(PAGE)
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            done = os.pwritev(fd, [sent], 0) == PAGE and os.preadv(fd, [received], 0) == PAGE
            if done and sent[:] == received[:]:
                sent[:] = bytes(PAGE)
                if os.pwritev(fd, [sent], 0) == PAGE:
                    return fd
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    if fd >= 0:
        os.close(fd)
    return None


def _remove_leftovers(shelf: str) -> None:
    for name in sorted(_names(shelf)):
        folder = os.path.join(shelf, name)
        if _OURS.fullmatch(name) and os.path.isdir(folder) and not os.path.islink(folder):
            _remove_if_dead(folder)


def _remove_if_dead(folder: str) -> None:
    """Harmless however many ranks do it at once: names are never used twice, and each step may find it done."""
    try:
        lock_fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR)
    except FileNotFoundError:  # Its maker, or somebody who cleaned up, died half-way; or it is just being made.
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and _LOCK not in _names(folder):
                logger.warning("left alone, as it has no lock but is not empty: %s", folder)
        return
    except OSError:  # Another user's.
        return
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unknown = ", ".join(sorted(_names(folder) - {_LOCK, _DATA}))
        if unknown:
            logger.warning("left alone, as it holds files that onefold did not make (%s): %s", unknown, folder)
        else:
            _empty(folder)
    except BlockingIOError:  # Its job lives.
        pass
    finally:
        os.close(lock_fd)


def _names(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _empty(folder: str) -> None:
    for name in (_DATA, _LOCK):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with suppress(OSError):  # Gone already, or the user put something in it.
        os.rmdir(folder)


def _free_bytes(path: str) -> int | None:
    """None where the file system does not say how large it is, as some in memory or over a network."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _too_small(path: str, needed: int, free: int | None, reason: str | None = None) -> ConfigError:
    has = "it does not say how many" if free is None else f"{free} ({free / 1e9:.2f} GB)"
    said = f" ({reason})" if reason else ""
    return ConfigError(
        f"nvme_path = {path}: this rank needs {needed} bytes ({needed / 1e9:.2f} GB) on that file system, and {has} "
        f"are free{said}; make room there, or let nvme_path name a larger drive"
    )


def _unusable(path: str, error: OSError) -> ConfigError:
    where = f" at {error.filename}" if error.filename and error.filename != path else ""
    return ConfigError(
        f"nvme_path = {path}: cannot be used as a swap folder ({error.strerror}{where}); "
        "let nvme_path name a folder that this user can write to"
    )
