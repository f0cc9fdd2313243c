"""A loader for sequence parallelism around a loader that yields other batches on every rank."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from onefold.sequence.parts import split_batch
from onefold.sequence.sequence_ranks import SequenceRanks


class SequenceLoader:
    """Yields this rank's part of the batches of all ranks of a sequence, one rank's batch after the other.

    Each of the S ranks of a sequence loads one batch and sends it to the others, which gives S micro-batches. All ranks
    then compute the same micro-batch at the same time, each its part of the tokens. Batches are mappings of tensors and
    of plain values. Attributes of the inner loader are available here too.
    """

    def __init__(self, loader: Iterable[Any], ranks: SequenceRanks, *, shifts_labels: bool) -> None:
        self.loader = loader
        self._ranks, self._shifts_labels = ranks, shifts_labels

    def __len__(self) -> int:
        return len(self.loader) * self._ranks.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches, ready = iter(self.loader), deque[Any]()
        while True:
            ready.extend(self._exchange(next(batches, None)))
            if not ready:
                return
            while ready:
                ranks = self._ranks
                yield split_batch(ready.popleft(), ranks.size, ranks.rank, shifts_labels=self._shifts_labels)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def _exchange(self, batch: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Yield the batches of all ranks that have one. Ranks whose loader has ended take part."""
        header = json.dumps(None if batch is None else _describe(batch))
        for rank, text in enumerate(self._ranks.exchange_texts(header)):
            described = json.loads(text)
            if described is not None:
                mine = dict(batch or {}) if rank == self._ranks.rank else {}
                yield {name: self._receive(rank, mine.get(name), *entry) for name, entry in described.items()}

    def _receive(self, rank: int, mine: Any, dtype: str | None, value: Any) -> Any:
        if dtype is None:
            return value
        device = self._ranks.device
        tensor = torch.empty(value, dtype=getattr(torch, dtype), device=device) if mine is None else mine.to(device)
        return self._ranks.broadcast(tensor.contiguous(), rank)


def _describe(batch: Any) -> dict[str, tuple[str | None, Any]]:
    """Return the dtype and shape of each tensor in a batch, and other values as they are."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"sequence parallelism: a batch must be a mapping of tensors, not a {type(batch).__name__}.")
    found: dict[str, tuple[str | None, Any]] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            found[name] = str(value.dtype).removeprefix("torch."), list(value.shape)
            continue
        try:
            json.dumps(value)
        except TypeError:
            raise TypeError(
                f"sequence parallelism: {name} in the batch is a {type(value).__name__}, which cannot be sent to other "
                "ranks. Remove it in the collator, or turn it into a tensor."
            ) from None
        found[name] = None, value
    return found
