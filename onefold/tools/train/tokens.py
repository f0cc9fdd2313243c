"""Sequences of tokens for a model of transformers, from windows of text or from rows, tokenized on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from onefold.tools.train.data import HELD_OUT_FRACTION, HELD_OUT_SEQUENCES, Bytes, DataError, load_corpus
from onefold.tools.train.rows import CONVERSATIONS, RowFile, format_of, open_rows, read_row

# Bytes of a window of text for each requested token; the rest is cut off.
BYTES_A_TOKEN = 8
NOT_PREDICTED = -100

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

    @property
    def formats(self) -> dict[str, int]:
        """Rows of each format for training."""
        ...

    def describe(self) -> str: ...

    def train_rows(self, first: int, batch_size: int) -> list[Row]:
        """Return a micro-batch. `first` is the number of its first row in the run."""
        ...

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[list[Row], int]]:
        """Yield micro-batches with their numbers of rows, as many on every rank. A row that only fills has number 0."""
        ...


class Windows:
    """Windows of text files, at positions drawn from (seed, number of the window), tokenized on demand."""

    num_train = None
    formats: ClassVar[dict[str, int]] = {"text": 1}

    def __init__(self, paths: Sequence[str], tokens: Tokens, sequence_length: int, seed: int) -> None:
        self._corpus = load_corpus(paths, sequence_length * BYTES_A_TOKEN)
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self.name = self._corpus.name

    def describe(self) -> str:
        corpus = self._corpus
        return f"{corpus.num_bytes / 1e6:,.1f} MB of {corpus.name}, {corpus.num_held_out:,} bytes held out"

    def train_rows(self, first: int, batch_size: int) -> list[Row]:
        return [self._row(window) for window in self._corpus.train_windows(self._seed, first, batch_size)]

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[list[Row], int]]:
        for windows in self._corpus.held_out_windows(rank, world_size, batch_size):
            yield [self._row(window) for window in windows], len(windows)

    def _row(self, window: Bytes) -> Row:
        text = window.tobytes().decode(errors="ignore")
        tokens = [*self._tokens.begin, *self._tokens.encode(text)][: self._length]
        tokens = tokens if len(tokens) > 1 else [*tokens, self._tokens.end, self._tokens.end][:2]
        return tokens, tokens


class Rows:
    """Files of rows, see `read_row`.

    Every row is used once per epoch, in an order drawn from (seed, epoch). The rows of `held_out` are held out, or the
    last twentieth of the others, of which 64 are evaluated. All rows are checked before the first step, and tokenized
    on demand. Texts and all turns of a conversation are targets; prompts are not.
    """

    def __init__(
        self, paths: Sequence[str], tokens: Tokens, sequence_length: int, seed: int, held_out: Sequence[str] = ()
    ) -> None:
        self.name = ", ".join(paths)
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self._files = [open_rows(path) for path in (*paths, *held_out)]
        self._places = [(file, index) for file in self._files for index in range(len(file))]
        formats = [self._parts(file, index)[2] for file, index in self._places]
        num_evaluation_rows = sum(map(len, self._files[len(paths) :]))
        if held_out and not num_evaluation_rows:
            raise DataError(f"--eval-data {', '.join(held_out)} has no rows")
        self._num_held_out = num_evaluation_rows or max(int(len(self._places) * HELD_OUT_FRACTION), 1)
        self._num_evaluated = num_evaluation_rows or min(self._num_held_out, HELD_OUT_SEQUENCES)
        self.num_train = len(self._places) - self._num_held_out
        if self.num_train < 1:
            raise DataError(
                f"--data {self.name} has {len(self._places)} rows. Give at least two, because one is held out."
            )
        self.formats = dict(Counter(formats[: self.num_train]))

    def describe(self) -> str:
        num, evaluated = self._num_held_out, self._num_evaluated
        held_out = f"{num:,} held out{'' if num == evaluated else f', {evaluated:,} of them evaluated'}"
        return f"{self.num_train:,} rows of {self.name} ({', '.join(self.formats)}), {held_out}"

    def train_rows(self, first: int, batch_size: int) -> list[Row]:
        return [self._row(self._drawn(number)) for number in range(first, first + batch_size)]

    def _drawn(self, number: int) -> int:
        epoch, place = divmod(number, self.num_train)
        return int(_order(self._seed, epoch, self.num_train)[place])

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[list[Row], int]]:
        for start in range(0, self._num_evaluated, world_size * batch_size):
            first = start + rank * batch_size
            rows = [self._row(self.num_train + n) for n in range(first, min(first + batch_size, self._num_evaluated))]
            # Sharded parameters are gathered by all ranks, so a rank without rows evaluates one that is not counted.
            yield rows or [self._row(self.num_train)], len(rows)

    def _row(self, index: int) -> Row:
        prompt, text, row_format = self._parts(*self._places[index])
        targets = self._tokens.encode(text)
        if targets[-1:] != [self._tokens.end]:  # some chat templates append it
            targets.append(self._tokens.end)
        # A chat template begins the conversation itself, with or without a token.
        begin = [] if row_format in CONVERSATIONS else self._tokens.begin
        # A prompt that is too long is cut from the left to half of the sequence.
        room = max(self._length - len(targets), self._length // 2) - len(begin)
        context = [*begin, *(self._tokens.encode(prompt)[-room:] if prompt and room > 0 else [])]
        return (context + targets)[: self._length], ([NOT_PREDICTED] * len(context) + targets)[: self._length]

    def _parts(self, file: RowFile, index: int) -> tuple[str, str, str]:
        """Return the prompt of a row, the target text, and the format."""
        row, where = file.row(index), file.where(index)
        prompt, text = read_row(row, where)
        return prompt, text if isinstance(text, str) else self._tokens.chat(text, where), str(format_of(row))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(num)
