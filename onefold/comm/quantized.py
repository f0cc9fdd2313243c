"""Quantized wires over any collective: gathers as integers, reductions as a two-hop all-to-all.

[Note: two hops]
Values that are quantized must not be added as integers: their scales differ. So each rank sends every other rank that
rank's slice, which is decoded and added in fp32. Inside a node first: a rank gets from its neighbours the slices of all
ranks that have its own place in their node, one for each node, and adds them. What is left is one sum a node, encoded
again and sent across to the rank it belongs to. Across nodes travels 1 / (ranks of a node) of what travels inside.

    line of a rank   [node][place][slice]  ->  rows by place  [place][node][slice]     inside the node
    sum of a node                              rows by node           [node][slice]     across nodes
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

# An error needs no more digits than that: a byte a value.
_ERRORS = Codec(8)


@dataclass(frozen=True)
class Wires:
    """In what form lossy traffic travels; None: as it is."""

    parameters: Codec | None = None
    inside: Codec | None = None
    across: Codec | None = None
    feedback: Feedback | None = None

    @staticmethod
    def of(plan: Plan) -> Wires:
        codecs = {Wire.INT8: Codec(8), Wire.INT4: Codec(4)}
        return Wires(
            parameters=codecs.get(plan.frozen_wire),
            inside=Codec(8) if plan.gradients.wire is not Wire.NATIVE else None,
            across=codecs.get(plan.gradients.wire),
            feedback=plan.feedback,
        )


class Quantized(CollectiveWrapper):
    """A collective that quantizes what may be, and leaves the rest to another one."""

    def __init__(self, plain: Collective, wires: Wires, device: torch.device) -> None:
        super().__init__(plain, plain.group, device)
        self._wires = wires

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        codec = self._wires.parameters
        coded = [op for op in ops if op.lossy and _can_be_coded(op.output)]
        if codec is None or not coded:
            return self._plain.start_gather(ops)
        plain = [op for op in ops if not (op.lossy and _can_be_coded(op.output))]
        lines = []
        with self._lane.enter():
            for op in coded:
                size = op.span or self.group.size
                own = op.place_input(self.group.rank, size).view(1, -1)
                line = own.new_empty(size, codec.row_bytes(own.numel()), dtype=torch.uint8)
                codec.encode(own, line.narrow(0, self.group.rank % size, 1))
                lines.append(line)
                plain.append(AllGatherOp(line.view(-1), span=op.span))
            pending = self._plain.start_gather(plain)

        def complete() -> None:
            pending.finish()
            for op, line in zip(coded, lines, strict=True):
                codec.decode(line, op.output.view(line.shape[0], -1))

        return self._lane.pending(complete)

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        if self._wires.inside is None or self.group.size == 1:
            return self._plain.start_reduce_scatter(reductions)
        coded = [reduction for reduction in reductions if _can_be_coded(reduction.source)]
        plain = [reduction for reduction in reductions if not _can_be_coded(reduction.source)]
        with self._lane.enter():
            beside = self._plain.start_reduce_scatter(plain) if plain else Pending(lambda: None)
            hops = [(reduction, self._start_inside(reduction), self.reserve_tag()) for reduction in coded]

        def complete() -> None:
            across = [(reduction, self._start_across(reduction, hop, tag)) for reduction, hop, tag in hops]
            for reduction, hop in across:
                reduction.store(hop.codec.add(hop.finish()))
            beside.finish()

        return self._lane.beside(complete)

    def _start_inside(self, reduction: Reduction) -> _Hop | None:
        """None: there is nobody else inside."""
        codec, group = self._wires.inside, self.group
        assert codec is not None
        if group.node_size == 1:
            return None
        by_node = reduction.source.view(-1, group.node_size, reduction.source.numel() // group.size)
        first = group.rank - group.rank % group.node_size
        data = self._encode("inside", reduction.error, by_node.transpose(0, 1), codec)
        return self._send(data, codec, range(first, first + group.node_size), "reduce inside", self.reserve_tag())

    def _start_across(self, reduction: Reduction, inside: _Hop | None, tag: int) -> _Hop:
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
        """Row k goes to peer k."""
        inbox, mine = torch.empty_like(data), peers.index(self.group.rank)
        exchanges = [PeerExchange(peer, data[index], inbox[index]) for index, peer in enumerate(peers) if index != mine]
        inbox[mine].copy_(data[mine])
        return _Hop(codec, self._plain.start_peer_exchange(exchanges, operation, tag), inbox, data)

    def _encode(self, hop: str, fed_back: ErrorFeedback | None, rows: torch.Tensor, codec: Codec) -> torch.Tensor:
        """With error feedback: the rows and what was lost before; what this loses is kept for the next."""
        feedback = self._wires.feedback
        if fed_back is None or feedback is None:
            return codec.encode(rows)
        rows = rows.reshape(rows.shape[0], -1).float()
        kept = fed_back.kept.pop(hop, None)
        before = _ERRORS.decode(kept) if kept is not None else torch.zeros_like(rows)
        rows = rows + before
        data = codec.encode(rows)
        gone = rows - codec.decode(data)
        gone.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # an overflow is not made up for
        error = before.mul_(feedback.beta).add_(gone, alpha=1 - feedback.beta)
        fed_back.counts[hop] = fed_back.counts.get(hop, 0) + 1
        if fed_back.counts[hop] % feedback.reset_every:
            fed_back.kept[hop] = _ERRORS.encode(error, kept)
        return data


@dataclass(frozen=True)
class _Hop:
    """Rows on their way; what arrives is to be added in the order of the rows."""

    codec: Codec
    pending: Pending
    inbox: torch.Tensor
    outgoing: torch.Tensor
    """Held until it has been sent."""

    def finish(self) -> torch.Tensor:
        self.pending.finish()
        return self.inbox


def _can_be_coded(line: torch.Tensor) -> bool:
    """Who asks for fp64 does not want eight bits."""
    return line.numel() > 0 and line.dtype != torch.float64
