"""Sequences of tokens for a model of transformers, from windows of text or lines of JSON, tokenized on demand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onefold.tools.train.data import HELD_OUT_FRACTION, HELD_OUT_SEQUENCES, Bytes, DataError, files_of, load_corpus

# Bytes of a window of text for each requested token; the rest is cut off.
BYTES_A_TOKEN = 8
NOT_PREDICTED = -100
ROW_SUFFIXES = (".jsonl", ".ndjson")

Row = tuple[list[int], list[int]]
"""Tokens, and labels with NOT_PREDICTED for positions without a target."""


class Tokens:
    """The tokenizer of the model's folder, or bytes as tokens if it has none."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer = tokenizer
        self.end = end
        """The token that ends a text."""
        # The tokens that the tokenizer prepends to a text.
        whole = tokenizer("", add_special_tokens=True)["input_ids"] if tokenizer is not None else []
        self.begin: list[int] = [token for token in whole[:1] if token != end]

    def describe(self) -> str:
        return "bytes as tokens (the model's folder has no tokenizer)" if self._tokenizer is None else "its tokens"

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return bytes(min(token, 255) for token in tokens).decode(errors="replace")
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def chat(self, messages: Any, where: str) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{where}: messages need a tokenizer with a chat template. Give text, or prompt and completion."
            )
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"{where}: the chat template cannot use these messages: {error}") from error
        return text

    def save(self, folder: Path) -> None:
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


# -- sources of sequences --------------------------------------------------------------------------------------------


class SequenceSource(Protocol):
    name: str

    @property
    def num_train(self) -> int | None:
        """Rows per epoch; None if the source has no rows."""
        ...

    def describe(self) -> str: ...

    def train_rows(self, step: int, rank: int, world_size: int, batch_size: int) -> list[Row]: ...

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Row]]: ...


class Windows:
    """Windows of text files, at positions drawn from (seed, step, rank), tokenized on demand."""

    num_train = None

    def __init__(self, paths: Sequence[str], tokens: Tokens, sequence_length: int, seed: int) -> None:
        self._corpus = load_corpus(paths, sequence_length * BYTES_A_TOKEN)
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self.name = self._corpus.name

    def describe(self) -> str:
        corpus = self._corpus
        return f"{corpus.num_bytes / 1e6:,.1f} MB of {corpus.name}, {corpus.num_held_out:,} bytes held out"

    def train_rows(self, step: int, rank: int, world_size: int, batch_size: int) -> list[Row]:
        return [self._row(window) for window in self._corpus.train_windows(self._seed, step, rank, batch_size)]

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Row]]:
        for windows in self._corpus.held_out_windows(rank, world_size, batch_size):
            yield [self._row(window) for window in windows]

    def _row(self, window: Bytes) -> Row:
        text = window.tobytes().decode(errors="ignore")
        tokens = [*self._tokens.begin, *self._tokens.encode(text)][: self._length]
        tokens = tokens if len(tokens) > 1 else [*tokens, self._tokens.end, self._tokens.end][:2]
        return tokens, tokens


class Lines:
    """Files of JSON, one object per line, see `read_row`.

    Every line is used once per epoch, in an order drawn from (seed, epoch); the last twentieth is held out. All lines
    are checked before the first step, and tokenized on demand. Texts and all turns of a conversation are targets;
    prompts are not.
    """

    def __init__(self, paths: Sequence[str], tokens: Tokens, sequence_length: int, seed: int) -> None:
        self.name = ", ".join(paths)
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self._files = [(path, _mapped(path)) for path in paths]
        self._places = list(self._find_lines())
        self._num_held_out = max(int(len(self._places) * HELD_OUT_FRACTION), 1)
        self.num_train = len(self._places) - self._num_held_out
        if self.num_train < 1:
            raise DataError(
                f"--data {self.name} has {len(self._places)} rows. Give at least two, because one is held out."
            )

    def describe(self) -> str:
        return f"{self.num_train:,} rows of {self.name}, {self._num_held_out:,} more held out"

    def _find_lines(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield file, line number, begin and end of every line that is not blank. Raise for the first bad one."""
        for number, (_, file) in enumerate(self._files):
            ends = [*(np.flatnonzero(file == ord("\n")) + 1).tolist(), len(file)]
            for line, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
                if file[begin:end].tobytes().strip():
                    self._parts(number, line, begin, end)
                    yield number, line, begin, end

    def train_rows(self, step: int, rank: int, world_size: int, batch_size: int) -> list[Row]:
        first = (step * world_size + rank) * batch_size
        return [self._row(self._drawn(number)) for number in range(first, first + batch_size)]

    def _drawn(self, number: int) -> int:
        epoch, place = divmod(number, self.num_train)
        return int(_order(self._seed, epoch, self.num_train)[place])

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Row]]:
        """Return the same number of rows for every rank; if there are too few, some repeat."""
        for index in range(max(1, min(self._num_held_out, HELD_OUT_SEQUENCES) // (world_size * batch_size))):
            first = (index * world_size + rank) * batch_size
            places = [self.num_train + place % self._num_held_out for place in range(first, first + batch_size)]
            yield [self._row(place) for place in places]

    def _row(self, index: int) -> Row:
        prompt, text = self._parts(*self._places[index])
        learnt = self._tokens.encode(text)
        if learnt[-1:] != [self._tokens.end]:  # some chat templates append it
            learnt.append(self._tokens.end)
        # A prompt that is too long is cut from the left to half of the sequence.
        room = max(self._length - len(learnt), self._length // 2) - len(self._tokens.begin)
        asked = [*self._tokens.begin, *(self._tokens.encode(prompt)[-room:] if prompt and room > 0 else [])]
        return (asked + learnt)[: self._length], ([NOT_PREDICTED] * len(asked) + learnt)[: self._length]

    def _parts(self, number: int, line: int, begin: int, end: int) -> tuple[str, str]:
        """Return the prompt of a line, and the target text."""
        path, file = self._files[number]
        where = f"--data {path}, line {line:,}"
        prompt, text = read_row(file[begin:end].tobytes(), where)
        return (prompt, text) if isinstance(text, str) else ("", self._tokens.chat(text, where))


ALPACA_HEAD = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)
ALPACA_INPUT = ", paired with an input that provides further context"


def read_row(line: bytes, where: str) -> tuple[str, str | list[Any]]:
    """Return the prompt and the text of a line of JSON, or the messages of a conversation in place of the text.

    An object has `prompt` and `completion`; `instruction` and `output`, and perhaps `input` (Alpaca's rows, with its
    prompt); `text`; or `messages`. Raise `DataError` for anything else, with what was found there.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error

    def has(*names: str) -> bool:
        return all(isinstance(row.get(name), str) for name in names)

    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object, as in {{"text": ...}}, not {_kind(row)}')
    if has("prompt", "completion"):
        prompt, text = row["prompt"], row["completion"]
    elif has("instruction", "output"):
        context = row.get("input") if isinstance(row.get("input"), str) and row["input"].strip() else None
        parts = [ALPACA_HEAD.format(ALPACA_INPUT if context else ""), f"### Instruction:\n{row['instruction']}"]
        parts += [f"### Input:\n{context}"] if context else []
        prompt, text = "\n\n".join([*parts, "### Response:\n"]), row["output"]
    elif has("text"):
        prompt, text = "", row["text"]
    elif "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise DataError(f"{where}: messages must be a list of objects with role and content")
        return "", messages
    else:
        found = ", ".join(f"{name} ({_kind(value)})" for name, value in row.items()) or "nothing"
        raise DataError(
            f"{where}: the row has {found[:200]}. Give text, or prompt and completion, or instruction and output "
            "(each a string), or messages."
        )
    if not text.strip():
        raise DataError(f"{where}: the text is empty")
    return prompt, text


def _kind(value: Any) -> str:
    """Name a value's type as JSON does."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {"str": "string", "list": "array", "dict": "object"}
    return names.get(type(value).__name__, "number")


def check_first_rows(paths: Sequence[str]) -> None:
    """Raise DataError if the first row of a JSON file cannot be used. Reads only that row, without a tokenizer."""
    for file in (file for path in paths for file in files_of(Path(path)) if file.suffix in ROW_SUFFIXES):
        with file.open("rb") as opened:
            first = next(((number, line) for number, line in enumerate(opened, start=1) if line.strip()), None)
        if first is not None:
            read_row(first[1], f"--data {file}, line {first[0]:,}")


def _mapped(path: str) -> Bytes:
    try:
        size = os.path.getsize(path)
        return np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(num)
