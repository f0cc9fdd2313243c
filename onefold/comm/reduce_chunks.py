"""Gradients that are added by the ranks themselves, cut so that what each receives at once stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.comm.collective import Reduction

# What ranks receive before they add it, at the most: larger gradients travel in several rounds.
INBOX_BYTES = 1 << 27


@dataclass(frozen=True)
class GradPart:
    """Columns of a gradient that travel together: row k goes to rank k, and the sum of this rank's rows to `target`."""

    rows: torch.Tensor
    target: torch.Tensor
    add: bool


def rounds_of(
    reductions: Sequence[Reduction], sources: Sequence[torch.Tensor], num_ranks: int
) -> Iterator[list[GradPart]]:
    """The rounds that gradients travel in; `sources` are the gradients in the dtype of the wire."""
    pairs, batch = zip(reductions, sources, strict=True), list[GradPart]()
    for part in (part for reduction, source in pairs for part in _parts_of(reduction, source, num_ranks)):
        if batch and sum(each.rows.nbytes for each in [*batch, part]) > INBOX_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _parts_of(reduction: Reduction, source: torch.Tensor, num_ranks: int) -> Iterator[GradPart]:
    if not source.numel():
        return
    rows = source.view(num_ranks, -1)
    width = max(1, INBOX_BYTES // rows[:, :1].nbytes)
    for start in range(0, rows.shape[1], width):
        yield GradPart(rows[:, start : start + width], reduction.target[start : start + width], reduction.add)
