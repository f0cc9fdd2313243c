"""Device memory that is given up for a while: what it holds waits on the host.

A storage is emptied and refilled, so that every tensor and every view of it stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from onefold.tier.host import page_aligned


@dataclass(frozen=True)
class Parked:
    """An emptied storage and its bytes."""

    storage: torch.UntypedStorage
    copy: torch.Tensor


def park(tensors: Iterable[torch.Tensor], *, pinned: bool) -> list[Parked]:
    """Copy the storages of these tensors to the host, in the order of the caller's stream, and empty them."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage
    parked = []
    for storage in found.values():
        copy = page_aligned(storage.size(), pinned=pinned and storage.device.type == "cuda")
        copy.copy_(_bytes(storage), non_blocking=True)
        # Freed in the order of the stream that still copies from it.
        storage.resize_(0)
        parked.append(Parked(storage, copy))
    return parked


def bring_back(parked: Iterable[Parked]) -> None:
    for each in parked:
        each.storage.resize_(each.copy.numel())
        _bytes(each.storage).copy_(each.copy, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
