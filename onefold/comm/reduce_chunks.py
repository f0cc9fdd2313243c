"""Splits gradients into rounds of chunks, so that a rank receives a bounded number of bytes before it adds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.comm.collective import Reduction

# The most bytes that a rank receives in one round. Larger gradients take several rounds.
INBOX_BYTES = 1 << 27


@dataclass(frozen=True)
class GradChunk:
    """Columns of a gradient that are sent together.

    Row k is sent to rank k. The sum of the rows that this rank receives is stored in `target`, or added to it.
    """

    rows: torch.Tensor
    target: torch.Tensor
    add: bool


def split_into_rounds(
    reductions: Sequence[Reduction], sources: Sequence[torch.Tensor], num_ranks: int
) -> Iterator[list[GradChunk]]:
    """Yield the rounds of some reductions. `sources` are their gradients in the dtype of the transport."""
    pairs, batch = zip(reductions, sources, strict=True), list[GradChunk]()
    for chunk in (chunk for reduction, source in pairs for chunk in _split(reduction, source, num_ranks)):
        if batch and sum(each.rows.nbytes for each in [*batch, chunk]) > INBOX_BYTES:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _split(reduction: Reduction, source: torch.Tensor, num_ranks: int) -> Iterator[GradChunk]:
    if not source.numel():
        return
    rows = source.view(num_ranks, -1)
    width = max(1, INBOX_BYTES // rows[:, :1].nbytes)
    for start in range(0, rows.shape[1], width):
        yield GradChunk(rows[:, start : start + width], reduction.target[start : start + width], reduction.add)
