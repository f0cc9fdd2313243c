"""The exchange of matrices between ranks: each matrix is gathered on its owner, computed, and scattered again.

A shard may hold a part of a matrix only. `MatrixRoute` plans which parts of one flat parameter are sent where;
`MatrixExchange` sends the parts of one batch of units. See [Note: the matrix exchange] in `matrix_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from onefold.comm import PeerExchange
from onefold.offload.shard_store import ShardStore
from onefold.plan.matrices import Matrix


class MatrixPiece(NamedTuple):
    """The part of a matrix that one rank stores: [low, high) of the flat parameter."""

    matrix: int
    low: int
    high: int


PiecesByRank = dict[int, list[MatrixPiece]]


@dataclass(frozen=True)
class MatrixRoute:
    """The pieces of one flat parameter's matrices that this rank sends to other ranks and receives from them."""

    matrices: Sequence[Matrix]
    local: list[MatrixPiece]
    """The pieces that this rank stores."""
    to_owners: PiecesByRank
    """The pieces that this rank stores and other ranks own, by owner."""
    from_holders: PiecesByRank
    """The pieces that this rank owns and other ranks store, by the rank that stores them."""

    @staticmethod
    def of(store: ShardStore, matrices: Sequence[Matrix], owners: Sequence[int], shard: int) -> MatrixRoute:
        """Return the route of a flat parameter, given the owner of each matrix and the number of this rank's shard."""
        layout = store.spec.layout
        is_sharded = (store.start, store.stop) != (0, layout.total)
        holders = range(layout.num_shards) if is_sharded else (shard,)
        route = MatrixRoute(matrices, [], {}, {})
        for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            if not is_sharded:
                owner = shard  # every rank stores all matrices, and computes them itself
            for holder in holders:
                low, high = matrix.piece(*(layout.shard_range(holder) if is_sharded else (0, layout.total)))
                if low == high:
                    continue
                piece = MatrixPiece(index, low, high)
                if holder == shard:
                    route.local.append(piece)
                if holder == shard != owner:
                    route.to_owners.setdefault(owner, []).append(piece)
                elif owner == shard != holder:
                    route.from_holders.setdefault(holder, []).append(piece)
        return route

    @cached_property
    def owned(self) -> list[int]:
        """The matrices that this rank owns. An owner stores at least a piece of its matrix."""
        sent = {piece.matrix for pieces in self.to_owners.values() for piece in pieces}
        return sorted({piece.matrix for piece in self.local} - sent)


@dataclass
class ExchangedMatrices:
    """The matrices of one flat parameter in an exchange."""

    store: ShardStore
    route: MatrixRoute
    update: torch.Tensor
    """The update of this rank's shard, element by element."""
    owned: dict[int, torch.Tensor]
    """The whole matrices that this rank owns, by their index in the route."""

    def in_shard(self, piece: MatrixPiece) -> torch.Tensor:
        """Return the view of a piece in this rank's shard."""
        return self.update[piece.low - self.store.start : piece.high - self.store.start]

    def in_matrix(self, piece: MatrixPiece) -> torch.Tensor:
        """Return the view of a piece in its whole matrix."""
        start = self.route.matrices[piece.matrix].start
        return self.owned[piece.matrix].view(-1)[piece.low - start : piece.high - start]


StartExchange = Callable[[list[str], list[PeerExchange]], Callable[[], None]]
"""Starts an exchange of matrices of the named units. Returns a function that waits for it."""

PieceView = Callable[[ExchangedMatrices, MatrixPiece], torch.Tensor]


class MatrixExchange:
    """The exchange of all matrices of one batch of units: to their owners, and back.

    `first_rank` is the lowest global rank of those that shard the model state.
    """

    def __init__(self, parts: Sequence[ExchangedMatrices], first_rank: int, start_exchange: StartExchange) -> None:
        self.parts = parts
        self._first_rank, self._start_exchange = first_rank, start_exchange
        self.wait: Callable[[], None] = lambda: None
        """Waits for the messages in flight, and copies the received pieces to where they belong."""

    def send_pieces(self) -> None:
        """Start sending the pieces of all matrices to their owners."""
        for part in self.parts:
            for index in part.route.owned:
                part.owned[index] = part.update.new_empty(part.route.matrices[index].shape)
        self.wait = self._launch(
            lambda route: route.to_owners,
            ExchangedMatrices.in_shard,
            lambda route: route.from_holders,
            ExchangedMatrices.in_matrix,
        )

    def compute(self, work: Callable[[ShardStore, Matrix, torch.Tensor], torch.Tensor]) -> None:
        """Apply `work` to the matrices that this rank owns, and start sending their pieces back."""
        self.wait()
        for part in self.parts:
            for index, values in part.owned.items():
                part.owned[index] = work(part.store, part.route.matrices[index], values)
        self.wait = self._launch(
            lambda route: route.from_holders,
            ExchangedMatrices.in_matrix,
            lambda route: route.to_owners,
            ExchangedMatrices.in_shard,
        )

    def _launch(
        self,
        sent: Callable[[MatrixRoute], PiecesByRank],
        source: PieceView,
        received: Callable[[MatrixRoute], PiecesByRank],
        target: PieceView,
    ) -> Callable[[], None]:
        """Start one message to and from each peer, and copy the pieces whose owner also stores them.

        Return a function that waits for the messages.
        """
        outgoing = {
            peer: _concatenated([source(part, piece) for part, piece in pieces])
            for peer, pieces in self._pieces_by_peer(sent)
        }
        incoming = {
            peer: [target(part, piece) for part, piece in pieces] for peer, pieces in self._pieces_by_peer(received)
        }
        empty = self.parts[0].update.new_empty(0)
        buffers = {peer: empty.new_empty(sum(map(torch.numel, targets))) for peer, targets in incoming.items()}
        exchanges = [
            PeerExchange(self._first_rank + peer, outgoing.get(peer, empty), buffers.get(peer, empty))
            for peer in sorted(outgoing.keys() | buffers.keys())
        ]
        for part in self.parts:
            for piece in part.route.local:
                if piece.matrix in part.owned:
                    target(part, piece).copy_(source(part, piece))
        wait_for_messages = self._start_exchange(
            list(dict.fromkeys(part.store.unit_name for part in self.parts)), exchanges
        )

        def wait() -> None:
            wait_for_messages()
            outgoing.clear()  # the messages are read until here
            for peer, targets in incoming.items():
                for view, values in zip(targets, buffers[peer].split([t.numel() for t in targets]), strict=True):
                    view.copy_(values)
            buffers.clear()
            incoming.clear()

        return wait

    def _pieces_by_peer(
        self, pieces_of: Callable[[MatrixRoute], PiecesByRank]
    ) -> Iterator[tuple[int, list[tuple[ExchangedMatrices, MatrixPiece]]]]:
        """Yield, for each peer, the pieces of all flat parameters in the order in which both ranks list them."""
        for peer in sorted({peer for part in self.parts for peer in pieces_of(part.route)}):
            yield peer, [(part, piece) for part in self.parts for piece in pieces_of(part.route).get(peer, ())]


def _concatenated(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
