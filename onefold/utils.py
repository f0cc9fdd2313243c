"""Small helpers under the names that DeepSpeed scripts import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from onefold.report.log import logger
from onefold.report.memory import memory_status, see_memory_usage

__all__ = ["RepeatingLoader", "logger", "memory_status", "see_memory_usage"]


class RepeatingLoader:
    """A loader that starts over when it is exhausted, with a new shuffle each time."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            self._batches = iter(self.loader)
            return next(self._batches)
