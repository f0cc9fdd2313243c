"""Quantized transport over any collective: all-gathers as integers, reductions as a two-hop all-to-all.

[Note: two hops]
Quantized values cannot be added as integers, because their scales differ. Each rank therefore sends every other rank
its slice, and the receiver decodes and adds in fp32. The first hop is inside a node: a rank receives from its
neighbours the slices of all ranks that have its place in their node, one per node, and adds them. The second hop sends
the sums of a node, encoded again, to the ranks that own them. Traffic between nodes is 1 / (ranks per node) of the
traffic inside.

    gradient of a rank  [node][place][slice]  ->  rows by place  [place][node][slice]     inside the node
    sum of a node                                 rows by node           [node][slice]     across nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onefold.comm.codec import Codec
from onefold.comm.collective import (
    AllGatherOp,
    Collective,
    CollectiveWrapper,
    ErrorFeedback,
    PeerExchange,
    Pending,
    Reduction,
)
from onefold.plan import Feedback, Plan, Wire

# Eight bits are precise enough for errors.
_ERRORS = Codec(8)


@dataclass(frozen=True)
class Wires:
    """The codecs of lossy traffic; None for traffic that is not quantized."""

    parameters: Codec | None = None
    inside: Codec | None = None
    across: Codec | None = None
    feedback: Feedback | None = None

    @staticmethod
    def of(plan: Plan) -> Wires:
        """Return the codecs that a plan has chosen."""
        codecs = {Wire.INT8: Codec(8), Wire.INT4: Codec(4)}
        return Wires(
            parameters=codecs.get(plan.frozen_wire),
            inside=Codec(8) if plan.gradients.wire is not Wire.NATIVE else None,
            across=codecs.get(plan.gradients.wire),
            feedback=plan.feedback,
        )


class Quantized(CollectiveWrapper):
    """A collective that quantizes lossy traffic, and passes the rest to another collective."""

    def __init__(self, plain: Collective, wires: Wires, device: torch.device) -> None:
        super().__init__(plain, plain.group, device)
        self._wires = wires

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        codec = self._wires.parameters
        coded = [op for op in ops if op.lossy and _can_be_coded(op.output)]
        if codec is None or not coded:
            return self._plain.start_gather(ops)
        plain = [op for op in ops if not (op.lossy and _can_be_coded(op.output))]
        encoded = []
        with self._comm_stream.enter():
            for op in coded:
                size = op.span or self.group.size
                own = op.place_input(self.group.rank, size).view(1, -1)
                rows = own.new_empty(size, codec.row_bytes(own.numel()), dtype=torch.uint8)
                codec.encode(own, rows.narrow(0, self.group.rank % size, 1))
                encoded.append(rows)
                plain.append(AllGatherOp(rows.view(-1), span=op.span))
            pending = self._plain.start_gather(plain)

        def complete() -> None:
            pending.finish()
            for op, rows in zip(coded, encoded, strict=True):
                codec.decode(rows, op.output.view(rows.shape[0], -1))

        return self._comm_stream.pending(complete)

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        if self._wires.inside is None or self.group.size == 1:
            return self._plain.start_reduce_scatter(reductions)
        coded = [reduction for reduction in reductions if _can_be_coded(reduction.source)]
        plain = [reduction for reduction in reductions if not _can_be_coded(reduction.source)]
        with self._comm_stream.enter():
            others = self._plain.start_reduce_scatter(plain) if plain else Pending(lambda: None)
            hops = [(reduction, self._start_inside(reduction), self.reserve_tag()) for reduction in coded]

        def complete() -> None:
            across = [(reduction, self._start_across(reduction, hop, tag)) for reduction, hop, tag in hops]
            for reduction, hop in across:
                reduction.store(hop.codec.add(hop.finish()))
            others.finish()

        return self._comm_stream.complete_in_background(complete)

    def _start_inside(self, reduction: Reduction) -> _Hop | None:
        """Start the hop inside the node. Return None if the node has one rank."""
        codec, group = self._wires.inside, self.group
        assert codec is not None
        if group.node_size == 1:
            return None
        by_node = reduction.source.view(-1, group.node_size, reduction.source.numel() // group.size)
        first = group.rank - group.rank % group.node_size
        data = self._encode("inside", reduction.error, by_node.transpose(0, 1), codec)
        return self._send(data, codec, range(first, first + group.node_size), "reduce inside", self.reserve_tag())

    def _start_across(self, reduction: Reduction, inside: _Hop | None, tag: int) -> _Hop:
        """Start the hop across nodes. Return the first hop if there is one node."""
        codec, group, fed_back = self._wires.across, self.group, reduction.error
        assert codec is not None
        num_nodes = group.size // group.node_size
        if num_nodes == 1:
            assert inside is not None
            return inside
        if inside is None:
            data = self._encode("across", fed_back, reduction.source.view(num_nodes, -1), codec)
        elif fed_back is None:
            data = inside.codec.recode(inside.finish(), codec, num_nodes)
        else:
            data = self._encode("across", fed_back, inside.codec.add(inside.finish()).view(num_nodes, -1), codec)
        place = group.rank % group.node_size
        return self._send(data, codec, range(place, group.size, group.node_size), "reduce across", tag)

    def _send(self, data: torch.Tensor, codec: Codec, peers: Sequence[int], operation: str, tag: int) -> _Hop:
        """Send row k to peer k."""
        inbox, mine = torch.empty_like(data), peers.index(self.group.rank)
        exchanges = [PeerExchange(peer, data[index], inbox[index]) for index, peer in enumerate(peers) if index != mine]
        inbox[mine].copy_(data[mine])
        return _Hop(codec, self._plain.start_peer_exchange(exchanges, operation, tag), inbox, data)

    def _encode(self, hop: str, fed_back: ErrorFeedback | None, rows: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Encode rows. With error feedback, add the stored error before, and store the new one for the next time."""
        feedback = self._wires.feedback
        if fed_back is None or feedback is None:
            return codec.encode(rows)
        rows = rows.reshape(rows.shape[0], -1).float()
        kept = fed_back.kept.pop(hop, None)
        before = _ERRORS.decode(kept) if kept is not None else torch.zeros_like(rows)
        rows = rows + before
        data = codec.encode(rows)
        gone = rows - codec.decode(data)
        gone.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # errors of an overflow are dropped
        error = before.mul_(feedback.beta).add_(gone, alpha=1 - feedback.beta)
        fed_back.counts[hop] = fed_back.counts.get(hop, 0) + 1
        if fed_back.counts[hop] % feedback.reset_every:
            fed_back.kept[hop] = _ERRORS.encode(error, kept)
        return data


@dataclass(frozen=True)
class _Hop:
    """Encoded rows in flight. The received rows are added in their order."""

    codec: Codec
    pending: Pending
    inbox: torch.Tensor
    outgoing: torch.Tensor
    """Referenced until it has been sent."""

    def finish(self) -> torch.Tensor:
        """Wait for the rows, and return them."""
        self.pending.finish()
        return self.inbox


def _can_be_coded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be quantized. Empty and fp64 tensors are not."""
    return tensor.numel() > 0 and tensor.dtype != torch.float64
