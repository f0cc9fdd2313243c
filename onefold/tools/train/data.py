"""Text files as bytes, for the built-in GPT.

Files are memory-mapped, so the ranks of a node share one copy in the page cache. The position of every sequence follows
from the seed and the number of the sequence in the run, so ranks read different text, and a run is reproducible on any
number of ranks.
"""

from __future__ import annotations

import bisect
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # data is checked before torch is loaded
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
# Tokens, and the target of each.
Batch: TypeAlias = "tuple[Tensor, Tensor]"

SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
STANDARD_LIBRARY_CAP = 16 * 2**20
HELD_OUT_FRACTION = 0.05
HELD_OUT_SEQUENCES = 64
PROBED_BYTES = 4096


class DataError(ValueError):
    """The given data cannot be used for training. The message says why."""


class Corpus:
    """Files as one sequence of bytes, whose tail is held out."""

    def __init__(self, pieces: Sequence[Bytes], name: str, sequence_length: int) -> None:
        self.name = name
        self.sequence_length = sequence_length
        self._pieces = pieces
        self._ends = list(accumulate(len(piece) for piece in pieces))
        self.num_bytes = self._ends[-1] if self._ends else 0
        self.num_held_out = max(int(self.num_bytes * HELD_OUT_FRACTION), sequence_length + 1)
        self.num_train = self.num_bytes - self.num_held_out
        if self.num_train <= sequence_length:
            raise DataError(
                f"{name} has {self.num_bytes:,} bytes of text, but sequences of {sequence_length} bytes need at least "
                f"{2 * sequence_length + 2:,}. Give more text with --data, or shorter sequences (a smaller --preset; "
                "with --model --sequence-length)."
            )

    def train_batch(self, seed: int, first: int, batch_size: int) -> Batch:
        """Return tokens and targets of one micro-batch: bytes, and the bytes that follow them."""
        return _as_batch(self.train_windows(seed, first, batch_size))

    def held_out_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Batch, int]]:
        for windows in self.held_out_windows(rank, world_size, batch_size):
            yield _as_batch(windows), len(windows)

    def train_windows(self, seed: int, first: int, batch_size: int) -> list[Bytes]:
        """Return windows of `sequence_length + 1` bytes, each at a position drawn from (seed, number of the window)."""
        last = self.num_train - self.sequence_length
        numbers = range(first, first + batch_size)
        return [self._window(int(np.random.default_rng([seed, number]).integers(0, last))) for number in numbers]

    def held_out_windows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Bytes]]:
        """Yield about 64 sequences spread evenly over the tail, the same number of batches on every rank."""
        num_batches = max(1, HELD_OUT_SEQUENCES // (world_size * batch_size))
        total = num_batches * world_size * batch_size
        room = self.num_held_out - self.sequence_length - 1
        for index in range(num_batches):
            first = (index * world_size + rank) * batch_size
            yield [self._window(self.num_train + room * i // total) for i in range(first, first + batch_size)]

    def _window(self, start: int) -> Bytes:
        """Return `sequence_length + 1` bytes from `start`, across files."""
        end = start + self.sequence_length + 1
        parts = []
        piece = bisect.bisect_right(self._ends, start)
        while start < end:
            begins = self._ends[piece] - len(self._pieces[piece])
            part = self._pieces[piece][start - begins : end - begins]
            parts.append(part)
            start += len(part)
            piece += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _as_batch(windows: Sequence[Bytes]) -> Batch:
    import torch

    tokens = torch.from_numpy(np.stack(windows)).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_corpus(paths: Sequence[str | Path], sequence_length: int) -> Corpus:
    """Load the text of files and folders, by default the source of the Python standard library."""
    if not paths:
        pieces = list(_map_files(standard_library_files(), STANDARD_LIBRARY_CAP))
        return Corpus(pieces, "the Python standard library's source", sequence_length)
    files = [file for path in paths for file in files_of(Path(path))]
    pieces = list(_map_files(files, None))
    name = ", ".join(str(path) for path in paths)
    if not pieces:
        raise DataError(f"--data {name}: no readable text (empty files, and files with zero bytes, are skipped)")
    return Corpus(pieces, name, sequence_length)


def standard_library_files() -> list[Path]:
    """Return the source files of the standard library without tests, in a fixed order."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"--data {path}: no such file or folder")
    if path.is_file():
        return [path]
    visible = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return sorted(file for file in visible if file.is_file())


def _map_files(files: Iterable[Path], cap: int | None) -> Iterator[Bytes]:
    total = 0
    for file in files:
        try:
            size = file.stat().st_size
            if size == 0:
                continue
            mapped: Bytes = np.memmap(file, dtype=np.uint8, mode="r")
        except OSError as error:
            raise DataError(f"--data {file}: {error.strerror or error}") from error
        if (mapped[:PROBED_BYTES] == 0).any():  # zero bytes: not text
            continue
        if cap is not None and total + size > cap:
            return
        total += size
        yield mapped
