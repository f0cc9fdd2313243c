"""Loaders that give each rank its own share of a dataset, and that can go on where another left off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from onefold.comm import Group
from onefold.log import logger


class ResumableLoader(DataLoader[Any]):
    """Micro-batches of this rank's share, shuffled alike on every rank. An iterable dataset shares itself out.

    It knows how far the newest pass over it has come, as a number of samples over all ranks. The sampler deals one
    shuffled list out in turn, so what was handed out is the beginning of that list whatever the number of ranks. On W
    ranks each skips its share: none is missed, and no more than W - 1 are seen twice.

    With `num_workers` the order is kept exactly, but not the random numbers that workers draw. Of an iterable dataset,
    as many batches are read and thrown away, unless it has `state_dict` and `load_state_dict` and no workers read it.
    """

    def __init__(self, dataset: Dataset[Any], group: Group, *, drop_last: bool = False, **options: Any) -> None:
        self.world_size = group.size
        self._progress = _Progress()
        self._loaded: dict[str, Any] | None = None
        self._shares: _Sampler | None = None
        if not isinstance(dataset, IterableDataset):
            self._shares = _Sampler(dataset, group.size, group.rank, shuffle=True, drop_last=drop_last)
        super().__init__(dataset, sampler=self._shares, drop_last=drop_last, **options)

    def __iter__(self) -> Any:
        return _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data. `samples` is 0 between two passes."""
        here = {"world_size": self.world_size, "batch_size": self.batch_size}
        if self._loaded is not None:
            return self._loaded | here
        epoch, samples = self._progress.epoch, self._progress.samples * self.world_size
        if epoch is None:
            epoch = self._shares.epoch if self._shares is not None else 0
        state: dict[str, Any] = {"epoch": epoch, "samples": samples} | here
        if samples and self._dataset_resumes:
            state["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: in the next pass, or in the newest one if it is asked for another batch first.

        If `set_epoch` then asks for another epoch, that one is read from its beginning.
        """
        self.check_state(state)
        if self._shares is not None:
            self._shares.set_epoch(state["epoch"])
        self._loaded = dict(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Whether `load_state_dict` takes it; nothing is changed."""
        for key in ("epoch", "samples", "world_size", "batch_size"):
            if not isinstance(state, dict) or type(state.get(key)) is not int or not 0 <= state[key] < 2**62:
                raise ValueError(f"the saved position in the data must hold {key}, a whole number from 0")

    @property
    def _dataset_resumes(self) -> bool:
        """A dataset in workers moves on there, and the one here does not know."""
        has_state = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return has_state and self._shares is None and self.num_workers == 0

    def _start(self) -> Iterator[Any]:
        return super().__iter__()

    def _take_loaded(self) -> dict[str, Any] | None:
        state, self._loaded = self._loaded, None
        if state is not None and self._shares is not None and state["epoch"] != self._shares.epoch:
            if state["samples"]:
                logger.info(
                    "epoch %d is read from its start: it was %d that was saved", self._shares.epoch, state["epoch"]
                )
            return None
        return state


class _Sampler(DistributedSampler[Any]):
    """This rank's share, from its sample `first` on."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.first, None)

    @contextmanager
    def starting_at(self, first: int) -> Iterator[None]:
        self.first = first
        try:
            yield
        finally:
            self.first = 0

    def skipped_by(self, samples: int) -> int:
        """How many of this rank's samples are among the first `samples` of all ranks."""
        num_distinct = len(self.dataset)  # type: ignore[arg-type]
        return min(samples // self.num_replicas, self.num_samples) if samples < num_distinct else self.num_samples


@dataclass
class _Progress:
    """How far one pass has come."""

    epoch: int | None = None
    """Known once a batch is out: until then, the sampler may be given another."""
    samples: int = 0
    """Handed out on this rank, or skipped."""


class _Batches:
    """One pass over a loader."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._begin(loader._take_loaded(), is_drawn=False)

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        loader, shares = self._loader, self._loader._shares
        if loader._loaded is not None and loader._progress is self._progress:
            self._begin(loader._take_loaded(), is_drawn=self._progress.epoch is None)
        progress = self._progress
        try:
            # torch asks the sampler for the first batch only now.
            with shares.starting_at(self._first) if progress.epoch is None and shares is not None else nullcontext():
                batch = next(self._batches)
        except StopIteration:
            progress.epoch, progress.samples = None, 0
            raise
        progress.samples += loader.batch_size or 1
        if shares is not None:
            progress.samples = min(progress.samples, shares.num_samples)
        if progress.epoch is None:
            progress.epoch = shares.epoch if shares is not None else 0
        return batch

    def _begin(self, state: dict[str, Any] | None, *, is_drawn: bool) -> None:
        """Start torch's iterator at a saved position.

        That draws a seed for workers. The run that was saved drew its seed before: drawing another one here would shift
        every random number after it. `is_drawn`: this pass has drawn it, and no batch since.
        """
        loader, shares = self._loader, self._loader._shares
        samples = state["samples"] if state is not None else 0
        self._progress = loader._progress = _Progress()
        self._first = shares.skipped_by(samples) if shares is not None else 0
        with torch.random.fork_rng(devices=[]) if samples or is_drawn else nullcontext():
            if shares is not None:
                with shares.starting_at(self._first):  # workers read ahead at once
                    self._batches = loader._start()
                self._progress.samples = self._first
            elif state is not None and "dataset" in state and loader._dataset_resumes:
                loader.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
                self._batches = loader._start()
                self._progress.samples = samples // loader.world_size
            else:
                self._batches = loader._start()
                self._throw_away(samples)

    def _throw_away(self, samples: int) -> None:
        loader, batch_size = self._loader, self._loader.batch_size or 1
        num_batches = samples // loader.world_size // batch_size
        if num_batches:
            logger.info(
                "resuming an iterable dataset: %d batches of %s are read and thrown away. "
                "With state_dict and load_state_dict it would resume at once.",
                num_batches, type(loader.dataset).__name__,
            )  # fmt: skip
        next(islice(self._batches, num_batches, num_batches), None)
        self._progress.samples = num_batches * batch_size
