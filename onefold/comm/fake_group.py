"""A fake process group: one process runs one rank's part of a job of any size, on meta tensors.

Collectives allocate buffers, obey limits and count bytes in the ledger as in a real job, but send nothing. The other
ranks are assumed to behave as this one does. Forecasts use it to run a step dry (`onefold/tools/estimate/dry_run.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from onefold.comm.collective import Collective, Ledger, PeerExchange
from onefold.comm.exchange import Exchange
from onefold.comm.mesh import DATA_AXIS, Group
from onefold.comm.native import AllToAll, Native
from onefold.comm.nodes import Nodes


@dataclass(frozen=True)
class FakeGroup(Group):
    """Rank 0 of a group whose other ranks do not exist."""

    as_nccl: bool = True
    """Whether the real group would use NCCL."""

    is_fake: ClassVar[bool] = True
    rank = 0
    device = torch.device("cpu")

    @staticmethod
    def of(nodes: Nodes, replicas: int = 1, *, as_nccl: bool = True) -> FakeGroup:
        """Return the fake group of a job on these nodes."""
        no_group: Any = None
        return FakeGroup(DATA_AXIS, no_group, no_group, nodes, replicas, as_nccl)

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.nodes.num_ranks

    @property
    def uses_nccl(self) -> bool:  # type: ignore[override]
        return self.as_nccl

    def global_rank(self, rank: int) -> int:
        return rank


class FakeExchange(Exchange):
    """`Exchange` that sends nothing."""

    def _launch(self, exchanges: Iterable[tuple[PeerExchange, int]]) -> list[dist.Work]:
        return []


class FakeNative(Native):
    """`Native` that sends nothing."""

    peer_by_peer = FakeExchange

    def _launch(self, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[dist.Work]:
        return []


class FakeAllToAll(FakeNative, AllToAll):
    """`AllToAll` that sends nothing."""

    def _swap(self, incoming: list[list[torch.Tensor]], outgoing: list[list[torch.Tensor]]) -> None:
        pass


def make_fake_collective(kind: str, group: Group, ledger: Ledger, device: torch.device) -> Collective:
    """Return the fake counterpart of the collective that `make_collective` chooses."""
    if group.size == 1 or not group.uses_nccl:
        return FakeExchange(group, ledger, device)
    return (FakeNative if kind == "native" else FakeAllToAll)(group, ledger, device)
