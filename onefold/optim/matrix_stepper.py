"""Steps flat parameters whose optimizer looks at whole matrices: their pieces travel to owners and back.

[Note: matrices on their way]
For each batch of units: the elementwise part on this rank's shard, pieces to their owners, the work there, pieces back,
the elementwise part after it. Three batches are under way at a time: while one is worked on, the pieces of the next
travel to their owners, and those of the one before travel back. All pieces of a batch that go to one rank are one
message. What travels is 16 bits wide, which is what the work computes in anyway, so nothing is rounded for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from onefold.comm import PeerExchange
from onefold.offload.shard_store import ShardStore
from onefold.optim.matrix_rules import MatrixRule
from onefold.optim.rules import Hyper
from onefold.optim.steppers import Step, TiledStepper, whole_window
from onefold.plan.matrices import Matrix, Splits, choose_owners, matrices_of
from onefold.runtime import InFlightCollectives, Unit


class Piece(NamedTuple):
    """A part of a matrix that one rank holds."""

    matrix: int
    low: int
    high: int
    """Counted from the start of the flat parameter."""


Ways = dict[int, list[Piece]]


@dataclass(frozen=True)
class Route:
    """Where the matrices of one flat parameter go: pieces by the rank they go to, or come from."""

    matrices: Sequence[Matrix]
    mine: list[Piece]
    """What this rank holds."""
    to_owners: Ways
    from_holders: Ways

    @staticmethod
    def of(store: ShardStore, matrices: Sequence[Matrix], owners: Sequence[int], shard: int) -> Route:
        layout = store.spec.layout
        is_cut = (store.start, store.stop) != (0, layout.total)
        places = range(layout.num_shards) if is_cut else (shard,)
        route = Route(matrices, [], {}, {})
        for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            if not is_cut:
                owner = shard  # every rank has all of it, and works for itself
            for place in places:
                low, high = matrix.piece(*(layout.shard_range(place) if is_cut else (0, layout.total)))
                if low == high:
                    continue
                piece = Piece(index, low, high)
                if place == shard:
                    route.mine.append(piece)
                if place == shard != owner:
                    route.to_owners.setdefault(owner, []).append(piece)
                elif owner == shard != place:
                    route.from_holders.setdefault(place, []).append(piece)
        return route

    @cached_property
    def owned(self) -> list[int]:
        """The matrices that this rank works on: of those it has a piece of, which do not go elsewhere."""
        away = {piece.matrix for pieces in self.to_owners.values() for piece in pieces}
        return sorted({piece.matrix for piece in self.mine} - away)


@dataclass
class Part:
    """One flat parameter of a batch: `update` lies along what this rank steps."""

    store: ShardStore
    route: Route
    update: torch.Tensor
    whole: dict[int, torch.Tensor]
    """The matrices that this rank works on."""

    def held(self, piece: Piece) -> torch.Tensor:
        return self.update[piece.low - self.store.start : piece.high - self.store.start]

    def inside(self, piece: Piece) -> torch.Tensor:
        """The same piece in the matrix as a whole."""
        start = self.route.matrices[piece.matrix].start
        return self.whole[piece.matrix].view(-1)[piece.low - start : piece.high - start]


Exchange = Callable[[list[str], list[PeerExchange]], Callable[[], None]]
"""Starts an exchange of matrices of units with such names; what it returns waits for it."""


View = Callable[[Part, Piece], torch.Tensor]


class Trip:
    """All matrices of one batch of units, to their owners and back. `first`: the first rank of those that hold the
    model state between them, `shard` this one's place among them.
    """

    def __init__(self, parts: Sequence[Part], shard: int, first: int, exchange: Exchange) -> None:
        self.parts = parts
        self._shard, self._first, self._exchange = shard, first, exchange
        self.arrive: Callable[[], None] = lambda: None
        """Waits for what is under way."""

    def leave(self) -> None:
        """Pieces go to their owners."""
        for part in self.parts:
            for index in part.route.owned:
                part.whole[index] = part.update.new_empty(part.route.matrices[index].shape)
        self.arrive = self._start(
            lambda route: route.to_owners, Part.held, lambda route: route.from_holders, Part.inside
        )

    def work(self, rule: MatrixRule, groups: Sequence[Hyper], step: int) -> None:
        """This rank's matrices are worked on, and their pieces go back."""
        self.arrive()
        for part in self.parts:
            members = part.store.spec.layout.members
            for index, matrix in part.whole.items():
                hyper = groups[members[part.route.matrices[index].member].group]
                part.whole[index] = rule.work(matrix, hyper, step).contiguous()
        self.arrive = self._start(
            lambda route: route.from_holders, Part.inside, lambda route: route.to_owners, Part.held
        )

    def _start(
        self, to: Callable[[Route], Ways], source: View, back: Callable[[Route], Ways], target: View
    ) -> Callable[[], None]:
        """Pieces leave for some ranks, and others come from some; what stays on this rank is copied."""
        outgoing = {
            peer: _joined([source(part, piece) for part, piece in pieces]) for peer, pieces in self._by_peer(to)
        }
        incoming = {peer: [target(part, piece) for part, piece in pieces] for peer, pieces in self._by_peer(back)}
        nothing = self.parts[0].update.new_empty(0)
        inbox = {peer: nothing.new_empty(sum(map(torch.numel, places))) for peer, places in incoming.items()}
        exchanges = [
            PeerExchange(self._first + peer, outgoing.get(peer, nothing), inbox.get(peer, nothing))
            for peer in sorted(outgoing.keys() | inbox.keys())
        ]
        for part in self.parts:
            for piece in part.route.mine:
                if piece.matrix in part.whole:
                    target(part, piece).copy_(source(part, piece))
        wait = self._exchange(list(dict.fromkeys(part.store.unit for part in self.parts)), exchanges)

        def arrive() -> None:
            wait()
            outgoing.clear()  # until here they were on their way
            for peer, places in incoming.items():
                for place, values in zip(places, inbox[peer].split([p.numel() for p in places]), strict=True):
                    place.copy_(values)
            inbox.clear()
            incoming.clear()

        return arrive

    def _by_peer(self, way: Callable[[Route], Ways]) -> Iterator[tuple[int, list[tuple[Part, Piece]]]]:
        for peer in sorted({peer for part in self.parts for peer in way(part.route)}):
            yield peer, [(part, piece) for part in self.parts for piece in way(part.route).get(peer, ())]


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _try_products(dtype: torch.dtype) -> None:
    """Where a CPU has no products of 16 bits, torch finds that out at the first one, and then computes all others of the
    process another way, those of fp32 too. That must not be between two steps: a run that is resumed would differ.
    """
    torch.ones(32, 32, dtype=dtype) @ torch.ones(32, 32, dtype=dtype)


class MatrixStepper(TiledStepper):
    """A rule of whole matrices. Flat parameters of other groups are stepped as by any rule."""

    def __init__(
        self,
        rule: MatrixRule,
        groups: Sequence[Hyper],
        stores: Sequence[ShardStore],
        splits: Splits,
        in_flight: InFlightCollectives,
    ) -> None:
        super().__init__(rule, stores)
        self._matrix_rule, self._in_flight = rule, in_flight
        group = in_flight.collective.group
        self._shard, self._first = group.shard, group.rank - group.shard
        taken = [store for store in stores if rule.takes(groups[store.spec.layout.members[0].group])]
        found = [(store.spec.layout, matrices_of(store.spec.layout, splits)) for store in taken]
        owners = choose_owners(found, rule.cost)
        self._matrices = {
            store: list(zip(matrices, own, strict=True))
            for store, (_, matrices), own in zip(taken, found, owners, strict=True)
        }
        if taken and taken[0].device.type == "cpu":
            _try_products(rule.wire)
        self._routes: dict[tuple[ShardStore, frozenset[int]], Route] = {}
        self._parts: list[Part] = []
        self._under_way: deque[tuple[list[Unit], Trip | None, Step]] = deque()

    def step(self, store: ShardStore, gradient: torch.Tensor, step: Step) -> None:
        if store not in self._matrices:
            super().step(store, gradient, step)
            return
        update = torch.empty(store.stop - store.start, dtype=self._matrix_rule.wire, device=gradient.device)
        for window in whole_window(store):
            self._tiler.step(store, window, window.start, window.stop, gradient, None, step, update)
        self._parts.append(Part(store, self._route(store), update, {}))

    def end_batch(self, batch: list[Unit], step: Step) -> Iterator[list[Unit]]:
        trip = Trip(self._parts, self._shard, self._first, self._exchange) if self._parts else None
        self._parts = []
        if trip is not None:
            trip.leave()
        self._under_way.append((batch, trip, step))
        if len(self._under_way) > 1:
            self._work(self._under_way[-2])
        if len(self._under_way) > 2:
            yield self._arrive()

    def end_step(self) -> Iterator[list[Unit]]:
        if self._under_way:
            self._work(self._under_way[-1])
        while self._under_way:
            yield self._arrive()

    def _work(self, under_way: tuple[list[Unit], Trip | None, Step]) -> None:
        _, trip, step = under_way
        if trip is not None:
            trip.work(self._matrix_rule, step.groups, step.number)

    def _arrive(self) -> list[Unit]:
        batch, trip, step = self._under_way.popleft()
        if trip is not None:
            trip.arrive()
            for part in trip.parts:
                self._finish(part, step)
        return batch

    def _finish(self, part: Part, step: Step) -> None:
        store = part.store
        assert isinstance(store.master, torch.Tensor)
        members = store.spec.layout.members
        for piece in part.route.mine:
            matrix = part.route.matrices[piece.matrix]
            low, high = piece.low - store.start, piece.high - store.start
            parameter = store.master[low:high]
            hyper = step.groups[members[matrix.member].group]
            self._matrix_rule.finish(parameter, part.held(piece), matrix.shape, hyper)
            if store.computes is not None:
                store.computes[low:high].copy_(parameter)

    def _route(self, store: ShardStore) -> Route:
        """Without what the user has frozen, which is the same on all ranks."""
        key = store, frozenset(store.frozen)
        if key not in self._routes:
            left = [(matrix, owner) for matrix, owner in self._matrices[store] if matrix.member not in store.frozen]
            self._routes[key] = Route.of(store, [m for m, _ in left], [o for _, o in left], self._shard)
        return self._routes[key]

    def _exchange(self, names: list[str], exchanges: list[PeerExchange]) -> Callable[[], None]:
        return self._in_flight.start_exchange("matrices of", names, exchanges)
