"""Locks on files: held by one process at a time, released when it ends, on POSIX and by the functions of Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Windows' functions, with the byte locks of POSIX: both lock a range from the position of the file.
WINDOWS = """
import errno, fcntl, types
def locking(descriptor, mode, nbytes):
    try:
        fcntl.lockf(descriptor, [fcntl.LOCK_UN, fcntl.LOCK_EX | fcntl.LOCK_NB][mode], nbytes)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "locked")
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_UNLCK=0, LK_NBLCK=1)
sys.platform = "win32"
"""
HOLD = """
import sys
from onefold.storage.file_lock import lock_file, unlock_file
{system}
with open(sys.argv[1], "r+") as file:
    file.seek(3)
    if sys.argv[2] == "try":
        try:
            lock_file(file, wait=False)
        except BlockingIOError:
            print("locked by another")
        sys.exit()
    lock_file(file)
    assert file.tell() == 3
    print("locked", flush=True)
    word = sys.stdin.readline()
    if word == "unlock\\n":
        unlock_file(file)
        print("unlocked", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("system", ["", WINDOWS], ids=["this system", "windows"])
def test_one_process_holds_a_lock_until_it_ends(tmp_path: Path, system: str) -> None:
    path = tmp_path / "lock"
    path.write_text("content")

    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD.format(system=system), str(path), what]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def attempt() -> str:
        return start("try").communicate(timeout=60)[0]

    with start("hold") as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "locked\n"
        assert attempt() == "locked by another\n"
        with start("hold") as second:
            assert second.stdin is not None
            assert second.stdout is not None
            first.kill()  # the second waits for it
            assert second.stdout.readline() == "locked\n"
            assert attempt() == "locked by another\n"
            print("unlock", file=second.stdin, flush=True)
            assert second.stdout.readline() == "unlocked\n"
            assert attempt() == ""
            print("end", file=second.stdin, flush=True)
    assert path.read_text() == "content"
