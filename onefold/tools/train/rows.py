"""Rows of training data: lines of JSON, an array of JSON, or a parquet file, in the formats that fine-tuning uses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onefold.tools.train.data import Bytes, DataError, files_of

LINE_SUFFIXES, PARQUET_SUFFIXES = (".jsonl", ".ndjson"), (".parquet",)
# Columns from which the format of a row is recognised. Others are not read from parquet files.
_COLUMNS = ("prompt", "completion", "instruction", "input", "output", "text", "messages", "conversations")
# The roles of ShareGPT's turns, as chat templates name them.
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip

ALPACA_HEAD = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)
ALPACA_INPUT = ", paired with an input that provides further context"


def alpaca_prompt(instruction: str, context: str | None = None) -> str:
    """Return the prompt of Alpaca's rows."""
    parts = [ALPACA_HEAD.format(ALPACA_INPUT if context else ""), f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{context}"] if context else []
    return "\n\n".join([*parts, "### Response:\n"])


class RowFile(Protocol):
    """A file of rows."""

    def __len__(self) -> int: ...

    def where(self, index: int) -> str:
        """Name the place of a row, for messages."""
        ...

    def row(self, index: int) -> Any:
        """Return a row. Raise DataError if it cannot be read."""
        ...


def is_rows(path: str | Path) -> bool:
    """Return whether a file holds rows: by its name, or for .json by its first character."""
    suffix = Path(path).suffix.lower()
    if suffix != ".json":
        return suffix in LINE_SUFFIXES + PARQUET_SUFFIXES
    try:
        with Path(path).open("rb") as file:
            return file.read(1 << 12).lstrip().startswith(b"[")
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error


def open_rows(path: str) -> RowFile:
    """Open a file of rows."""
    suffix = Path(path).suffix.lower()
    return (
        _ParquetFile(path)
        if suffix in PARQUET_SUFFIXES
        else _JsonLines(path)
        if suffix != ".json"
        else _JsonArray(path)
    )


class _JsonLines:
    """A file with one JSON object per line, memory-mapped. Blank lines are skipped."""

    def __init__(self, path: str) -> None:
        self._path, self._file = path, _mapped(path)
        ends = [*(np.flatnonzero(self._file == ord("\n")) + 1).tolist(), len(self._file)]
        spans = enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1)
        self._places = [(line, *span) for line, span in spans if self._file[slice(*span)].tobytes().strip()]

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int) -> str:
        return f"--data {self._path}, line {self._places[index][0]:,}"

    def row(self, index: int) -> Any:
        _, begin, end = self._places[index]
        return _parse(self._file[begin:end].tobytes(), self.where(index))


class _JsonArray:
    """A JSON file with an array of objects."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._rows = _parse(Path(path).read_bytes(), f"--data {path}")
        except OSError as error:
            raise DataError(f"--data {path}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"--data {self._path}, row {index + 1:,}"

    def row(self, index: int) -> Any:
        return self._rows[index]


class _ParquetFile:
    """A parquet file, read into memory without columns that no format has."""

    def __init__(self, path: str) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise DataError(f"--data {path}: parquet files need pyarrow. Run pip install pyarrow.") from error
        self._path = path
        try:
            names = parquet.read_schema(path).names
            known = [name for name in names if name in _COLUMNS]
            if not known:
                raise DataError(f"--data {path}: the columns are {', '.join(names)[:200] or 'none'}. {_EXPECTED}")
            self._table = parquet.read_table(path, columns=known, memory_map=True)
        except (ArrowException, OSError) as error:
            raise DataError(f"--data {path}: not a parquet file ({error})") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, index: int) -> str:
        return f"--data {self._path}, row {index + 1:,}"

    def row(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def _mapped(path: str) -> Bytes:
    try:
        size = os.path.getsize(path)
        return np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error


# -- formats ---------------------------------------------------------------------------------------------------------

CONVERSATIONS = ("chat", "ShareGPT")
_EXPECTED = (
    "Give text, or prompt and completion, or instruction and output (each a string), or messages, or conversations."
)


def format_of(row: Any) -> str | None:
    """Return the format of a row by its columns, or None if no format has them."""
    if not isinstance(row, Mapping):
        return None

    def has(*names: str) -> bool:
        return all(isinstance(row.get(name), str) for name in names)

    if has("prompt", "completion"):
        return "prompts"
    if has("instruction", "output"):
        return "Alpaca"
    if has("text"):
        return "text"
    return "chat" if row.get("messages") is not None else "ShareGPT" if row.get("conversations") is not None else None


def read_row(row: Any, where: str) -> tuple[str, str | list[Any]]:
    """Return the prompt and the text of a row, or the messages of a conversation in place of the text.

    Raise `DataError` for a row of no known format, with the columns that it has.
    """
    kind = format_of(row)
    if kind is None:
        if not isinstance(row, Mapping):
            raise DataError(f'{where}: expected an object, as in {{"text": ...}}, not {_kind(row)}')
        columns = ", ".join(f"{name} ({_kind(value)})" for name, value in row.items()) or "nothing"
        raise DataError(f"{where}: the row has {columns[:200]}. {_EXPECTED}")
    if kind in CONVERSATIONS:
        return "", _messages(row["messages"], where) if kind == "chat" else _turns(row["conversations"], where)
    if kind == "prompts":
        prompt, text = row["prompt"], row["completion"]
    elif kind == "Alpaca":
        context = row.get("input") if isinstance(row.get("input"), str) and row["input"].strip() else None
        prompt, text = alpaca_prompt(row["instruction"], context), row["output"]
    else:
        prompt, text = "", row["text"]
    if not text.strip():
        raise DataError(f"{where}: the text is empty")
    return prompt, text


def _messages(messages: Any, where: str) -> list[Any]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise DataError(f"{where}: messages must be a list of objects with role and content")
    return messages


def _turns(turns: Any, where: str) -> list[Any]:
    """Convert ShareGPT's turns to messages."""
    if not isinstance(turns, list) or not all(
        isinstance(each, dict) and {"from", "value"} <= {*each} for each in turns
    ):
        raise DataError(f"{where}: conversations must be a list of objects with from and value")
    unknown = sorted({str(each["from"]) for each in turns} - {*_ROLES})
    if unknown:
        raise DataError(f"{where}: from is {', '.join(unknown)[:100]}. Use {', '.join(_ROLES)}.")
    return [{"role": _ROLES[each["from"]], "content": each["value"]} for each in turns]


def _kind(value: Any) -> str:
    """Name a value's type as JSON does."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {"str": "string", "list": "array", "dict": "object"}
    return names.get(type(value).__name__, "number")


def first_rows(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the first row of each file of rows, and its place. Of lines, only the first is read."""
    for file in (file for path in paths for file in files_of(Path(path)) if is_rows(file)):
        if file.suffix.lower() in LINE_SUFFIXES:
            with file.open("rb") as opened:
                first = next(((number, line) for number, line in enumerate(opened, start=1) if line.strip()), None)
            if first is not None:
                where = f"--data {file}, line {first[0]:,}"
                yield where, _parse(first[1], where)
        elif len(rows := open_rows(str(file))):
            yield rows.where(0), rows.row(0)


def check_first_rows(paths: Sequence[str]) -> None:
    """Raise DataError if the first row of a file cannot be used. No tokenizer is loaded."""
    for where, row in first_rows(paths):
        read_row(row, where)
