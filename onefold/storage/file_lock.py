"""Exclusive locks on files. The operating system releases a lock when its process ends, even if it was killed.

This is the only module that imports the locks of the operating system, and only when one is used: `fcntl` does not
exist on Windows, and `msvcrt` exists nowhere else.
"""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any

# On Windows a lock covers a range of bytes, and other processes cannot read them: it covers one far behind the content.
_BYTE = 2**31 - 2
_RETRY_SECONDS = 0.05


def lock_file(file: int | IO[Any], *, wait: bool = True) -> None:
    """Lock an open file. Without `wait`, raise BlockingIOError if it is locked already.

    Raise another OSError if the file system does not support locks. The lock lasts until `unlock_file`, until the file
    is closed, or until the process ends.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    while True:
        try:
            _at_lock(file, msvcrt.locking, msvcrt.LK_NBLCK)
            return
        except PermissionError as error:  # locked by another process
            if not wait:
                raise BlockingIOError(error.errno, "the file is locked by another process") from error
            time.sleep(_RETRY_SECONDS)


def unlock_file(file: int | IO[Any]) -> None:
    """Release the lock of an open file."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
        return
    import msvcrt

    _at_lock(file, msvcrt.locking, msvcrt.LK_UNLCK)


def _at_lock(file: int | IO[Any], locking: Any, mode: int) -> None:
    """Call `msvcrt.locking` for the byte of the lock, and restore the position of the file."""
    descriptor = file if isinstance(file, int) else file.fileno()
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _BYTE, os.SEEK_SET)
    try:
        locking(descriptor, mode, 1)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
