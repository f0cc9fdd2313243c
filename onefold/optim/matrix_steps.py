"""The step of parameters that are updated as whole matrices (Muon, Shampoo).

[Note: the matrix exchange]
Each batch of units is updated in five phases: the first elementwise pass over this rank's shard, the exchange of pieces
to the owners of their matrices, the computation on whole matrices, the exchange back, and the second elementwise pass.
Three batches are in flight: while the matrices of one are computed, the pieces of the next are sent to their owners,
and those of the previous one are sent back. All pieces of a batch for one rank are one message. Messages are in bf16,
the dtype in which matrices are computed, so the exchange rounds nothing.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from onefold.comm import PeerExchange
from onefold.errors import shown
from onefold.offload.param_shard import Publisher
from onefold.offload.shard_store import ShardStore
from onefold.optim.matrix_exchange import ExchangedMatrices, MatrixExchange, MatrixRoute
from onefold.optim.matrix_rules import WIRE, AnyRule, GradientPiece, Kept, MasterPiece, MatrixRule, work_on
from onefold.optim.pipeline import (
    ElementwiseStep,
    ElementwiseUpdate,
    StateWindow,
    StepValues,
    publisher_on_device,
    step_shard,
    whole_window,
)
from onefold.optim.rules import MASTER, Hyper
from onefold.plan.layout import Member
from onefold.plan.matrices import Matrix, Splits, choose_owners, matrices_of
from onefold.runtime import InFlightCollectives, Unit

# The checkpoint key of the number of rows of each matrix of a parameter. It is saved next to their matrix states.
_ROWS = "rows_of_matrices"


def _saved_rows(values: Mapping[str, Any], member: Member) -> Any:
    """Return the rows of each matrix of a parameter in a checkpoint, or None if it has no matrix states.

    If it was saved without the rows, derive them from the offsets at which matrices start.
    """
    starts = sorted({int(start) for start, slash, _ in (key.partition("/") for key in values) if slash})
    if not starts or _ROWS in values:
        return values[_ROWS] if starts else None
    columns = member.shape[2] if len(member.shape) == 3 else math.prod(member.shape[1:])
    return [(stop - start) // columns for start, stop in pairwise([*starts, member.stop - member.start])]


def _try_work(rule: MatrixRule, hyper: Hyper) -> None:
    """Run the rule's matrix computation once on the CPU.

    On a CPU without 16-bit matrix products torch notices at the first large one, and computes all later products of the
    process differently, also in fp32. This must not happen between two steps, because a resumed run would differ.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for shape in ((64, 128), (128, 64)):
            rule.work(torch.ones(shape, dtype=WIRE), {}, hyper, 1)


class MatrixUpdate:
    """The update stage of the two elementwise passes of matrix rules, tile by tile. For one thread at a time."""

    def __init__(self, rules: Sequence[AnyRule], size: int | None = None) -> None:
        self._rules, self._elementwise = rules, ElementwiseUpdate(rules, size)

    def _rule(self, group: int) -> MatrixRule:
        rule = self._rules[group]
        assert isinstance(rule, MatrixRule)
        return rule

    def prepare(
        self,
        store: ShardStore,
        gradient: torch.Tensor,
        update: torch.Tensor,
        step: StepValues,
        window: StateWindow,
        start: int,
        stop: int,
        out: torch.Tensor | None,
    ) -> None:
        """Run the first pass over [start, stop) of a window: update the states, and write `update`.

        `gradient` and `update` cover the whole shard. `update` may be the first bytes of the gradient's memory. This
        pass has no new weights to cast into `out`.
        """
        size = self._elementwise.size(window)
        for segment in store.stepped_segments(start, stop):
            rule, hyper = self._rule(segment.group), step.groups[segment.group]
            for first, last, dither in store.rounded_ranges(segment.start, segment.stop, step.number):
                for low in range(first, last, size):
                    high = min(low + size, last)
                    inside = slice(low - window.start, high - window.start)
                    buffers = {name: state[inside] for name, state in window.states.items()}
                    piece = GradientPiece(gradient[low:high], step.coefficient, step.skip, buffers, update[low:high])
                    if rule.prepare_at_once(piece, hyper):
                        continue
                    scaled = self._elementwise.scaled(piece.gradient, step.coefficient, store.master.dtype, size)
                    at = dither.after(low - first) if dither is not None else None
                    with self._elementwise.opened(buffers, at) as states, unless(step.skip, states.values()):
                        rule.prepare(scaled, states, piece.update, hyper, step.number)

    def finish(
        self,
        part: ExchangedMatrices,
        step: StepValues,
        window: StateWindow,
        start: int,
        stop: int,
        out: torch.Tensor | None,
    ) -> None:
        """Run the second pass over [start, stop) of a window: update the master, and cast it into `out`."""
        store = part.store
        compared, members = store.compared_model_weight, store.spec.layout.members
        for piece in part.route.local:
            low, high = max(piece.low - store.start, start), min(piece.high - store.start, stop)
            if low >= high:
                continue
            matrix = part.route.matrices[piece.matrix]
            group = members[matrix.member].group
            rule, hyper = self._rule(group), step.groups[group]
            master = window.master[low - window.start : high - window.start]
            weights = out[low - start : high - start] if out is not None else None
            updated = MasterPiece(master, part.update[low:high], weights, step.skip, compared is not None)
            if rule.finish_at_once(updated, matrix.shape, hyper):
                continue
            for _, _, dither in store.rounded_ranges(low, high, step.number):
                with self._elementwise.opened({MASTER: master}, dither) as values:
                    if compared is not None:
                        self._elementwise.writes.take_over(values[MASTER], compared[low:high])
                    with unless(step.skip, values.values()):
                        rule.finish(values[MASTER], updated.update, matrix.shape, hyper)
            if weights is not None:
                weights.copy_(master.weight)


@contextmanager
def unless(skip: torch.Tensor | None, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the tensors after the block if the device scalar `skip` is nonzero."""
    before = [(tensor, tensor.clone()) for tensor in tensors] if skip is not None else []
    yield
    for tensor, old in before:
        assert skip is not None
        tensor.copy_(torch.where(skip != 0, old, tensor))


class HostMatrices(Protocol):
    """The interface of the offloaded step that matrices need, as `OffloadedStep` implements it."""

    def prepared(self, store: ShardStore) -> torch.Tensor:
        """Return the update of a shard's matrices on the device, on the caller's stream."""

    def start_master_update(self, part: ExchangedMatrices, step: StepValues) -> None:
        """Copy the exchanged update to the host, and start the update of the master with it."""


_BatchInFlight = tuple[list[Unit], MatrixExchange | None, StepValues]


class MatrixSteps:
    """The main thread's step of an optimizer with matrix rules, batch by batch.

    Shards with elementwise rules are stepped as by `ElementwiseStep`. Offloaded shards are passed to `host` for the two
    elementwise passes.
    """

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
        self._elementwise_step, self._update = ElementwiseStep(rules), MatrixUpdate(rules)
        group = in_flight.collective.group
        self._shard, self._first_rank = group.shard, group.rank - group.shard
        by_store = {s: matrices_of(s.spec.layout, splits) for s in stores if s.spec.state_spec.as_matrices}
        owners: dict[tuple[ShardStore, Matrix], int] = {}
        for rule in self._matrix_rules():  # costs of different rules are in different units
            of_rule = {s: [m for m in matrices if self._rule_of(s, m) is rule] for s, matrices in by_store.items()}
            chosen = choose_owners([(s.spec.layout, matrices) for s, matrices in of_rule.items()], rule.cost)
            for (store, matrices), shards in zip(of_rule.items(), chosen, strict=True):
                owners |= {(store, matrix): shard for matrix, shard in zip(matrices, shards, strict=True)}
        self.matrices = {s: [(m, owners[s, m]) for m in matrices] for s, matrices in by_store.items()}
        if any(store.device.type == "cpu" for store in by_store):
            for rule in self._matrix_rules():
                _try_work(rule, groups[[id(other) for other in rules].index(id(rule))])
        self._routes: dict[tuple[ShardStore, frozenset[int]], MatrixRoute] = {}
        # The matrix states of the matrices that this rank owns.
        self._kept: dict[tuple[ShardStore, Matrix], Kept] = {}
        self._parts: list[ExchangedMatrices] = []
        self._batches_in_flight: deque[_BatchInFlight] = deque()

    def _matrix_rules(self) -> list[MatrixRule]:
        return list({id(rule): rule for rule in self._rules if isinstance(rule, MatrixRule)}.values())

    def _rule_of(self, store: ShardStore, matrix: Matrix) -> MatrixRule:
        rule = self._rules[store.spec.layout.members[matrix.member].group]
        assert isinstance(rule, MatrixRule)
        return rule

    def begin(self) -> None:
        """Begin a step, and discard batches that a failed step left in flight."""
        self._parts.clear()
        self._batches_in_flight.clear()

    def step(self, store: ShardStore, gradient: torch.Tensor, step: StepValues) -> None:
        """Run the first pass of a shard. The exchange and the second pass follow with its batch."""
        if store not in self.matrices:
            self._elementwise_step.step(store, gradient, step)
            return
        if store.is_offloaded:
            assert self._host is not None
            update = self._host.prepared(store)
        else:
            update = torch.empty(store.stop - store.start, dtype=WIRE, device=gradient.device)
            if self._computes:
                prepare = partial(self._update.prepare, store, gradient, update, step)
                step_shard(whole_window(store), prepare, Publisher())
        self._parts.append(ExchangedMatrices(store, self._route(store), update, {}))

    def end_batch(self, batch: list[Unit], step: StepValues) -> Iterator[list[Unit]]:
        """Send the pieces of a batch, compute the matrices of the previous one, and finish the one before that.

        Yield the batches whose parameters are final.
        """
        self._elementwise_step.step_small(step)
        exchange = MatrixExchange(self._parts, self._first_rank, self._start_exchange) if self._parts else None
        self._parts = []
        if exchange is not None:
            exchange.send_pieces()
        self._batches_in_flight.append((batch, exchange, step))
        if len(self._batches_in_flight) > 1:
            self._compute(self._batches_in_flight[-2])
        if len(self._batches_in_flight) > 2:
            yield self._finish_batch()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        """Finish all batches, and yield those that `end_batch` has not yielded."""
        if self._batches_in_flight:
            self._compute(self._batches_in_flight[-1])
        while self._batches_in_flight:
            yield self._finish_batch()

    def _compute(self, in_flight: _BatchInFlight) -> None:
        """Compute the matrices of a batch that this rank owns, and start sending them back."""
        _, exchange, step = in_flight

        def work(store: ShardStore, matrix: Matrix, values: torch.Tensor) -> torch.Tensor:
            if not self._computes:
                return values
            member, kept = store.spec.layout.members[matrix.member], self._kept.setdefault((store, matrix), {})
            rule = self._rule_of(store, matrix)
            return work_on(rule, values, kept, step.groups[member.group], step.number, member.name)

        if exchange is not None:
            exchange.compute(work)

    def _finish_batch(self) -> list[Unit]:
        """Receive the update of the oldest batch in flight, and run the second pass of its shards."""
        batch, exchange, step = self._batches_in_flight.popleft()
        if exchange is not None:
            exchange.wait()
            for part in exchange.parts:
                self._update_masters(part, step)
        return batch

    def _update_masters(self, part: ExchangedMatrices, step: StepValues) -> None:
        if part.store.is_offloaded:
            assert self._host is not None
            self._host.start_master_update(part, step)
            return
        if self._computes:
            finish = partial(self._update.finish, part, step)
            step_shard(whole_window(part.store), finish, publisher_on_device(part.store))

    # -- matrix states ----------------------------------------------------------------------------------------------

    def loose_states(self, store: ShardStore) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the matrix states of this rank, each with the range of the shard that it belongs to.

        A parameter may consist of several matrices. The prefix of each name is the offset of its matrix.
        """
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
        """Load the matrix states of a checkpoint, by parameter. The prefix of each name selects the matrix."""
        self._kept.clear()
        for store, found in self.matrices.items():
            for matrix in (matrix for matrix, owner in found if self._is_owned(store, owner)):
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
        """Return a message for each parameter whose matrix states in a checkpoint are for a different division.

        The result is the same on all ranks.
        """
        found = {}
        for store in self.matrices:
            for index, member in enumerate(store.spec.layout.members):
                values, here = loose.get(member.name, {}), self._rows(store, index)
                saved = _saved_rows(values, member)
                if saved is not None and saved != here:
                    names = ", ".join(sorted({key.partition("/")[2] for key in values if "/" in key}))
                    found[member.name] = (
                        f"{names} of {member.name}: saved for matrices of {shown(saved)} rows, but this job has "
                        f"matrices of {shown(here)} rows"
                    )
        return found

    def _rows(self, store: ShardStore, member: int) -> list[int]:
        """Return the rows of each matrix of a parameter."""
        return [matrix.rows for matrix, _ in self.matrices[store] if matrix.member == member]

    def remember_kept(self) -> Callable[[], None]:
        """Return a function that undoes `take_loose_states`."""
        before = dict(self._kept)

        def undo() -> None:
            self._kept.clear()
            self._kept.update(before)

        return undo

    def _is_owned(self, store: ShardStore, owner: int) -> bool:
        """Return whether this rank computes a matrix of that owner. Unsharded ones are computed by every rank."""
        return owner == self._shard or (store.start, store.stop) == (0, store.spec.layout.total)

    def flops(self, groups: Sequence[Hyper]) -> float:
        """Return the floating-point operations of this rank's matrix products in a step."""
        return sum(
            self._rule_of(store, matrix).flops(*matrix.shape, groups[store.spec.layout.members[matrix.member].group])
            for store, found in self.matrices.items()
            for matrix, owner in found
            if self._is_owned(store, owner)
        )

    def planned_kept(self) -> int:
        """Return the planned bytes of the matrix states on this rank, after the first step."""
        return sum(
            self._rule_of(store, matrix).kept_bytes(*matrix.shape)
            for store, found in self.matrices.items()
            for matrix, owner in found
            if self._is_owned(store, owner)
        )

    def held_kept(self) -> int:
        """Return the bytes of the matrix states that are allocated on this rank."""
        tensors = [value for kept in self._kept.values() for value in kept.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def planned_bytes(self, batches: Sequence[Sequence[ShardStore]]) -> int:
        """Return the peak device bytes of a step: three batches in flight, one workspace and all matrix states."""
        updates, matrices, workspace = [], [], 0
        for stores in batches:
            stepped = [store for store in stores if store in self.matrices]
            owned = [(s, m) for s in stepped for m, owner in self.matrices[s] if self._is_owned(s, owner)]
            updates.append(sum(store.stop - store.start for store in stepped) * WIRE.itemsize)
            matrices.append(sum(m.rows * m.columns for _, m in owned) * WIRE.itemsize)
            workspace = max([workspace, *(self._rule_of(store, m).workspace(*m.shape) for store, m in owned)])
        in_flight = (
            sum(updates[max(0, at - 2) : at + 1]) + 2 * sum(matrices[max(0, at - 1) : at + 1])
            for at in range(len(batches))
        )
        return max(in_flight, default=0) + workspace + self.planned_kept()

    def _route(self, store: ShardStore) -> MatrixRoute:
        """Return the route of a shard's matrices without frozen parameters, which are the same on all ranks."""
        key = store, frozenset(store.frozen)
        if key not in self._routes:
            trained = [(matrix, owner) for matrix, owner in self.matrices[store] if matrix.member not in store.frozen]
            self._routes[key] = MatrixRoute.of(store, [m for m, _ in trained], [o for _, o in trained], self._shard)
        return self._routes[key]

    def _start_exchange(self, names: list[str], exchanges: list[PeerExchange]) -> Callable[[], None]:
        return self._in_flight.start_exchange("matrices of", names, exchanges)
