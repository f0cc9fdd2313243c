"""What one rank steps: a stretch of a run's line, with its master and its optimizer states."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from onefold.optim.rules import Hyper, Rule, Tile
from onefold.plan.layout import Segment
from onefold.plan.memory import master_dtype
from onefold.runtime import Run

# Elements stepped at once. On a CPU a tile and its casts stay in cache; on a GPU a tile fills the machine.
TILE = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass
class Piece:
    """[start, stop) of a run's line. `master` is the run's shard where it has one; else the line itself where it
    computes in full precision, or a tensor of its own.
    """

    run: Run
    start: int
    stop: int
    master: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(run: Run, start: int, stop: int) -> Piece:
        if run.shard is not None:
            return Piece(run, start, stop, run.shard)
        line = run.full[start:stop]
        wide = master_dtype(run.dtype)
        return Piece(run, start, stop, line if wide == run.dtype else line.to(wide))

    @property
    def copies_out(self) -> bool:
        """Whether the line must be told what the master has become."""
        return self.run.rests_whole and self.master.dtype != self.run.dtype

    def segments(self) -> list[Segment]:
        """Stretches of one optimizer group each, counted from the start of this piece."""
        found = self.run.layout.segments(self.start, self.stop)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def line(self, start: int, stop: int) -> torch.Tensor:
        return self.run.full[self.start + start : self.start + stop]


@dataclass(frozen=True)
class HeldState:
    """A state tensor that lies along a piece, from `start` on, flat."""

    name: str
    start: int
    memory: torch.Tensor


class Stepper(Protocol):
    """Applies one optimizer to pieces. `whole`: it must see every piece before any parameter is final."""

    whole: bool

    def step(self, piece: Piece, gradient: torch.Tensor, coefficient: float, number: int) -> None: ...

    def finish(self) -> None: ...

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, torch.Tensor]]: ...

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

    def state_bytes(self) -> int: ...


class TiledStepper:
    """A known rule, tile by tile: cast and scale the gradient, update, cast the parameter out, all while in cache."""

    whole = False

    def __init__(self, rule: Rule, groups: Sequence[Hyper], pieces: Sequence[Piece]) -> None:
        self._rule = rule
        self._groups = groups
        self._scratch: torch.Tensor | None = None
        self._pieces = pieces
        for piece in pieces:
            piece.states = {name: torch.zeros_like(piece.master) for name in rule.state_names(groups)}

    def step(self, piece: Piece, gradient: torch.Tensor, coefficient: float, number: int) -> None:
        size = TILE[piece.master.device.type]
        scale = torch.full((1,), coefficient, dtype=piece.master.dtype, device=piece.master.device)
        for segment in piece.segments():
            for start in range(segment.start, segment.stop, size):
                stop = min(start + size, segment.stop)
                scaled = self._scaled(gradient[start:stop], scale, coefficient, size)
                states = {name: state[start:stop] for name, state in piece.states.items()}
                tile = Tile(piece.master[start:stop], scaled, states)
                self._rule.apply(tile, self._groups[segment.group], number)
                if piece.copies_out:
                    piece.line(start, stop).copy_(piece.master[start:stop])

    def _scaled(self, gradient: torch.Tensor, scale: torch.Tensor, coefficient: float, size: int) -> torch.Tensor:
        if coefficient == 1.0 and gradient.dtype == scale.dtype:
            return gradient
        if self._scratch is None or self._scratch.dtype != scale.dtype:
            self._scratch = torch.empty(size, dtype=scale.dtype, device=scale.device)
        return torch.mul(gradient, scale, out=self._scratch[: gradient.numel()])

    def finish(self) -> None:
        pass

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, torch.Tensor]]:
        return [(0, piece.states[name])] if name in piece.states else []

    def held_states(self, piece: Piece) -> list[HeldState]:
        return [HeldState(name, 0, state) for name, state in piece.states.items()]

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        return []

    def make_states(
        self, piece: Piece, names: Mapping[str, Mapping[str, torch.dtype]], loose: Mapping[str, Mapping[str, Any]]
    ) -> None:
        pass  # a rule's states are there from the start

    def remember_states(self) -> Callable[[], None]:
        return lambda: None

    def state_bytes(self) -> int:
        return sum(state.nbytes for piece in self._pieces for state in piece.states.values())


class WholeStepper:
    """Any other torch optimizer: a copy of the user's instance whose parameters are the masters, stepped once a step.

    Elementwise optimizers get flat stretches, the same in every plan. Others, which only run where every rank steps
    everything, get views in the parameters' own shapes.
    """

    whole = True

    def __init__(self, instance: torch.optim.Optimizer, pieces: Sequence[Piece], *, shaped: bool) -> None:
        self._outer = instance
        self._targets: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        inner_groups: list[dict[str, Any]] = [{**group, "params": []} for group in instance.param_groups]
        for piece in pieces:
            targets = []
            for group, start, stop, shape in _stretches(piece, shaped):
                target = nn.Parameter(piece.master[start:stop].view(shape))
                inner_groups[group]["params"].append(target)
                targets.append((target, start, stop))
            self._targets[id(piece)] = targets
        self._pieces = list(pieces)
        inner = object.__new__(type(instance))
        inner.__dict__.update(instance.__dict__)
        inner.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the outer instance
        inner.param_groups = inner_groups
        inner.state = defaultdict(dict)
        inner.defaults = copy.copy(instance.defaults)
        self.inner = inner

    def step(self, piece: Piece, gradient: torch.Tensor, coefficient: float, number: int) -> None:
        scaled = gradient.to(piece.master.dtype).mul(coefficient)
        for target, start, stop in self._targets[id(piece)]:
            target.grad = scaled[start:stop].view(target.shape)

    def finish(self) -> None:
        for inner, outer in zip(self.inner.param_groups, self._outer.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        self.inner.step()
        for piece in self._pieces:
            for target, _, _ in self._targets[id(piece)]:
                target.grad = None
            if piece.copies_out:
                piece.line(0, piece.master.numel()).copy_(piece.master)

    def states_of(self, piece: Piece, name: str) -> list[tuple[int, torch.Tensor]]:
        found = [(start, self.inner.state[target].get(name)) for target, start, _ in self._targets[id(piece)]]
        return [(start, state) for start, state in found if isinstance(state, torch.Tensor)]

    def held_states(self, piece: Piece) -> list[HeldState]:
        return [
            HeldState(name, start, value.view(-1))
            for target, start, _ in self._targets[id(piece)]
            for name, value in self.inner.state[target].items()
            if _lies_along(value, target)
        ]

    def loose_states(self, piece: Piece) -> list[tuple[int, int, dict[str, Any]]]:
        return [
            (start, stop, {k: v for k, v in self.inner.state[target].items() if not _lies_along(v, target)})
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
            self.inner.state[target] = state

    def remember_states(self) -> Callable[[], None]:
        before = dict(self.inner.state)

        def undo() -> None:
            self.inner.state.clear()
            self.inner.state.update(before)

        return undo

    def state_bytes(self) -> int:
        tensors = [v for state in self.inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


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
