"""Sequences of tokens for a model of transformers, from text in windows or from lines of JSON, made when needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onefold.train.data import HELD_OUT_FRACTION, HELD_OUT_SEQUENCES, Bytes, DataError, load_corpus

# A window of text holds this many bytes for each token that is asked for; what is too much is cut off.
BYTES_A_TOKEN = 8
NOT_PREDICTED = -100

Row = tuple[list[int], list[int]]
"""Tokens, and the same as labels, with NOT_PREDICTED where nothing is learnt."""


class Tokens:
    """The tokenizer of the model's folder; where it has none, bytes are tokens."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer = tokenizer
        self.end = end
        """The token that ends a text."""
        # What the tokenizer puts before a text, as it will when the model is used.
        whole = tokenizer("", add_special_tokens=True)["input_ids"] if tokenizer is not None else []
        self.begin: list[int] = [token for token in whole[:1] if token != end]

    def describe(self) -> str:
        return "bytes as tokens (the model's folder has no tokenizer)" if self._tokenizer is None else "its own tokens"

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
                f"{where}: messages need a tokenizer with a chat template; give text, or prompt and completion"
            )
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text

    def save(self, folder: Path) -> None:
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


# -- where sequences come from ---------------------------------------------------------------------------------------


class SequenceSource(Protocol):
    name: str

    def describe(self) -> str: ...

    def train_rows(self, step: int, rank: int, world_size: int, batch_size: int) -> list[Row]: ...

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Row]]: ...


class Windows:
    """Text files: windows at places drawn from (seed, step, rank), tokenized when they are needed."""

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
    """Files of JSON, an object a line: `text`, `prompt` with `completion`, or `messages`. Every line once an epoch, in
    an order drawn from (seed, epoch); the last twentieth is held out. All are looked at before the first step, and
    tokenized when they are needed. A text is learnt whole, all turns of a conversation too; of a prompt nothing.
    """

    def __init__(self, paths: Sequence[str], tokens: Tokens, sequence_length: int, seed: int) -> None:
        self.name = ", ".join(paths)
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self._files = [(path, _mapped(path)) for path in paths]
        self._places = list(self._find_lines())
        self._num_held_out = max(int(len(self._places) * HELD_OUT_FRACTION), 1)
        self._num_train = len(self._places) - self._num_held_out
        if self._num_train < 1:
            raise DataError(f"--data {self.name}: {len(self._places)} lines; two are needed, one of them is held out")

    def describe(self) -> str:
        return f"{self._num_train:,} lines of {self.name}, {self._num_held_out:,} more held out"

    def _find_lines(self) -> Iterator[tuple[int, int, int]]:
        """File, begin and end of every line that says something. Raises for the first that cannot be used."""
        for number, (_, file) in enumerate(self._files):
            ends = [*(np.flatnonzero(file == ord("\n")) + 1).tolist(), len(file)]
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                if file[begin:end].tobytes().strip():
                    self._parts(number, begin, end)
                    yield number, begin, end

    def train_rows(self, step: int, rank: int, world_size: int, batch_size: int) -> list[Row]:
        first = (step * world_size + rank) * batch_size
        return [self._row(self._drawn(number)) for number in range(first, first + batch_size)]

    def _drawn(self, number: int) -> int:
        epoch, place = divmod(number, self._num_train)
        return int(_order(self._seed, epoch, self._num_train)[place])

    def held_out_rows(self, rank: int, world_size: int, batch_size: int) -> Iterator[list[Row]]:
        """Every rank gets equally many; where there are too few, some come twice."""
        for index in range(max(1, min(self._num_held_out, HELD_OUT_SEQUENCES) // (world_size * batch_size))):
            first = (index * world_size + rank) * batch_size
            places = [self._num_train + place % self._num_held_out for place in range(first, first + batch_size)]
            yield [self._row(place) for place in places]

    def _row(self, index: int) -> Row:
        prompt, text = self._parts(*self._places[index])
        learnt = self._tokens.encode(text)
        if learnt[-1:] != [self._tokens.end]:  # some chat templates have written it
            learnt.append(self._tokens.end)
        # Of a prompt that is too long its end is kept, in at most half of the sequence.
        room = max(self._length - len(learnt), self._length // 2) - len(self._tokens.begin)
        asked = [*self._tokens.begin, *(self._tokens.encode(prompt)[-room:] if prompt and room > 0 else [])]
        return (asked + learnt)[: self._length], ([NOT_PREDICTED] * len(asked) + learnt)[: self._length]

    def _parts(self, number: int, begin: int, end: int) -> tuple[str, str]:
        """The prompt of a line, and what is learnt of it."""
        path, file = self._files[number]
        where = f"--data {path}, the line at byte {begin:,}"
        try:
            line = json.loads(file[begin:end].tobytes())
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        line = line if isinstance(line, dict) else {}
        if isinstance(line.get("prompt"), str) and isinstance(line.get("completion"), str):
            prompt, text = line["prompt"], line["completion"]
        elif isinstance(line.get("text"), str):
            prompt, text = "", line["text"]
        elif "messages" in line:
            prompt, text = "", self._tokens.chat(line["messages"], where)
        else:
            raise DataError(f"{where}: an object with text, with prompt and completion, or with messages is needed")
        if not text.strip():
            raise DataError(f"{where}: its text is empty, so nothing can be learnt of it")
        return prompt, text


def _mapped(path: str) -> Bytes:
    try:
        size = os.path.getsize(path)
        return np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(num)
