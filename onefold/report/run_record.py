"""Write the record of a run, `run.jsonl`, line by line. `run_file.py` defines the format.

In an object store the record consists of segments, see [Note: segments of a record] in `record_segments.py`.
"""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import BinaryIO

from onefold.config import ConfigError
from onefold.log import logger
from onefold.report.record_segments import SegmentWriter, claim_segment, segment_path
from onefold.report.run_file import FILE_NAME
from onefold.storage.object_path import ObjectPath
from onefold.storage.place import Place, place, read_small

# The records that engines of this process are writing.
_open: weakref.WeakValueDictionary[Place, RunRecord] = weakref.WeakValueDictionary()
_LONGEST_SEGMENT = 64 << 20


class RunRecord:
    """An open record. A failed write ends the record with a warning; the training continues."""

    def __init__(self, folder: str) -> None:
        self.path = check_folder(folder)
        if self.path in _open:
            raise ConfigError(
                f"onefold.report = {folder!r}: another engine of this process is writing {self.path}. Give each engine "
                "a separate folder, or close the other with engine.close()."
            )
        self._file: BinaryIO | SegmentWriter | None = (
            SegmentWriter(self.path) if isinstance(self.path, ObjectPath) else self.path.open("ab")
        )
        _open[self.path] = self

    def write(self, line: str) -> None:
        """Append a line and flush it. In an object store, it is sent some seconds later."""
        if self._file is None:
            return
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            logger.warning("onefold.report: %s: %s. Recording is disabled and training continues", self.path, error)
            self.close()

    def close(self) -> None:
        _open.pop(self.path, None)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.warning("onefold.report: %s: %s", self.path, error)


def check_folder(folder: str) -> Place:
    """Prepare a record for appending and return its path. Raise ConfigError if it cannot be written.

    An incomplete last line, left by a killed process, is removed.
    """
    found = place(folder)
    return _check_segments(found / FILE_NAME) if isinstance(found, ObjectPath) else _check_file(folder)


def _check_segments(path: ObjectPath) -> ObjectPath:
    if path in _open:  # a new segment would end the segment of that engine
        return path
    try:
        try:
            first = read_small(segment_path(path, 0), _LONGEST_SEGMENT)
        except FileNotFoundError:
            first = b""
        if not first or _begins_a_run(first.partition(b"\n")[0]):
            claim_segment(path)
            return path
    except OSError as error:
        raise ConfigError(f"onefold.report: the record cannot be written. {error}") from None
    raise ConfigError(
        f"onefold.report: {segment_path(path, 0)} exists but is not a run record. Move it away, or name another URL."
    )


def _check_file(folder: str) -> Path:
    path = Path(folder).absolute() / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            first = file.readline()
            if first.endswith(b"\n") and not _begins_a_run(first):
                raise ConfigError(
                    f"onefold.report = {folder!r}: {path} exists but is not a run record. Move it away, or name "
                    "another folder."
                )
            _cut_off_part_of_line(file)
    except OSError as error:
        raise ConfigError(f"onefold.report = {folder!r}: {path} cannot be written: {error.strerror}") from None
    return path


def _begins_a_run(line: bytes) -> bool:
    try:
        read = json.loads(line)
    except ValueError:
        return False
    return isinstance(read, dict) and read.get("kind") == "run"


def _cut_off_part_of_line(file: BinaryIO) -> None:
    end = position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        file.truncate(position)
