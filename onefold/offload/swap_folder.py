"""The folder that stores the swapped tensors of one rank of one job.

[Note: whose folder is it]
`<nvme_path>/onefold-swap/<job>-rank<r>` contains two files: `data`, and `lock`, which the process locks while it runs.
The kernel releases the lock when the process ends. So a folder whose lock can be acquired belongs to a dead job, and
the next job on that drive removes it. Only these two files are ever unlinked, and folders only if they
are empty, because all other files belong to the user.

Ranks start at the same time, so one may remove the folder of another rank that is not locked yet. After it has acquired
the lock, a rank therefore checks that the lock file still exists, and otherwise creates another folder. Each rank
removes leftovers only once, so this terminates.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress

from onefold.config import ConfigError
from onefold.log import logger
from onefold.offload.host_memory import PAGE
from onefold.storage.file_lock import lock_file

_SHELF, _LOCK, _DATA = "onefold-swap", "lock", "data"
_OURS = re.compile(r"[0-9a-f]{16}-rank\d+")
_NUM_ATTEMPTS = 1000


class SwapFolder:
    """A locked folder on one drive, and its data file."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self.data_path = os.path.join(path, _SHELF)
        self.data_fd = self._lock_fd = -1
        self.direct = False
        self._folder: str | None = None
        self._pid = -1

    def prepare(self) -> None:
        """Create the user's path if it does not exist, and remove the folders of dead jobs."""
        try:
            os.makedirs(self.path, exist_ok=True)
            _remove_leftovers(os.path.join(self.path, _SHELF))
        except OSError as error:
            raise unusable(self.path, error) from error

    def make(self, num_bytes: int) -> None:
        """Create the file and allocate its bytes, all zero, so that a full drive is detected before the first step."""
        try:
            self._make_and_lock()
            fd = self.data_fd = os.open(self.data_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Allocate before O_DIRECT is used: without support of the file system the C library writes single bytes.
            os.posix_fallocate(fd, 0, num_bytes)
            direct_fd = _open_direct(self.data_path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _too_small(self.path, num_bytes, _free_bytes(self.path), error.strerror) from error
            raise unusable(self.path, error) from error
        self.direct = direct_fd is not None
        if direct_fd is not None:
            os.close(fd)
            self.data_fd = direct_fd

    def warn_if_cached(self) -> None:
        """Warn if the file does not support O_DIRECT."""
        if not self.direct:
            logger.warning(
                "nvme_path %s: its file system does not support O_DIRECT. Swapped tensors use the page cache, which is "
                "slower and fills host memory",
                self.path,
            )

    def remove(self) -> None:
        """Remove the folder. The lock is released last, so that other ranks do not treat the folder as a leftover."""
        if self._folder is None or os.getpid() != self._pid:  # A forked child must not remove them.
            return
        folder, self._folder = self._folder, None
        if self.data_fd >= 0:
            os.close(self.data_fd)
        _empty(folder)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self.data_fd = self._lock_fd = -1
        with suppress(OSError):  # Other ranks may still use it.
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
                continue  # Another rank removed the folder or its parent while it was empty.
            lock_file(self._lock_fd)
            if os.fstat(self._lock_fd).st_nlink:
                self.data_path = os.path.join(folder, _DATA)
                return
            os.close(self._lock_fd)
            self._lock_fd = -1
        raise FileNotFoundError(errno.ENOENT, "folders are removed as soon as they are created", self.path)


def check_space(folders: Sequence[tuple[SwapFolder, int]]) -> None:
    """Raise if a file system lacks space for its files of this rank. Several paths may be on one file system."""
    on_device: dict[int, list[tuple[SwapFolder, int]]] = {}
    for folder, num_bytes in folders:
        on_device.setdefault(os.stat(folder.path).st_dev, []).append((folder, num_bytes))
    for found in on_device.values():
        path, needed = found[0][0].path, sum(num_bytes for _, num_bytes in found)
        free = _free_bytes(path)
        if free is not None and needed > free:
            raise _too_small(path, needed, free, total=sum(num_bytes for _, num_bytes in folders))


def _open_direct(path: str) -> int | None:
    """Open a file with O_DIRECT, or return None if it is not supported.

    A page is written and read back, because some file systems accept O_DIRECT at `open` and fail later.
    """
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
    """Remove the folder of a dead job.

    Several ranks may do this at once: names are never reused, and each operation may find its work done.
    """
    try:
        lock_fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR)
    except FileNotFoundError:  # A process died while it created or removed it; or it is just being created.
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and _LOCK not in _names(folder):
                logger.warning("folder is not removed, because it is not empty and has no lock: %s", folder)
        return
    except OSError:  # It belongs to another user.
        return
    try:
        lock_file(lock_fd, wait=False)
        unknown = ", ".join(sorted(_names(folder) - {_LOCK, _DATA}))
        if unknown:
            logger.warning("folder is not removed, because it contains other files (%s): %s", unknown, folder)
        else:
            _empty(folder)
    except BlockingIOError:  # Its job is running.
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
    with suppress(OSError):  # It is removed already, or contains files of the user.
        os.rmdir(folder)


def _free_bytes(path: str) -> int | None:
    """Return the free bytes, or None if the file system does not report its size."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _too_small(
    path: str, needed: int, free: int | None, reason: str | None = None, total: int | None = None
) -> ConfigError:
    has = "an unknown number" if free is None else f"{free} ({free / 1e9:.2f} GB)"
    said = f" ({reason})" if reason else ""
    share = f", in proportion to its rate {needed / total:.0%} of all" if total is not None and needed < total else ""
    return ConfigError(
        f"nvme_path = {path}: this rank needs {needed} bytes ({needed / 1e9:.2f} GB{share}) on that file system, but "
        f"{has} are free{said}. Free space there, or set nvme_path to a larger drive."
    )


def unusable(path: str, error: OSError) -> ConfigError:
    where = f" at {error.filename}" if error.filename and error.filename != path else ""
    return ConfigError(
        f"nvme_path = {path}: cannot be used as a swap folder ({error.strerror}{where}). "
        "Set nvme_path to a folder that this user can write to."
    )
