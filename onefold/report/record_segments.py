"""The record of a run in an object store, as numbered segments.

[Note: segments of a record]
Objects cannot be appended to. The record `run.jsonl` is therefore a prefix with the objects `run.jsonl/00000000`,
`run.jsonl/00000001` and so on. Each has whole lines, and together they have the lines of the file. A thread sends new
lines every few seconds: one request replaces the last segment by a longer one, until it has `SEGMENT_BYTES`; the next
lines begin the next segment. A killed process loses the lines that were not sent.

A segment exists only if all segments before it exist and are complete. Readers ask for segments by name and never list
them, so they need no consistent listing. Each engine begins a new segment, so that no two engines write to one.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator

from onefold.log import logger
from onefold.storage.object_path import ObjectPath, StorageError

SEGMENT_BYTES = 1 << 20
SECONDS = 5.0
"""Seconds between two requests of a writer."""
_LONGEST_PAUSE = 60.0
_MOST_UNSENT = _LARGEST = 64 << 20
_CLOSE_SECONDS = 60.0


def segment_path(record: ObjectPath, number: int) -> ObjectPath:
    """Return the path of a segment."""
    return record / f"{number:08}"


def count_segments(record: ObjectPath, known: int = 0) -> int:
    """Return the number of segments. The first `known` segments exist. Requests grow with the logarithm of the rest."""

    def exists(number: int) -> bool:
        return segment_path(record, number).exists()

    low, step = known, 1  # segments below `low` exist
    while exists(low + step - 1):
        low, step = low + step, 2 * step
    high = low + step - 1  # this segment does not exist
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if exists(middle) else (low, middle)
    return low


def claim_segment(record: ObjectPath) -> int:
    """Create the next segment, empty, and return its number. Reuse the last segment if it is empty."""
    number = count_segments(record)
    if number > 0 and segment_path(record, number - 1).size() == 0:
        return number - 1
    segment_path(record, number).write_bytes(b"")
    return number


def read_segments(record: ObjectPath, number: int, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Read what follows byte `offset` of a segment: yield number, offset and content of each segment with new bytes.

    Raise FileNotFoundError if the segment does not exist or is shorter than `offset`.
    """
    # Segments that a later one follows are complete, so they are counted before they are read.
    last = count_segments(record, number) - 1
    if last < number:
        raise FileNotFoundError(f"{segment_path(record, number)}: no such object")
    for each in range(number, last + 1):
        path = segment_path(record, each)
        size = path.size()
        if size < offset:
            raise FileNotFoundError(f"{path}: has {size} bytes instead of at least {offset}")
        if size > _LARGEST:
            raise StorageError(f"{path}: has {size} bytes, so it is not a segment of a run record")
        if size > offset:
            yield each, offset, path.read_ranges([(offset, size)])[0]
        offset = 0


class SegmentWriter:
    """Writes lines to segments in a thread. Requests that fail are repeated as long as the lines fit in memory."""

    def __init__(self, record: ObjectPath) -> None:
        self._record = record
        self._number = claim_segment(record)
        self._segment = bytearray()
        self._is_sent = True
        self._lines: deque[bytes] = deque()
        self._num_unsent = 0
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Add a line, which is sent in the background. Raise OSError if too many lines wait."""
        with self._lock:
            self._lines.append(line)
            self._num_unsent += len(line)
        if self._num_unsent > _MOST_UNSENT:
            self._is_closing.set()
            self._thread = None
            raise OSError(errno.ENOSPC, f"{self._num_unsent >> 20} MiB of lines could not be sent")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="onefold-record", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Do nothing: lines are sent every `SECONDS`."""

    def close(self) -> None:
        """Send the remaining lines. Raise OSError if they are not stored within `_CLOSE_SECONDS`."""
        self._is_closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
            if self._lines or not self._is_sent:
                raise StorageError("the last lines of the record could not be sent")

    def _run(self) -> None:
        pause = SECONDS
        while True:
            ends = self._is_closing.wait(pause)
            try:
                self._send()
                if pause > SECONDS:
                    logger.info("onefold.report: %s is written again", self._record)
                pause = SECONDS
            except OSError as error:
                if pause == SECONDS:
                    logger.warning("onefold.report: %s. Its lines are kept in memory and sent later", error)
                pause = min(2 * pause, _LONGEST_PAUSE)
            if ends:
                return

    def _send(self) -> None:
        """Send all lines, each request with those that fit in one segment."""
        while self._lines or not self._is_sent:
            if self._is_sent and len(self._segment) >= SEGMENT_BYTES:
                self._number, self._segment = self._number + 1, bytearray()
            with self._lock:
                while self._lines and len(self._segment) < SEGMENT_BYTES:
                    self._num_unsent -= len(self._lines[0])
                    self._segment += self._lines.popleft()
                    self._is_sent = False
            segment_path(self._record, self._number).write_bytes(bytes(self._segment))
            self._is_sent = True
