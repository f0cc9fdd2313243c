"""Objects of any store that fsspec supports, with the methods of `pathlib.Path` that checkpoints use.

[Note: object stores]
An object is written as a whole: a request either creates or replaces it, or has no effect. There are no folders, links,
renames or locks. A prefix that ends with a slash counts as a folder, and exists while an object has it. Retries of
failed requests, and their limit, are those of the fsspec implementation (s3fs and botocore: 5 attempts each).

The stores in `STORES` write objects atomically. Other fsspec implementations (sftp, hdfs, ...) would show a file
that is only partly written, so they are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

from onefold.disk_waits import waiting_for_disk

_MIB = 1 << 20
# The protocols whose writes are atomic, with the package that fsspec needs and the extra of onefold that installs it.
STORES = {
    "memory": ("fsspec", ""),
    "s3": ("s3fs", "onefold[s3]"),
    "s3a": ("s3fs", "onefold[s3]"),
    "gs": ("gcsfs", "onefold[gcs]"),
    "gcs": ("gcsfs", "onefold[gcs]"),
    "az": ("adlfs", "adlfs"),
    "abfs": ("adlfs", "adlfs"),
    "abfss": ("adlfs", "adlfs"),
}
_LEAST_READ, _MOST_READ, _REQUEST = _MIB // 16, 32 * _MIB, 4 * _MIB
# An object of S3 has at most 10,000 parts.
_PART_BYTES, _MOST_PARTS = 16 * _MIB, 9_000
_Value = TypeVar("_Value")


class StorageError(OSError):
    """A path cannot be used, or a request to an object store failed."""


@cache
def _file_system_of(protocol: str, process: int) -> Any:
    """Return the file system of a protocol. Its instances are not valid in forks of this process.

    Listings are not cached, because other processes write to the same store.
    """
    import fsspec

    package, extra = STORES[protocol]
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError:
        raise StorageError(
            f"{protocol}:// needs {package}, which is not installed. Run pip install '{extra}'."
        ) from None


@dataclass(frozen=True)
class ObjectPath:
    """The URL of an object, or of a prefix that stands for a folder."""

    url: str

    @staticmethod
    def parse(url: str) -> ObjectPath:
        """Check a URL. Credentials are refused, because URLs are logged and stored."""
        protocol, _, rest = url.partition("://")
        shown = f"{protocol}://{re.sub('^[^/]*@', '', rest)}"
        if "@" in rest.split("/")[0] or "?" in rest or "#" in rest:
            shown = re.split("[?#]", shown)[0]
            raise StorageError(
                f"{shown}: the URL must not contain a user, a password or options. Configure credentials as "
                f"{STORES.get(protocol, ('fsspec',))[0]} reads them: in the environment or in its files."
            )
        if protocol not in STORES:
            raise StorageError(
                f"{shown}: {protocol}:// is not supported, because its writes are not known to be atomic. Use one of "
                f"{', '.join(f'{name}://' for name in STORES)}, or a mounted file system."
            )
        keys = [key for key in rest.split("/") if key]
        if not keys or any(key in (".", "..") for key in keys):
            raise StorageError(f"{shown}: must name a bucket, and no '.' or '..'")
        return ObjectPath(f"{protocol}://{'/'.join(keys)}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else ObjectPath(above)

    def resolve(self) -> ObjectPath:
        return self

    def exists(self) -> bool:
        return self._call(lambda fs, key: bool(fs.exists(key)))

    def is_dir(self) -> bool:
        return self._call(lambda fs, key: bool(fs.isdir(key)))

    def iterdir(self) -> Iterator[ObjectPath]:
        names = self._call(lambda fs, key: [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(key, detail=False)])
        return (self / name for name in names if name != self.name)

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Iterate over the entries whose names match a pattern, without those of deeper levels."""
        with suppress(FileNotFoundError):
            yield from (entry for entry in self.iterdir() if fnmatchcase(entry.name, pattern))

    def size(self) -> int:
        """Return the number of bytes of the object. Raise FileNotFoundError if there is none."""
        info = self._call(lambda fs, key: fs.info(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self} is not an object")
        return int(info["size"])

    def tree_size(self) -> int:
        """Return the number of bytes of all objects below this prefix."""
        with suppress(FileNotFoundError):
            return self._call(lambda fs, key: int(fs.du(key)))
        return 0

    def write_bytes(self, content: bytes) -> int:
        """Create or replace the object. Larger content than the store accepts in one request is sent in parts."""
        self._call(lambda fs, key: fs.pipe_file(key, content))
        return len(content)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call(lambda fs, key: fs.rm_file(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove all objects below this prefix."""
        with suppress(FileNotFoundError):
            self._call(lambda fs, key: fs.rm(key, recursive=True))

    def rmdir(self) -> None:
        """Do nothing: a prefix without objects does not exist."""

    def read_ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read several ranges of the object at the same time."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        return self._call(
            lambda fs, key: fs.cat_ranges([key] * len(ranges), starts, stops, max_gap=None, on_error="raise")
        )

    def _call(self, work: Callable[[Any, str], _Value]) -> _Value:
        """Call the file system. Errors become OSErrors that name the URL."""
        protocol = self.url.partition("://")[0]
        fs = _file_system_of(protocol, os.getpid())
        try:
            with waiting_for_disk("a request for", self.url):
                return work(fs, fs._strip_protocol(self.url))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self}: no such object or bucket") from None
        except Exception as error:
            raise StorageError(f"{self}: {type(error).__name__}: {error}") from error


class ObjectFile:
    """An object that is open for reading. Consecutive reads are combined to larger requests.

    The first read of a place requests little more than its range. Each read that continues where the last one ended
    doubles the request, up to 32 MiB, which are sent as concurrent requests of 4 MiB.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.size = path.size()
        self._start, self._window, self._ahead = 0, b"", 0

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer, and return the number of bytes read, which is less only at the end of the object."""
        done = 0
        while done < len(buffer):
            at = offset + done - self._start
            if not 0 <= at < len(self._window):
                at = 0
                if not self._fetch(offset + done, len(buffer) - done):
                    break
            piece = self._window[at : at + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def _fetch(self, offset: int, wanted: int) -> bool:
        follows = offset == self._start + len(self._window)
        self._ahead = min(2 * max(self._ahead, _LEAST_READ), _MOST_READ) if follows else _LEAST_READ
        stop = min(self.size, offset + min(max(wanted, self._ahead), _MOST_READ))
        self.release()
        if offset < stop:
            ranges = [(start, min(start + _REQUEST, stop)) for start in range(offset, stop, _REQUEST)]
            pieces = self._path.read_ranges(ranges)
            self._start, self._window = offset, pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return bool(self._window)

    def release(self) -> None:
        """Free the memory for bytes that were read ahead."""
        self._start, self._window = self._start + len(self._window), b""

    def close(self) -> None:
        self.release()


class ObjectUpload:
    """A new object, written from its beginning to its end. It exists when `finish` has returned."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        """`nbytes` is the size that the object will have, from which the size of the parts follows."""
        self._path = path
        self._written = 0
        self._finished = False
        part = max(_PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._file: Any = path._call(lambda fs, key: fs.open(key, "wb", block_size=part))

    def write(self, data: bytes | memoryview, offset: int) -> None:
        assert offset == self._written, "an object is written in order"
        self._path._call(lambda fs, key: self._file.write(data))
        self._written += len(data)

    def finish(self) -> int:
        """Complete the upload and return the size of the object.

        If the answer of the store was lost, some stores refuse the repeated request, although the object exists.
        """
        try:
            self._path._call(lambda fs, key: self._file.close())
        except OSError:
            with suppress(OSError):
                self._finished = self._path.size() == self._written
            if not self._finished:
                raise
        self._finished = True
        return self._written

    def close(self) -> None:
        """Abort the upload, unless it is finished."""
        if not self._finished:
            with suppress(OSError):
                self._path._call(lambda fs, key: self._file.discard())
            with suppress(AttributeError):  # the file of a store in memory
                self._file.closed = True  # otherwise its destructor would complete the upload
