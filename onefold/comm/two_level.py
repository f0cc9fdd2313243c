"""Collectives that send each value between two nodes once, over any exchange between peers.

[Note: two levels]
A slice has an agent on every node: the rank there with the place of its owner (`Nodes.agent`). In an all-gather each
rank sends its slice to its neighbours and to its agents, and agents send it on to their neighbours. In a reduction the
agent of a slice on each node adds what its neighbours have for it, and sends the sum to the owner:

    4 ranks, 2 nodes, slices a b c d        inside                        across
    rank 0   a0 b0 c0 d0     a c of both  ->  a0+a1  c0+c1     c to rank 2  ->   a0+a1 + a2+a3
    rank 1   a1 b1 c1 d1     b d of both  ->  b0+b1  d0+d1     d to rank 3  ->   b0+b1 + b2+b3

Agents send branches of the tree over all ranks ([Note: one order of addition] in tree.py), so the bits equal those of
one level for any nodes. An aligned node of 2, 4, 8, ... ranks is one branch; other nodes consist of several. Sums are
sent in fp32. The gradient of a rank that is a branch by itself is sent in its own dtype.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from onefold.comm.collective import AllGatherOp, Collective, CollectiveWrapper, PeerExchange, Pending, Reduction
from onefold.comm.mesh import Group
from onefold.comm.tree import GradChunk, add_branches, add_tree, branches_of, split_into_rounds, sum_dtype
from onefold.pool import Pool


class TwoLevel(CollectiveWrapper):
    """A collective over several nodes. `sums` is the dtype in which fp32 sums are sent between nodes."""

    def __init__(
        self, plain: Collective, group: Group, device: torch.device, sums: torch.dtype = torch.float32
    ) -> None:
        super().__init__(plain, group, device)
        self._sums = sums
        self._pool, self._lock = Pool(device), threading.Lock()
        nodes, mine = group.nodes, group.nodes.of(group.rank)
        self._neighbours = [rank for rank in nodes.ranks(mine) if rank != group.rank]
        # For each rank of this node, the slices that it is the agent of. Its own slice is one of them.
        self._agent_slices = {
            rank: [s for s in range(group.size) if nodes.agent(mine, s) == rank] for rank in nodes.ranks(mine)
        }
        self._branches = [branches_of(nodes.ranks(node), group.size) for node in range(len(nodes.sizes))]

    # -- gathers ------------------------------------------------------------------------------------------------

    def start_gather(self, ops: Sequence[AllGatherOp]) -> Pending:
        # NCCL's own all-gather sends each value between two nodes once too.
        near = [each for each in ops if self.group.uses_nccl or not self._crosses(each)]
        far = [each for each in ops if not self.group.uses_nccl and self._crosses(each)]
        if not far:
            return self._plain.start_gather(near)
        others = self._plain.start_gather(near) if near else Pending(lambda: None)
        with self._comm_stream.enter():
            first, second = self.reserve_tag(), self.reserve_tag()
            hops = [self._hops_of(op) for op in far]
            spread = self._plain.start_peer_exchange([each for hop, _ in hops for each in hop], "gather", first)

        def complete() -> None:
            spread.finish()
            self._plain.start_peer_exchange([each for _, hop in hops for each in hop], "gather", second).finish()
            others.finish()

        return self._comm_stream.complete_in_background(complete)

    def _crosses(self, op: AllGatherOp) -> bool:
        """Return whether any rank gathers from another node. The answer is the same on all ranks."""
        span = op.span or self.group.size
        return any(
            len(self.group.nodes.among(range(first, first + span)).sizes) > 1
            for first in range(0, self.group.size, span)
        )

    def _hops_of(self, op: AllGatherOp) -> tuple[list[PeerExchange], list[PeerExchange]]:
        """Return the exchanges with neighbours and agents, and those from agents on to their neighbours."""
        group, span = self.group, op.span or self.group.size
        own = op.place_input(group.rank, group.size)
        start = group.rank - group.rank % span
        nodes, rank = group.nodes.among(range(start, start + span)), group.rank - start
        mine = nodes.of(rank)

        def slice_of(other: int) -> torch.Tensor:
            return op.output.narrow(0, other * own.numel(), own.numel())

        nothing = own[:0]
        neighbours = [other for other in nodes.ranks(mine) if other != rank]
        agents = {nodes.agent(node, rank) for node in range(len(nodes.sizes)) if node != mine}
        owners = [other for other in range(span) if nodes.of(other) != mine and nodes.agent(mine, other) == rank]
        first = [PeerExchange(start + other, own, slice_of(other)) for other in neighbours]
        for other in sorted(agents | set(owners)):
            sends, receives = other in agents, other in owners
            first.append(
                PeerExchange(start + other, own if sends else nothing, slice_of(other) if receives else nothing)
            )
        second = []
        for other in neighbours:
            theirs = [far for far in range(span) if nodes.of(far) != mine and nodes.agent(mine, far) == other]
            for outgoing, incoming in zip_longest(map(slice_of, owners), map(slice_of, theirs), fillvalue=nothing):
                second.append(PeerExchange(start + other, outgoing, incoming))
        return first, second

    # -- reductions ---------------------------------------------------------------------------------------------

    def start_reduce_scatter(self, reductions: Sequence[Reduction]) -> Pending:
        reductions, others = self._start_spanned(reductions)
        with self._comm_stream.enter():
            sources = [self._on_wire(reduction) for reduction in reductions]
            rounds = [
                _TaggedRound(chunks, self.reserve_tag(), self.reserve_tag())
                for chunks in split_into_rounds(reductions, sources, self.group.size)
            ]
            ahead = deque([self._start_inside(each) for each in rounds[:1]])

        def complete() -> None:
            for number, this in enumerate(rounds):
                ahead.extend(self._start_inside(after) for after in rounds[number + 1 : number + 2])
                sums, pending = ahead.popleft()
                pending.finish()
                across = [each for one in sums for each in self._exchanges_across(one)]
                self._plain.start_peer_exchange(across, "reduce-scatter", this.across).finish()
                for one in sums:
                    add_branches(one.branches, one.chunk.target, add=one.chunk.add)
                    self._give_back(one.taken)
            self._give_back([cast for cast, each in zip(sources, reductions, strict=True) if cast is not each.source])
            others.finish()

        return self._comm_stream.complete_in_background(complete)

    def _start_inside(self, this: _TaggedRound) -> tuple[list[_Sums], Pending]:
        sums = []
        for chunk in this.chunks:
            shape = (len(self._agent_slices[self.group.rank]), len(self._neighbours), chunk.rows.shape[1])
            inbox = self._take(math.prod(shape), chunk.rows.dtype)
            sums.append(_Sums(chunk, inbox.view(shape), [inbox], {}))
        exchanges = [each for one in sums for each in self._exchanges_inside(one)]
        return sums, self._plain.start_peer_exchange(exchanges, "reduce-scatter", this.inside)

    def _exchanges_inside(self, one: _Sums) -> Iterator[PeerExchange]:
        """Yield exchanges with neighbours: the slices that they are agents of for those that this rank is agent of."""
        nothing = one.chunk.rows[0, :0]
        for column, other in enumerate(self._neighbours):
            outgoing = [one.chunk.rows[slice_] for slice_ in self._agent_slices[other]]
            for sent, received in zip_longest(outgoing, one.inbox[:, column], fillvalue=nothing):
                yield PeerExchange(other, sent, received)

    def _exchanges_across(self, one: _Sums) -> Iterator[PeerExchange]:
        """Yield exchanges across nodes: send branches to the owners of slices, receive this rank's from its agents."""
        group, nodes, mine = self.group, self.group.nodes, self.group.nodes.of(self.group.rank)
        columns = {other: column for column, other in enumerate(self._neighbours)}
        sent: dict[int, list[torch.Tensor]] = {}
        for index, slice_ in enumerate(self._agent_slices[group.rank]):
            own = one.chunk.rows[slice_]
            pieces = {
                rank: one.inbox[index, columns[rank]] if rank != group.rank else own for rank in nodes.ranks(mine)
            }
            sums = {branch: self._sum(one, [pieces[rank] for rank in branch]) for branch in self._branches[mine]}
            if slice_ == group.rank:
                one.branches.update(sums)
            else:
                sent[slice_] = [total.to(self._wire(one, branch)) for branch, total in sums.items()]
        received: dict[int, list[torch.Tensor]] = {}
        for node, branches in enumerate(self._branches):
            if node != mine:
                agent = nodes.agent(node, group.rank)
                for branch in branches:
                    one.branches[branch] = self._room(one, branch)
                    received.setdefault(agent, []).append(one.branches[branch])
        nothing = one.chunk.rows[0, :0]
        for peer in sorted(sent.keys() | received.keys()):
            for outgoing, incoming in zip_longest(sent.get(peer, []), received.get(peer, []), fillvalue=nothing):
                yield PeerExchange(peer, outgoing, incoming)

    def _sum(self, one: _Sums, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a branch. A branch of one rank is returned as it is."""
        if len(pieces) == 1:
            return pieces[0]
        total = self._take(pieces[0].numel(), sum_dtype(pieces[0].dtype))
        one.taken.append(total)
        add_tree(pieces, total)
        return total

    def _wire(self, one: _Sums, branch: range) -> torch.dtype:
        """Return the dtype in which a branch is sent between nodes."""
        own = one.chunk.rows.dtype
        if len(branch) == 1:
            return own
        return self._sums if sum_dtype(own) == torch.float32 else own

    def _room(self, one: _Sums, branch: range) -> torch.Tensor:
        """Return a buffer for a branch from another node."""
        room = self._take(one.chunk.rows.shape[1], self._wire(one, branch))
        one.taken.append(room)
        return room

    def _on_wire(self, reduction: Reduction) -> torch.Tensor:
        source = reduction.source
        return source if source.dtype == reduction.wire else self._take(source.numel(), reduction.wire).copy_(source)

    def _give_back(self, taken: Sequence[torch.Tensor]) -> None:
        with self._lock:
            for buffer in taken:
                self._pool.give_back(buffer)

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._lock:  # a thread may complete this collective while the next one starts
            return self._pool.take(numel, dtype)


@dataclass(frozen=True)
class _TaggedRound:
    """Chunks that are sent together, with the tags of their exchanges."""

    chunks: list[GradChunk]
    inside: int
    across: int


@dataclass(frozen=True)
class _Sums:
    """The sums of a chunk.

    `inbox` has a row from each neighbour for each slice that this rank is the agent of. `taken` are buffers to return
    to the pool. `branches` cover this rank's own slice over all ranks.
    """

    chunk: GradChunk
    inbox: torch.Tensor
    taken: list[torch.Tensor]
    branches: dict[range, torch.Tensor]
