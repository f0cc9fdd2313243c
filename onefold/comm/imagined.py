"""Ranks that are imagined: one process takes one rank's part of a job of any size, on tensors without memory.

Collectives run as they do on a real job, buffers, limits and the ledger with them, but nothing is sent. The other ranks
are held to do, and to say, what this one does. It is how a run is known before it (`onefold/estimate`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from onefold.comm.collective import Collective, PeerExchange
from onefold.comm.exchange import Exchange
from onefold.comm.ledger import Ledger
from onefold.comm.mesh import DATA_AXIS, Group
from onefold.comm.native import AllToAll, Native
from onefold.comm.nodes import Nodes


@dataclass(frozen=True)
class ImaginedGroup(Group):
    """The first rank of a group, without the others."""

    as_nccl: bool = True
    """Whether the others would be reached by NCCL."""

    is_imagined: ClassVar[bool] = True
    rank = 0
    device = torch.device("cpu")

    @staticmethod
    def of(nodes: Nodes, replicas: int = 1, *, as_nccl: bool = True) -> ImaginedGroup:
        nobody: Any = None
        return ImaginedGroup(DATA_AXIS, nobody, nobody, nodes, replicas, as_nccl)

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.nodes.num_ranks

    @property
    def uses_nccl(self) -> bool:  # type: ignore[override]
        return self.as_nccl

    def global_rank(self, rank: int) -> int:
        return rank


class ImaginedExchange(Exchange):
    def _launch(self, exchanges: Iterable[tuple[PeerExchange, int]]) -> list[dist.Work]:
        return []


class ImaginedNative(Native):
    peer_by_peer = ImaginedExchange

    def _launch(self, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[dist.Work]:
        return []


class ImaginedAllToAll(ImaginedNative, AllToAll):
    def _swap(self, incoming: list[list[torch.Tensor]], outgoing: list[list[torch.Tensor]]) -> None:
        pass


def imagine(kind: str, group: Group, ledger: Ledger, device: torch.device) -> Collective:
    """As `make_collective` chooses: what NCCL does, or gloo."""
    if group.size == 1 or not group.uses_nccl:
        return ImaginedExchange(group, ledger, device)
    return (ImaginedNative if kind == "native" else ImaginedAllToAll)(group, ledger, device)
