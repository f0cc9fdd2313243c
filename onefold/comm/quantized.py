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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from onefold.comm.codec import Codec
from onefold.comm.collective import Collective, Gathering, Lane, Pending, Reduction, Swap
from onefold.comm.mesh import Group


@dataclass(frozen=True)
class Feedback:
    """What a codec loses is added to what it encodes next: a moving average of errors, forgotten every so often."""

    beta: float
    reset_every: int


@dataclass(frozen=True)
class Wires:
    """In what form lossy traffic travels; None: as it is."""

    parameters: Codec | None = None
    inside: Codec | None = None
    across: Codec | None = None
    feedback: Feedback | None = None


class Quantized:
    """A collective that quantizes what may be, and leaves the rest to another one."""

    def __init__(self, plain: Collective, wires: Wires, device: torch.device) -> None:
        self.group: Group = plain.group
        self._plain, self._wires = plain, wires
        self._lane = Lane(device)
        self._errors: dict[Hashable, tuple[torch.Tensor, int]] = {}

    # -- gathers ------------------------------------------------------------------------------------------------

    def start_gather(self, gatherings: Sequence[Gathering]) -> Pending:
        codec = self._wires.parameters
        coded = [g for g in gatherings if g.lossy and codec is not None]
        if not coded:
            return self._plain.start_gather(gatherings)
        assert codec is not None
        rank, size = self.group.rank, self.group.size
        lines = []
        with self._lane.enter():
            for gathering in coded:
                own = gathering.place_own(rank, size).view(1, -1)
                line = own.new_empty(size, codec.row_bytes(own.numel()), dtype=torch.uint8)
                codec.encode(own, line[rank : rank + 1])
                lines.append(line)
            plain = [g for g in gatherings if g not in coded]
            pending = self._plain.start_gather([*plain, *(Gathering(line.view(-1)) for line in lines)])

        def complete() -> None:
            pending.finish()
            for gathering, line in zip(coded, lines, strict=True):
                rows = gathering.line.view(size, -1)
                for row, data in zip(rows, line, strict=True):  # one rank's slice at a time is wide
                    row.copy_(codec.decode(data.unsqueeze(0), row.numel())[0])

        return self._lane.pending(complete)

    def start_swap(self, swaps: Sequence[Swap], operation: str) -> Pending:
        return self._plain.start_swap(swaps, operation)

    # -- reductions ---------------------------------------------------------------------------------------------

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        if self._wires.inside is None or self.group.size == 1:
            return self._plain.start_reduce_scatter(reductions)
        with self._lane.enter():
            hops = [self._start_inside(reduction) for reduction in reductions]

        def complete() -> None:
            across = [self._start_across(hop.finish()) for hop in hops]
            for reduction, hop in zip(reductions, across, strict=True):
                total = hop.finish().view(-1)
                if reduction.add:
                    reduction.target.add_(total)
                else:
                    reduction.target.copy_(total)

        return self._lane.pending(complete)

    def _start_inside(self, reduction: Reduction) -> _Hop:
        codec, group = self._wires.inside, self.group
        assert codec is not None
        num_places, num_nodes = group.node_size, group.size // group.node_size
        line = reduction.source.view(num_nodes, num_places, -1)
        rows = line.transpose(0, 1).reshape(num_places, -1).float()
        if num_places == 1:
            return _Hop.nothing(rows.view(num_nodes, -1))
        rows = self._with_errors(reduction.key, rows)
        data = codec.encode(rows)
        self._keep_errors(reduction.key, rows, data, codec)
        first = group.rank - group.rank % num_places
        peers = [first + place for place in range(num_places)]
        return self._swap(codec, data, peers, (num_nodes, -1), "reduce inside")

    def _start_across(self, sums: torch.Tensor) -> _Hop:
        codec, group = self._wires.across, self.group
        assert codec is not None
        if sums.shape[0] == 1:
            return _Hop.nothing(sums)
        place = group.rank % group.node_size
        peers = [node * group.node_size + place for node in range(sums.shape[0])]
        return self._swap(codec, codec.encode(sums), peers, (1, -1), "reduce across")

    def _swap(
        self, codec: Codec, data: torch.Tensor, peers: Sequence[int], shape: tuple[int, int], operation: str
    ) -> _Hop:
        """Row k goes to peer k; what comes back is added in the order of the peers."""
        inbox = torch.empty_like(data)
        swaps = [Swap(peer, data[index], inbox[index]) for index, peer in enumerate(peers) if peer != self.group.rank]
        mine = peers.index(self.group.rank)
        inbox[mine].copy_(data[mine])
        return _Hop(codec, self._plain.start_swap(swaps, operation), inbox, shape, data)

    # -- error feedback -----------------------------------------------------------------------------------------

    def _with_errors(self, key: Hashable, rows: torch.Tensor) -> torch.Tensor:
        kept = self._errors.get(key) if self._wires.feedback is not None else None
        return rows if kept is None else rows + kept[0]

    def _keep_errors(self, key: Hashable, rows: torch.Tensor, data: torch.Tensor, codec: Codec) -> None:
        feedback = self._wires.feedback
        if feedback is None or key is None:
            return
        lost = rows - codec.decode(data, rows.shape[1])
        lost = torch.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0)  # an overflow is no error to make up for
        before, count = self._errors.get(key, (torch.zeros_like(lost), 0))
        count += 1
        if count % feedback.reset_every == 0:
            self._errors[key] = torch.zeros_like(lost), count
        else:
            self._errors[key] = before.mul(feedback.beta).add_(lost, alpha=1 - feedback.beta), count


@dataclass(frozen=True)
class _Hop:
    """Rows on their way, and what to do with them: decode and add."""

    codec: Codec | None
    pending: Pending
    inbox: torch.Tensor
    shape: tuple[int, int]
    outgoing: torch.Tensor | None = None
    """Held until it has been sent."""

    @staticmethod
    def nothing(sums: torch.Tensor) -> _Hop:
        return _Hop(None, Pending(lambda: None), sums, (sums.shape[0], -1))

    def finish(self) -> torch.Tensor:
        self.pending.finish()
        if self.codec is None:
            return self.inbox
        numel = values_in(self.codec, self.inbox.shape[1])
        total = self.codec.decode(self.inbox[:1], numel)
        for row in range(1, self.inbox.shape[0]):
            total += self.codec.decode(self.inbox[row : row + 1], numel)
        return total.view(self.shape)


def values_in(codec: Codec, row_bytes: int) -> int:
    """The values of a row of so many bytes."""
    block_bytes = codec.row_bytes(codec.block)
    return row_bytes // block_bytes * codec.block
