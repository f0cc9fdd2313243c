"""Loaders that give each rank its own share of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from onefold.comm import Group


def data_loader(
    dataset: Dataset[Any],
    group: Group,
    *,
    batch_size: int,
    collate_fn: Callable[..., Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """Micro-batches of this rank's share, shuffled alike on every rank. An iterable dataset shares itself out."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        sampler = DistributedSampler(dataset, group.size, group.rank, shuffle=True, drop_last=drop_last)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
