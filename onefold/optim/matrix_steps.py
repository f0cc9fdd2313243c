"""Steps flat parameters whose optimizer looks at whole matrices: their pieces travel to owners and back.

[Note: matrices on their way]
For each batch of units: the elementwise part on this rank's shard, pieces to their owners, the work there, pieces back,
the elementwise part after it. Three batches are under way at a time: while one is worked on, the pieces of the next
travel to their owners, and those of the one before travel back. All pieces of a batch that go to one rank are one
message. What travels is 16 bits wide, which is what the work computes in anyway, so nothing is rounded for it.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from onefold.comm import PeerExchange
from onefold.config.keys import shown
from onefold.offload.publish import InPlace, Publisher
from onefold.offload.shard_store import ShardStore
from onefold.optim.matrix_rules import WIRE, AnyRule, Kept, MatrixRule, MovedPiece, RawPiece, work_on
from onefold.optim.pipeline import StateWindow, step_shard, whole_window
from onefold.optim.rules import MASTER, Hyper
from onefold.optim.tiles import Step, Tiler
from onefold.plan.layout import Member
from onefold.plan.matrices import Matrix, Splits, choose_owners, matrices_of
from onefold.runtime import InFlightCollectives, Unit


class MatrixPiece(NamedTuple):
    """A part of a matrix that one rank holds."""

    matrix: int
    low: int
    high: int
    """Counted from the start of the flat parameter."""


Ways = dict[int, list[MatrixPiece]]


@dataclass(frozen=True)
class MatrixRoute:
    """Where the matrices of one flat parameter go: pieces by the rank they go to, or come from."""

    matrices: Sequence[Matrix]
    mine: list[MatrixPiece]
    """What this rank holds."""
    to_owners: Ways
    from_holders: Ways

    @staticmethod
    def of(store: ShardStore, matrices: Sequence[Matrix], owners: Sequence[int], shard: int) -> MatrixRoute:
        layout = store.spec.layout
        is_cut = (store.start, store.stop) != (0, layout.total)
        places = range(layout.num_shards) if is_cut else (shard,)
        route = MatrixRoute(matrices, [], {}, {})
        for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            if not is_cut:
                owner = shard  # every rank has all of it, and works for itself
            for place in places:
                low, high = matrix.piece(*(layout.shard_range(place) if is_cut else (0, layout.total)))
                if low == high:
                    continue
                piece = MatrixPiece(index, low, high)
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
class TravellingMatrices:
    """The matrices of one flat parameter of a batch: `update` lies along what this rank steps."""

    store: ShardStore
    route: MatrixRoute
    update: torch.Tensor
    whole: dict[int, torch.Tensor]
    """The matrices that this rank works on."""

    def held(self, piece: MatrixPiece) -> torch.Tensor:
        return self.update[piece.low - self.store.start : piece.high - self.store.start]

    def inside(self, piece: MatrixPiece) -> torch.Tensor:
        """The same piece in the matrix as a whole."""
        start = self.route.matrices[piece.matrix].start
        return self.whole[piece.matrix].view(-1)[piece.low - start : piece.high - start]


StartExchange = Callable[[list[str], list[PeerExchange]], Callable[[], None]]
"""Starts an exchange of matrices of units with such names; what it returns waits for it."""

View = Callable[[TravellingMatrices, MatrixPiece], torch.Tensor]


class MatrixTrip:
    """All matrices of one batch of units, to their owners and back. `first`: the first rank of those that hold the
    model state between them.
    """

    def __init__(self, parts: Sequence[TravellingMatrices], first: int, exchange: StartExchange) -> None:
        self.parts = parts
        self._first, self._exchange = first, exchange
        self.arrive: Callable[[], None] = lambda: None
        """Waits for what is under way."""

    def leave(self) -> None:
        """Pieces go to their owners."""
        for part in self.parts:
            for index in part.route.owned:
                part.whole[index] = part.update.new_empty(part.route.matrices[index].shape)
        self.arrive = self._start(
            lambda route: route.to_owners,
            TravellingMatrices.held,
            lambda route: route.from_holders,
            TravellingMatrices.inside,
        )

    def work(self, work: Callable[[ShardStore, Matrix, torch.Tensor], torch.Tensor]) -> None:
        """This rank's matrices are worked on, and their pieces go back."""
        self.arrive()
        for part in self.parts:
            for index, values in part.whole.items():
                part.whole[index] = work(part.store, part.route.matrices[index], values)
        self.arrive = self._start(
            lambda route: route.from_holders,
            TravellingMatrices.inside,
            lambda route: route.to_owners,
            TravellingMatrices.held,
        )

    def _start(
        self, to: Callable[[MatrixRoute], Ways], source: View, back: Callable[[MatrixRoute], Ways], target: View
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

    def _by_peer(
        self, way: Callable[[MatrixRoute], Ways]
    ) -> Iterator[tuple[int, list[tuple[TravellingMatrices, MatrixPiece]]]]:
        for peer in sorted({peer for part in self.parts for peer in way(part.route)}):
            yield peer, [(part, piece) for part in self.parts for piece in way(part.route).get(peer, ())]


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


# The name under which a checkpoint has the rows of each matrix of a parameter, next to what is kept of them.
_ROWS = "rows_of_matrices"


def _saved_rows(values: Mapping[str, Any], member: Member) -> Any:
    """Return the rows of each matrix of a parameter as a checkpoint has them, None where it has nothing kept of it. One
    that was saved without the rows has the places at which matrices begin.
    """
    starts = sorted({int(start) for start, slash, _ in (key.partition("/") for key in values) if slash})
    if not starts or _ROWS in values:
        return values[_ROWS] if starts else None
    columns = member.shape[2] if len(member.shape) == 3 else math.prod(member.shape[1:])
    return [(stop - start) // columns for start, stop in pairwise([*starts, member.stop - member.start])]


def _try_work(rule: MatrixRule, hyper: Hyper) -> None:
    """Where a CPU has no products of 16 bits, torch finds that out at the first large one, and then computes all others
    of the process another way, those of fp32 too. That must not be between two steps: a resumed run would differ.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for shape in ((64, 128), (128, 64)):
            rule.work(torch.ones(shape, dtype=WIRE), {}, hyper, 1)


class MatrixTiler:
    """The elementwise parts of rules of whole matrices, tile by tile. One thread at a time."""

    def __init__(self, rules: Sequence[AnyRule], size: int | None = None) -> None:
        self._rules, self._tiler = rules, Tiler(rules, size)

    def _rule(self, group: int) -> MatrixRule:
        rule = self._rules[group]
        assert isinstance(rule, MatrixRule)
        return rule

    def prepare(
        self,
        store: ShardStore,
        gradient: torch.Tensor,
        update: torch.Tensor,
        step: Step,
        window: StateWindow,
        start: int,
        stop: int,
        out: torch.Tensor | None,
    ) -> None:
        """Run the first pass over [start, stop) of a window: update the states, and write `update`.

        `gradient` and `update` cover the whole shard. `update` may be the first bytes of the gradient's memory. This
        pass has no new weights to cast into `out`.
        """
        size = self._tiler.size(window)
        for segment in store.stepped_segments(start, stop):
            rule, hyper = self._rule(segment.group), step.groups[segment.group]
            for first, last, dither in store.rounded_ranges(segment.start, segment.stop, step.number):
                for low in range(first, last, size):
                    high = min(low + size, last)
                    inside = slice(low - window.start, high - window.start)
                    held = {name: state[inside] for name, state in window.states.items()}
                    raw = RawPiece(gradient[low:high], step.coefficient, step.skip, held, update[low:high])
                    if rule.prepare_at_once(raw, hyper):
                        continue
                    scaled = self._tiler.scaled(raw.gradient, step.coefficient, store.master.dtype, size)
                    at = dither.after(low - first) if dither is not None else None
                    with self._tiler.opened(held, at) as states, unless(step.skip, states.values()):
                        rule.prepare(scaled, states, raw.update, hyper, step.number)

    def finish(
        self, part: TravellingMatrices, step: Step, window: StateWindow, start: int, stop: int, out: torch.Tensor | None
    ) -> None:
        """Run the second pass over [start, stop) of a window: update the master, and cast it into `out`."""
        store = part.store
        used, members = store.compared_model_weight, store.spec.layout.members
        for piece in part.route.mine:
            low, high = max(piece.low - store.start, start), min(piece.high - store.start, stop)
            if low >= high:
                continue
            matrix = part.route.matrices[piece.matrix]
            group = members[matrix.member].group
            rule, hyper = self._rule(group), step.groups[group]
            master = window.master[low - window.start : high - window.start]
            weights = out[low - start : high - start] if out is not None else None
            moved = MovedPiece(master, part.update[low:high], weights, step.skip, used is not None)
            if rule.finish_at_once(moved, matrix.shape, hyper):
                continue
            for _, _, dither in store.rounded_ranges(low, high, step.number):
                with self._tiler.opened({MASTER: master}, dither) as values:
                    if used is not None:
                        self._tiler.writes.take_over(values[MASTER], used[low:high])
                    with unless(step.skip, values.values()):
                        rule.finish(values[MASTER], moved.update, matrix.shape, hyper)
            if weights is not None:
                weights.copy_(master.weight)


@contextmanager
def unless(skip: torch.Tensor | None, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What happens inside changes these tensors, unless the device says `skip`."""
    before = [(tensor, tensor.clone()) for tensor in tensors] if skip is not None else []
    yield
    for tensor, old in before:
        assert skip is not None
        tensor.copy_(torch.where(skip != 0, old, tensor))


class HostMatrices(Protocol):
    """The host's step, as far as whole matrices need it."""

    def prepared(self, store: ShardStore) -> torch.Tensor:
        """What the host has made of a shard's gradient, on the device."""

    def start_finish(self, part: TravellingMatrices, step: Step) -> None:
        """The update is there: the host steps the master."""


class MatrixSteps:
    """Steps what is stepped as matrices, batch by batch, on the device and, with the host's help, below it."""

    def __init__(
        self,
        rules: Sequence[AnyRule],
        groups: Sequence[Hyper],
        stores: Sequence[ShardStore],
        splits: Splits,
        in_flight: InFlightCollectives,
        host: HostMatrices | None,
    ) -> None:
        self._rules, self._in_flight, self._host = rules, in_flight, host
        # A dry run computes nothing: matrices are only exchanged.
        self._computes = not in_flight.collective.group.is_fake
        self._tiler = MatrixTiler(rules)
        group = in_flight.collective.group
        self._shard, self._first = group.shard, group.rank - group.shard
        found = {s: matrices_of(s.spec.layout, splits) for s in stores if s.spec.state_spec.as_matrices}
        owners: dict[tuple[ShardStore, Matrix], int] = {}
        for rule in self._matrix_rules():  # costs of different rules are in different units
            own = {store: [m for m in some if self._rule_of(store, m) is rule] for store, some in found.items()}
            chosen = choose_owners([(store.spec.layout, some) for store, some in own.items()], rule.cost)
            for (store, some), places in zip(own.items(), chosen, strict=True):
                owners |= {(store, matrix): place for matrix, place in zip(some, places, strict=True)}
        self.matrices = {store: [(m, owners[store, m]) for m in some] for store, some in found.items()}
        if any(store.device.type == "cpu" for store in found):
            for rule in self._matrix_rules():
                _try_work(rule, groups[[id(other) for other in rules].index(id(rule))])
        self._routes: dict[tuple[ShardStore, frozenset[int]], MatrixRoute] = {}
        # What a rule keeps of the matrices that this rank works on.
        self._kept: dict[tuple[ShardStore, Matrix], Kept] = {}
        self._parts: list[TravellingMatrices] = []
        self._under_way: deque[tuple[list[Unit], MatrixTrip | None, Step]] = deque()

    def _matrix_rules(self) -> list[MatrixRule]:
        return list({id(rule): rule for rule in self._rules if isinstance(rule, MatrixRule)}.values())

    def _rule_of(self, store: ShardStore, matrix: Matrix) -> MatrixRule:
        rule = self._rules[store.spec.layout.members[matrix.member].group]
        assert isinstance(rule, MatrixRule)
        return rule

    def begin(self) -> None:
        """A step begins. Whatever one that failed has left under way is forgotten."""
        self._parts.clear()
        self._under_way.clear()

    def step(self, store: ShardStore, gradient: torch.Tensor, step: Step) -> None:
        """Run the first pass of a shard. The exchange and the second pass follow with its batch."""
        if store.is_offloaded:
            assert self._host is not None
            update = self._host.prepared(store)
        else:
            update = torch.empty(store.stop - store.start, dtype=WIRE, device=gradient.device)
            if self._computes:
                step_shard(
                    whole_window(store), partial(self._tiler.prepare, store, gradient, update, step), Publisher()
                )
        self._parts.append(TravellingMatrices(store, self._route(store), update, {}))

    def end_batch(self, batch: list[Unit], step: Step) -> Iterator[list[Unit]]:
        """Send the pieces of a batch, compute the matrices of the batch before, and finish the one before that.

        Yield the batches whose parameters are final.
        """
        trip = MatrixTrip(self._parts, self._first, self._exchange) if self._parts else None
        self._parts = []
        if trip is not None:
            trip.leave()
        self._under_way.append((batch, trip, step))
        if len(self._under_way) > 1:
            self._work(self._under_way[-2])
        if len(self._under_way) > 2:
            yield self._arrive()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        """Finish all batches, and yield those that `end_batch` has not yielded."""
        if self._under_way:
            self._work(self._under_way[-1])
        while self._under_way:
            yield self._arrive()

    def _work(self, under_way: tuple[list[Unit], MatrixTrip | None, Step]) -> None:
        _, trip, step = under_way

        def work(store: ShardStore, matrix: Matrix, values: torch.Tensor) -> torch.Tensor:
            if not self._computes:
                return values
            member, kept = store.spec.layout.members[matrix.member], self._kept.setdefault((store, matrix), {})
            rule = self._rule_of(store, matrix)
            return work_on(rule, values, kept, step.groups[member.group], step.number, member.name)

        if trip is not None:
            trip.work(work)

    def _arrive(self) -> list[Unit]:
        batch, trip, step = self._under_way.popleft()
        if trip is not None:
            trip.arrive()
            for part in trip.parts:
                self._finish(part, step)
        return batch

    def _finish(self, part: TravellingMatrices, step: Step) -> None:
        if part.store.is_offloaded:
            assert self._host is not None
            self._host.start_finish(part, step)
            return
        if self._computes:
            weight = part.store.model_weight
            publisher = InPlace(weight) if weight is not None else Publisher()
            step_shard(whole_window(part.store), partial(self._tiler.finish, part, step), publisher)

    # -- what is kept of whole matrices ---------------------------------------------------------------------------

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """By range of the shard. A parameter may be several matrices, so each name says which one."""
        found = []
        for (of, matrix), kept in self._kept.items():
            if of is store:
                member = store.spec.layout.members[matrix.member]
                low, high = matrix.piece(store.start, store.stop)
                named: dict[str, Any] = {f"{matrix.start - member.start}/{name}": v for name, v in kept.items()}
                if named:
                    named[_ROWS] = self._rows(store, matrix.member)
                found.append((low - store.start, high - store.start, named))
        return found

    def take_loose_states(self, loose: Mapping[str, Mapping[str, Any]]) -> None:
        """Those of a checkpoint, by parameter: each goes to the matrix that begins where its name says."""
        self._kept.clear()
        for store, found in self.matrices.items():
            for matrix in (matrix for matrix, owner in found if self._is_mine(store, owner)):
                member = store.spec.layout.members[matrix.member]
                start = f"{matrix.start - member.start}/"
                values = loose.get(member.name, {})
                kept = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
                if kept:
                    self._kept[store, matrix] = {
                        name: value.to(store.device) if isinstance(value, torch.Tensor) else value
                        for name, value in kept.items()
                    }

    def misfits(self, loose: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return, by name and in words, the parameters of which a checkpoint has something kept, and which were divided
        into other matrices when it was saved. The same on all ranks.
        """
        found = {}
        for store in self.matrices:
            for place, member in enumerate(store.spec.layout.members):
                values, here = loose.get(member.name, {}), self._rows(store, place)
                saved = _saved_rows(values, member)
                if saved is not None and saved != here:
                    names = ", ".join(sorted({key.partition("/")[2] for key in values if "/" in key}))
                    found[member.name] = (
                        f"{names} of {member.name}: saved for matrices of {shown(saved)} rows, and it is divided into "
                        f"matrices of {shown(here)} rows here"
                    )
        return found

    def _rows(self, store: ShardStore, member: int) -> list[int]:
        """Return the rows of each matrix of a parameter."""
        return [matrix.rows for matrix, _ in self.matrices[store] if matrix.member == member]

    def remember_kept(self) -> Callable[[], None]:
        """What undoes `take_loose_states`."""
        before = dict(self._kept)

        def undo() -> None:
            self._kept.clear()
            self._kept.update(before)

        return undo

    def _is_mine(self, store: ShardStore, owner: int) -> bool:
        return owner == self._shard or (store.start, store.stop) == (0, store.spec.layout.total)

    def flops(self, groups: Sequence[Hyper]) -> float:
        """Of the products that this rank makes in a step."""
        return sum(
            self._rule_of(store, matrix).flops(*matrix.shape, groups[store.spec.layout.members[matrix.member].group])
            for store, found in self.matrices.items()
            for matrix, owner in found
            if self._is_mine(store, owner)
        )

    def planned_kept(self) -> int:
        """Bytes that are kept of the matrices that this rank works on, once each of them has been worked on."""
        return sum(
            self._rule_of(store, matrix).kept_bytes(*matrix.shape)
            for store, found in self.matrices.items()
            for matrix, owner in found
            if self._is_mine(store, owner)
        )

    def held_kept(self) -> int:
        """The same, counted from tensors."""
        tensors = [value for kept in self._kept.values() for value in kept.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def planned_bytes(self, batches: Sequence[Sequence[ShardStore]]) -> int:
        """Bytes on the device in a step, at most: three batches are under way, one matrix is worked on, and what is
        kept of all.
        """
        updates, wholes, workspace = [], [], 0
        for stores in batches:
            taken = [store for store in stores if store in self.matrices]
            own = [(store, m) for store in taken for m, owner in self.matrices[store] if self._is_mine(store, owner)]
            updates.append(sum(store.stop - store.start for store in taken) * WIRE.itemsize)
            wholes.append(sum(m.rows * m.columns for _, m in own) * WIRE.itemsize)
            workspace = max([workspace, *(self._rule_of(store, m).workspace(*m.shape) for store, m in own)])
        under_way = (
            sum(updates[max(0, at - 2) : at + 1]) + 2 * sum(wholes[max(0, at - 1) : at + 1])
            for at in range(len(batches))
        )
        return max(under_way, default=0) + workspace + self.planned_kept()

    def _route(self, store: ShardStore) -> MatrixRoute:
        """Without what the user has frozen, which is the same on all ranks."""
        key = store, frozenset(store.frozen)
        if key not in self._routes:
            left = [(matrix, owner) for matrix, owner in self.matrices[store] if matrix.member not in store.frozen]
            self._routes[key] = MatrixRoute.of(store, [m for m, _ in left], [o for _, o in left], self._shard)
        return self._routes[key]

    def _exchange(self, names: list[str], exchanges: list[PeerExchange]) -> Callable[[], None]:
        return self._in_flight.start_exchange("matrices of", names, exchanges)
