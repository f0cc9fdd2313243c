"""Data loaders that distribute a dataset over the ranks and can resume at a saved position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from onefold.log import logger


class ResumableLoader(DataLoader[Any]):
    """A data loader for this rank's part of a dataset, in the same shuffled order on every rank.

    An iterable dataset has to distribute its samples itself. `part` maps a batch to this rank's part of it, if several
    ranks share batches.

    The position of the newest iterator is a number of samples over all ranks. The sampler distributes one shuffled list
    round-robin, so the consumed samples are a prefix of that list for any number of ranks. When it resumes on W ranks,
    each rank skips its part: no sample is missed, and at most W - 1 are repeated.

    With `num_workers` the order is restored exactly, but not the random state of the workers. An iterable dataset is
    resumed by reading and discarding batches, unless it has `state_dict` and `load_state_dict` and no workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_shares: int,
        share: int,
        *,
        part: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.world_size = num_shares
        self._part = part
        self._progress = _Progress()
        self._loaded: dict[str, Any] | None = None
        self._shares: _Sampler | None = None
        if not isinstance(dataset, IterableDataset):
            self._shares = _Sampler(dataset, num_shares, share, shuffle=True, drop_last=drop_last)
        super().__init__(dataset, sampler=self._shares, drop_last=drop_last, **options)

    def __iter__(self) -> Any:
        return _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data. `samples` is 0 between two epochs."""
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
        """Resume at a saved position, in the newest iterator or in a new one, whichever is used first.

        If `set_epoch` then selects another epoch, that epoch is read from its start.
        """
        self.check_state(state)
        if self._shares is not None:
            self._shares.set_epoch(state["epoch"])
        self._loaded = dict(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `load_state_dict` would not accept the state. Change nothing."""
        for key in ("epoch", "samples", "world_size", "batch_size"):
            if not isinstance(state, dict) or type(state.get(key)) is not int or not 0 <= state[key] < 2**62:
                raise ValueError(f"the saved position in the data has no valid {key}. Give an integer from 0.")

    @property
    def _dataset_resumes(self) -> bool:
        """Whether the dataset can save its position. It cannot with workers, which advance copies of it."""
        has_state = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return has_state and self._shares is None and self.num_workers == 0

    def _start(self) -> Iterator[Any]:
        return super().__iter__()

    def _take_loaded(self) -> dict[str, Any] | None:
        state, self._loaded = self._loaded, None
        if state is not None and self._shares is not None and state["epoch"] != self._shares.epoch:
            if state["samples"]:
                logger.info(
                    "epoch %d starts at its first batch: the saved epoch is %d", self._shares.epoch, state["epoch"]
                )
            return None
        return state


class _Sampler(DistributedSampler[Any]):
    """A sampler of this rank's part, starting at its sample `first`."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.first, None)

    @contextmanager
    def starting_at(self, first: int) -> Iterator[None]:
        """Set `first` for iterators that are created in this context."""
        self.first = first
        try:
            yield
        finally:
            self.first = 0

    def skipped_by(self, samples: int) -> int:
        """Return how many of this rank's samples are among the first `samples` of all ranks."""
        num_distinct = len(self.dataset)  # type: ignore[arg-type]
        return min(samples // self.num_replicas, self.num_samples) if samples < num_distinct else self.num_samples


@dataclass
class _Progress:
    """The position of one iterator."""

    epoch: int | None = None
    """The epoch. None until the first batch, because `set_epoch` may change it until then."""
    samples: int = 0
    """The number of samples that were returned or skipped on this rank."""


class _Batches:
    """An iterator over a loader."""

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
            # torch creates the iterator of the sampler with the first batch.
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
        return loader._part(batch) if loader._part is not None else batch

    def _begin(self, state: dict[str, Any] | None, *, is_drawn: bool) -> None:
        """Start torch's iterator at a saved position.

        torch draws a seed for the workers here. The saved run drew its seed before the checkpoint, so drawing another
        one would change all later random numbers. `is_drawn` is True if this iterator has drawn a seed but no batch.
        """
        loader, shares = self._loader, self._loader._shares
        samples = state["samples"] if state is not None else 0
        self._progress = loader._progress = _Progress()
        self._first = shares.skipped_by(samples) if shares is not None else 0
        with torch.random.fork_rng(devices=[]) if samples or is_drawn else nullcontext():
            if shares is not None:
                with shares.starting_at(self._first):  # workers start to prefetch immediately
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
                "resuming an iterable dataset: %d batches of %s are read and dropped. "
                "Implement state_dict and load_state_dict to avoid this.",
                num_batches, type(loader.dataset).__name__,
            )  # fmt: skip
        next(islice(self._batches, num_batches, num_batches), None)
        self._progress.samples = num_batches * batch_size
