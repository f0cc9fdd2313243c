"""Communication between ranks: process groups, collectives, traffic counts and hang detection."""

from __future__ import annotations

from dataclasses import replace

import torch

from onefold.comm.agreement import Agreement
from onefold.comm.collective import (
    AllGatherOp,
    Collective,
    ErrorFeedback,
    Ledger,
    PeerExchange,
    Pending,
    Reduction,
    Source,
    broadcast_from,
)
from onefold.comm.connections import is_backend_error
from onefold.comm.consensus import Item, assert_same_by_exchange, assert_same_on_all_ranks, num_comparisons
from onefold.comm.exchange import Exchange
from onefold.comm.fake_group import FakeGroup, make_fake_collective
from onefold.comm.guard import Disagreement, Guard
from onefold.comm.hang_detector import world_detector
from onefold.comm.mesh import (
    Group,
    data_group,
    expert_group,
    init_distributed,
    local_device,
    local_rank,
    num_ranks_on_node,
    sequence_group,
)
from onefold.comm.native import AllToAll, Native
from onefold.comm.quantized import Quantized, Wires
from onefold.comm.replicated import Replicated
from onefold.comm.staged import StagedExchange
from onefold.comm.store_board import Board, RankTimeout
from onefold.comm.two_level import TwoLevel

__all__ = [
    "Agreement",
    "AllGatherOp",
    "Board",
    "Collective",
    "Disagreement",
    "ErrorFeedback",
    "Exchange",
    "FakeGroup",
    "Group",
    "Guard",
    "Item",
    "Ledger",
    "Native",
    "PeerExchange",
    "Pending",
    "RankTimeout",
    "Reduction",
    "Source",
    "Wires",
    "assert_same_by_exchange",
    "assert_same_on_all_ranks",
    "broadcast_from",
    "data_group",
    "expert_group",
    "init_distributed",
    "is_backend_error",
    "local_device",
    "local_rank",
    "make_collective",
    "num_comparisons",
    "num_ranks_on_node",
    "sequence_group",
    "world_detector",
]


def make_collective(
    kind: str,
    group: Group,
    ledger: Ledger,
    device: torch.device,
    wires: Wires | None = None,
    node_sums: torch.dtype = torch.float32,
) -> Collective:
    """Make the collective for a group.

    `kind` is the config's `onefold.collective`: native, exchange or auto, which sends each value between two nodes
    once. `node_sums` is the dtype in which the sums of a node are sent to other nodes.
    """
    if group.replicas > 1:
        alone = replace(group, replicas=1)
        return Replicated(make_collective(kind, alone, ledger, device, wires, node_sums), group, device)
    if wires is not None and wires != Wires() and group.size > 1:
        return Quantized(make_collective(kind, group, ledger, device, None, node_sums), wires, device)
    if kind == "auto" and 1 < len(group.nodes.sizes) < group.size:
        return TwoLevel(make_collective("exchange", group, ledger, device), group, device, node_sums)
    if group.is_fake:
        return make_fake_collective(kind, group, ledger, device)
    staged = device.type == "cuda" and not group.uses_nccl
    if kind == "native" and staged:
        raise ValueError("onefold.collective 'native' needs NCCL for CUDA tensors, but this group uses gloo")
    if kind == "native":
        return Native(group, ledger, device)
    if group.size == 1 or device.type == "cpu":
        return Exchange(group, ledger, device)
    return StagedExchange(group, ledger, device) if staged else AllToAll(group, ledger, device)
