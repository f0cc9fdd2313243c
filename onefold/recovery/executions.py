"""Sums of the bits that the executions of one step have produced, and what a difference between them means. No engine.

[Note: telling a bit flip from a bug]
A step whose loss or gradient is suspicious is executed again, from the same inputs, random states and buffers. If the
second execution has the same bits on all ranks, the first was right: the cause is the data, the program or the model.
Otherwise a third execution decides. Two of three that agree are taken as right, and the other one had a bit flip: on
the ranks whose outputs or gradients differ before they are reduced, or in the reduction if none does.

Each execution is described by sums of bits: of the outputs of each forward, of each local gradient when its reduction
is launched, and at the end of each reduced gradient. The sums stay on the device until they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from onefold.recovery.refused_step import RefusedStepError
from onefold.recovery.replica_check import sum_of_bits


class BitFlipError(RefusedStepError):
    """A step that cannot continue after a bit flip."""


class Finding(Enum):
    """What three executions of a step show. The third is needed only if the first two differ."""

    SAME = "the executions have the same bits"
    FIRST_DIFFERS = "the re-executions agree on other bits than the step"
    SECOND_DIFFERS = "the step and the last re-execution agree"
    ALL_DIFFER = "all executions differ"


class Kind(Enum):
    """What a sum of bits is computed from."""

    OUTPUT = 0
    GRADIENT = 1
    """The gradient of this rank, before its reduction."""
    REDUCED = 2
    """The reduced gradient, which depends on all ranks."""


@dataclass
class Execution:
    """The sums of one execution on this rank, in the order in which they were computed."""

    places: list[str] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    def add(self, kind: Kind, place: str, tensor: torch.Tensor, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Add the sum of a tensor, without ranges of padding."""
        flat = tensor.detach().reshape(-1)
        total = sum_of_bits(flat)
        for start, stop in gaps:
            if start < stop:
                total = total - sum_of_bits(flat[start:stop])
        self.places.append(place)
        self.kinds.append(kind)
        self.sums.append(total)

    def values(self) -> list[int]:
        """Return all sums. Wait for the device."""
        return [int(each) for each in torch.stack([total.cpu() for total in self.sums]).tolist()] if self.sums else []


@dataclass(frozen=True)
class Difference:
    """The first difference between two executions on one rank."""

    rank: int
    index: int = -1
    """The index of the first sum that differs, or -1."""
    kind: Kind = Kind.OUTPUT
    outputs_differ: bool = False
    """Whether any output of a forward differs."""

    @property
    def is_any(self) -> bool:
        return self.index >= 0


def first_difference(one: Execution, other: Execution, rank: int) -> Difference:
    """Return the first difference between two executions on this rank."""
    first, second = (list(zip(each.places, each.values(), strict=True)) for each in (one, other))
    length = max(len(first), len(second))
    different = [index for index in range(length) if first[index : index + 1] != second[index : index + 1]]
    if not different:
        return Difference(rank)
    kinds = max(one.kinds, other.kinds, key=len)
    return Difference(rank, different[0], kinds[different[0]], any(kinds[index] is Kind.OUTPUT for index in different))


def decide(first_second: bool, first_third: bool, second_third: bool) -> Finding:
    """Return the finding from which pairs of executions have the same bits on all ranks."""
    if first_second:
        return Finding.SAME
    if second_third:
        return Finding.FIRST_DIFFERS
    return Finding.SECOND_DIFFERS if first_third else Finding.ALL_DIFFER


def describe_differences(differences: Sequence[Difference], places: Sequence[str]) -> str:
    """Return which ranks computed other bits, and where they first differ."""
    found = [each for each in differences if each.is_any]
    local = [each for each in found if each.kind is not Kind.REDUCED]
    if not local:
        return f"{_place(found[0], places)} differs after its reduction, but on no rank before it"
    return "; ".join(f"rank {each.rank} first differs in {_place(each, places)}" for each in local)


def _place(difference: Difference, places: Sequence[str]) -> str:
    return places[difference.index] if difference.index < len(places) else "another sequence of gradients"
