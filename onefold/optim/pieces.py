"""What one rank steps: a stretch of a run's line, with its master and its optimizer states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from onefold.optim.instance import InstanceRule, plain_step
from onefold.optim.rules import Hyper, Rule, Tile
from onefold.optim.written import WriteCheck
from onefold.plan import Tier
from onefold.plan.layout import PARAMETER_ALIGNMENT, Segment, round_up
from onefold.plan.memory import master_dtype
from onefold.runtime import Run
from onefold.runtime.fingerprint import fingerprint
from onefold.tier.bus import HERE, Arrival
from onefold.tier.lower import Flat, read, write
from onefold.tier.nvme import DiskTensor

# Elements stepped at once. On a CPU a tile and its casts stay in cache; on a GPU a tile fills the machine.
TILE = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass
class Piece:
    """[start, stop) of a run's line. `master` is the run's shard where it has one; else the line itself where it
    computes in full precision, or a tensor of its own. `out` is what has to be told what the master has become: the
    line, or the shard where that is not the master.
    """

    run: Run
    start: int
    stop: int
    master: Flat
    out: Flat | None = None
    states: dict[str, Flat] = field(default_factory=dict)
    sent: Arrival = HERE
    """The last copy up that reads the master."""
    fingerprint: torch.Tensor | None = None
    """Of what computes, as the last step left it, where that cannot be compared with the master."""

    @staticmethod
    def of(run: Run, start: int, stop: int) -> Piece:
        used = run.shard if run.shard is not None else run.full[start:stop]
        wide = master_dtype(run.dtype)
        if run.rest.offloads_states and not run.shape.master_is_shard:
            assert run.lower is not None
            on_disk = run.rest.states is Tier.NVME
            master = (run.lower.disk_for_states if on_disk else run.lower.host)(stop - start, wide)
            write(master, read(used).to(wide))
            return Piece(run, start, stop, master, used)
        if used.dtype == wide:
            return Piece(run, start, stop, used)
        return Piece(run, start, stop, read(used).to(wide), used)

    def new_state(self) -> Flat:
        """Room for a state beside the master, all zero."""
        if isinstance(self.master, torch.Tensor) and not self.run.rest.offloads_states:
            return torch.zeros_like(self.master)
        assert self.run.lower is not None
        on_disk = self.run.rest.states is Tier.NVME
        take = self.run.lower.disk_for_states if on_disk else self.run.lower.host
        return take(self.master.numel(), self.master.dtype)

    def tell(self) -> Arrival:
        """What is used becomes what the master is, as the caller's stream sees it; the host's memory is read until the
        arrival.
        """
        self.run.forget_fetched()  # also where the master itself is what was read ahead
        if self.out is None:
            return HERE
        self.run.fresh = None
        if not self.run.rest.offloads_states or self.run.rest.parameters is not Tier.DEVICE:
            write(self.out, read(self.master))
            return HERE
        assert self.run.lower is not None
        assert isinstance(self.out, torch.Tensor)
        arrival = self.run.lower.bus.up(read(self.master), self.out)
        arrival.order()
        self.take_fingerprint()
        return arrival

    def learn(self) -> None:
        """What is used was written from outside: the master becomes it."""
        if self.out is not None:
            self.run.freshen()
            write(self.master, read(self.out).to(self.master.dtype))
            self.take_fingerprint()

    @property
    def may_be_written(self) -> bool:
        """Whether a write to the parameters from outside has to be taken over into the master."""
        return self.run.plan.honours_writes and self.run.rests_whole and isinstance(self.out, torch.Tensor)

    @property
    def comparable(self) -> torch.Tensor | None:
        """What computes, where it can be compared with the master on one device."""
        if not self.may_be_written or (self.run.rest.offloads_states and self.run.device.type != "cpu"):
            return None
        return self.computes

    @property
    def computes(self) -> torch.Tensor:
        """The unsharded parameters beside the master."""
        assert isinstance(self.out, torch.Tensor)
        return self.out

    def take_fingerprint(self) -> None:
        """What computes has just become what the master says."""
        if self.may_be_written and self.comparable is None:
            self.fingerprint = fingerprint(self.computes)

    def segments(self, first: int = 0, last: int | None = None) -> list[Segment]:
        """Stretches of one optimizer group each, in [first, last), counted from the start of this piece."""
        stop = self.stop if last is None else self.start + last
        found = self.run.layout.segments(self.start + first, stop)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def stepped(self, first: int, last: int) -> list[Segment]:
        """The same without what the user has frozen."""
        segments = self.segments(first, last)
        for index in sorted(self.run.frozen):
            member = self.run.layout.members[index]
            low, high = member.start - self.start, round_up(member.stop, PARAMETER_ALIGNMENT) - self.start
            segments = [
                Segment(segment.group, start, stop)
                for segment in segments
                for start, stop in ((segment.start, min(segment.stop, low)), (max(segment.start, high), segment.stop))
                if start < stop
            ]
        return segments


@dataclass(frozen=True)
class Window:
    """A stretch of a piece with its master and states in memory."""

    start: int
    stop: int
    master: torch.Tensor
    states: Mapping[str, torch.Tensor]

    @staticmethod
    def whole(piece: Piece) -> Window:
        assert isinstance(piece.master, torch.Tensor)
        states = {name: state for name, state in piece.states.items() if isinstance(state, torch.Tensor)}
        return Window(0, piece.stop - piece.start, piece.master, states)


Windows = Callable[[Piece], Iterable[Window]]


@dataclass(frozen=True)
class Step:
    """What every tile of a step shares. `groups` are the hyperparameters as they were when the step was called."""

    number: int
    coefficient: float
    groups: Sequence[Hyper]


class Stretches(Protocol):
    """What a tiler asks of what it steps."""

    @property
    def comparable(self) -> torch.Tensor | None:
        """What computes, if writes to it are to be found."""
        ...

    def stepped(self, first: int, last: int) -> list[Segment]:
        """Where in [first, last) which optimizer group lies, without what is frozen."""
        ...


class Tiler:
    """A rule, tile by tile: cast and scale the gradient, update, cast the parameter out, all while in cache. One thread
    uses it at a time.
    """

    def __init__(self, rule: Rule, size: int | None = None) -> None:
        self._rule = rule
        self._size = size
        self._scratch: torch.Tensor | None = None
        self._writes = WriteCheck()

    def step(
        self,
        piece: Stretches,
        window: Window,
        start: int,
        stop: int,
        gradient: torch.Tensor,
        out: torch.Tensor | None,
        step: Step,
    ) -> None:
        """[start, stop) of a window. `gradient` lies along the piece, `out` along the stretch; it may be the memory of
        the stretch's own gradient.
        """
        size = self._size or TILE[window.master.device.type]
        used = piece.comparable
        for segment in piece.stepped(start, stop):
            for low in range(segment.start, segment.stop, size):
                high = min(low + size, segment.stop)
                inside = slice(low - window.start, high - window.start)
                master = window.master[inside]
                if used is not None:
                    self._writes.take_over(master, used[low:high])
                scaled = self._scaled(gradient[low:high], step.coefficient, master.dtype, size)
                states = {name: state[inside] for name, state in window.states.items()}
                self._rule.apply(Tile(master, scaled, states, segment.group), step.groups[segment.group], step.number)
                if out is not None:
                    out[low - start : high - start].copy_(master)

    def _scaled(self, gradient: torch.Tensor, coefficient: float, dtype: torch.dtype, size: int) -> torch.Tensor:
        if coefficient == 1.0 and gradient.dtype == dtype:
            return gradient
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = torch.empty(size, dtype=dtype, device=gradient.device)
        # torch's product of two dtypes on a CPU makes a copy first, in fresh memory.
        scaled = self._scratch[: gradient.numel()].copy_(gradient)
        return scaled if coefficient == 1.0 else scaled.mul_(coefficient)


@dataclass(frozen=True)
class HeldState:
    """A state tensor that lies along a piece, from `start` on, flat."""

    name: str
    start: int
    memory: Flat


class Stepper(Protocol):
    """Applies one optimizer to pieces. `whole`: it must see every piece before any parameter is final."""

    whole: bool

    def step(self, piece: Piece, gradient: torch.Tensor, step: Step) -> None: ...

    def finish(self) -> None: ...

    def call(self, method: str, windows: Windows, groups: Sequence[Hyper], *, has_states: bool) -> None:
        """A method of the user's class that changes masters. `has_states`: a step has been taken."""
        ...

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, Flat]]: ...

    def held_states(self, piece: Piece) -> list[HeldState]: ...

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        """States that do not lie along a stretch of the piece."""
        ...

    def make_states(
        self, piece: Piece, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Have the states of a checkpoint, by parameter: room for those that lie along it, values for the others."""
        ...

    def remember_states(self) -> Callable[[], None]:
        """What undoes `make_states`."""
        ...

    def state_bytes(self, tier: Tier) -> int: ...


class TiledStepper:
    """A known rule: each piece is final once it has been stepped."""

    whole = False

    def __init__(self, rule: Rule, groups: Sequence[Hyper], pieces: Sequence[Piece]) -> None:
        self._tiler = Tiler(rule)
        self._rule = rule
        self._pieces = pieces
        for piece in pieces:
            piece.states = {name: piece.new_state() for name in rule.state_names(groups)}

    def step(self, piece: Piece, gradient: torch.Tensor, step: Step) -> None:
        window = Window.whole(piece)
        assert not isinstance(piece.out, DiskTensor)
        self._tiler.step(piece, window, window.start, window.stop, gradient, piece.out, step)

    def finish(self) -> None:
        pass

    def call(self, method: str, windows: Windows, groups: Sequence[Hyper], *, has_states: bool) -> None:
        assert isinstance(self._rule, InstanceRule), "a rule has no methods of a user's"
        self._rule.begin(groups, method)
        for piece in self._pieces:
            for window in windows(piece):
                for segment in piece.segments(window.start, window.stop):
                    inside = slice(segment.start - window.start, segment.stop - window.start)
                    states = {name: state[inside] for name, state in window.states.items()}
                    master = window.master[inside]
                    tile = Tile(master, torch.empty(0), states, segment.group)
                    self._rule.call(method, tile, has_states=has_states)

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, Flat]]:
        return [(0, piece.states[name])] if name in piece.states else []

    def held_states(self, piece: Piece) -> list[HeldState]:
        return [HeldState(name, 0, state) for name, state in piece.states.items()]

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        if not isinstance(self._rule, InstanceRule):
            return []
        return [(s.start, s.stop, self._rule.latest(s.group)) for s in piece.segments()]

    def make_states(
        self, piece: Piece, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """A rule's states are there from the start."""
        if isinstance(self._rule, InstanceRule):
            for member in piece.run.layout.members:
                if member.name in loose:
                    self._rule.take(member.group, dict(loose[member.name]))

    def remember_states(self) -> Callable[[], None]:
        return self._rule.remember() if isinstance(self._rule, InstanceRule) else lambda: None

    def state_bytes(self, tier: Tier) -> int:
        held = [piece for piece in self._pieces if piece.run.rest.states is tier]
        return sum(state.nbytes for piece in held for state in piece.states.values())


class WholeStepper:
    """Any other torch optimizer: the user's own instance, stepped once a step, with masters in the place of its
    parameters, so that what it writes to its groups and to itself stays ([Note: what a step writes]).

    Elementwise optimizers get flat stretches, the same in every plan. Others, which only run where every rank steps
    everything, get views in the parameters' own shapes.
    """

    whole = True

    def __init__(self, instance: torch.optim.Optimizer, pieces: Sequence[Piece], *, shaped: bool) -> None:
        self._instance = instance
        self._writes = WriteCheck()
        self._targets: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        self._by_group: list[list[nn.Parameter]] = [[] for _ in instance.param_groups]
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for piece in pieces:
            targets = []
            for group, start, stop, shape in _stretches(piece, shaped):
                assert isinstance(piece.master, torch.Tensor), "refused where states rest on a disk"
                target = nn.Parameter(piece.master[start:stop].view(shape))
                self._by_group[group].append(target)
                targets.append((target, start, stop))
            self._targets[id(piece)] = targets
        self._pieces = list(pieces)

    @contextmanager
    def _over_masters(self) -> Iterator[None]:
        """The user's instance has masters for parameters, and their states."""
        instance, groups = self._instance, self._instance.param_groups
        parameters, state = [group["params"] for group in groups], instance.state
        for group, targets in zip(groups, self._by_group, strict=True):
            group["params"] = list(targets)
        instance.state = self._state
        try:
            yield
        finally:
            self._state, instance.state = instance.state, state
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own
        if instance.param_groups is not groups or len(groups) != len(parameters):
            raise RuntimeError(
                f"optimizer {type(instance).__name__} made other param_groups in its step: parameter groups are fixed "
                "when initialize lays out the shards"
            )

    def step(self, piece: Piece, gradient: torch.Tensor, step: Step) -> None:
        if piece.run.rest.offloads_states:
            piece.run.wait_for_reduced()
        if piece.comparable is not None:
            assert isinstance(piece.master, torch.Tensor)
            self._writes.take_over(piece.master, piece.comparable)
        scaled = gradient.to(piece.master.dtype).mul(step.coefficient)
        for target, start, stop in self._targets[id(piece)]:
            target.grad = scaled[start:stop].view(target.shape)

    @contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """What the user has frozen, and its states, are afterwards what they were before."""
        before = []
        for target, inside in self._frozen_ranges():
            along = {n: v.view(-1)[inside].clone() for n, v in self._state[target].items() if _lies_along(v, target)}
            before.append((target, inside, target.detach().view(-1)[inside].clone(), along))
        yield
        for target, inside, master, along in before:
            target.detach().view(-1)[inside] = master
            for name, value in self._state[target].items():
                if _lies_along(value, target):
                    value.view(-1)[inside] = along.get(name, 0)

    def _frozen_ranges(self) -> Iterator[tuple[nn.Parameter, slice]]:
        for piece in self._pieces:
            for member in (piece.run.layout.members[index] for index in piece.run.frozen):
                for target, start, stop in self._targets[id(piece)]:
                    low, high = max(member.start - piece.start, start), min(member.stop - piece.start, stop)
                    if low < high:
                        yield target, slice(low - start, high - start)

    def finish(self) -> None:
        with self._over_masters(), self._without_frozen():
            plain_step(self._instance)
        for piece in self._pieces:
            for target, _, _ in self._targets[id(piece)]:
                target.grad = None
            piece.tell().wait()

    def call(self, method: str, windows: Windows, groups: Sequence[Hyper], *, has_states: bool) -> None:
        with self._over_masters():
            getattr(type(self._instance), method)(self._instance)

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, Flat]]:
        found = [(start, self._state[target].get(name)) for target, start, _ in self._targets[id(piece)]]
        return [(start, state) for start, state in found if isinstance(state, torch.Tensor)]

    def held_states(self, piece: Piece) -> list[HeldState]:
        return [
            HeldState(name, start, value.view(-1))
            for target, start, _ in self._targets[id(piece)]
            for name, value in self._state[target].items()
            if _lies_along(value, target)
        ]

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        return [
            (start, stop, {k: v for k, v in self._state[target].items() if not _lies_along(v, target)})
            for target, start, stop in self._targets[id(piece)]
        ]

    def make_states(
        self, piece: Piece, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for target, start, stop in self._targets[id(piece)]:
            first, last = piece.start + start, piece.start + stop
            inside = [m.name for m in piece.run.layout.members if m.start < last and first < m.stop]
            state: dict[str, Any] = {}
            for name in inside:
                state.update({k: v.to(target.device) if _is_array(v) else v for k, v in loose.get(name, {}).items()})
                for key, dtype in names.get(name, {}).items():
                    state[key] = torch.zeros_like(target, dtype=dtype, requires_grad=False)
            self._state[target] = state

    def remember_states(self) -> Callable[[], None]:
        before = dict(self._state)

        def undo() -> None:
            self._state.clear()
            self._state.update(before)

        return undo

    def state_bytes(self, tier: Tier) -> int:
        targets = [t for p in self._pieces if p.run.rest.states is tier for t, _, _ in self._targets[id(p)]]
        values = [value for target in targets for value in self._state[target].values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _is_array(value: Any) -> bool:
    # torch's optimizers keep step counts in host memory, wherever the parameter is.
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _lies_along(value: Any, target: nn.Parameter) -> bool:
    return _is_array(value) and value.shape == target.shape and value.is_contiguous()


def _stretches(piece: Piece, shaped: bool) -> list[tuple[int, int, int, tuple[int, ...]]]:
    if not shaped:
        return [(s.group, s.start, s.stop, (s.stop - s.start,)) for s in piece.segments()]
    assert (piece.start, piece.stop) == (0, piece.run.layout.total)
    return [(m.group, m.start, m.stop, m.shape) for m in piece.run.layout.members]
