"""Masters, gradients and optimizer states of one parameter, whole or this rank's part, in every stage.

Functions that say `full` are called by all ranks together. Values to set are the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from onefold.comm import Gathering
from onefold.engine import Engine
from onefold.optim.pieces import Piece
from onefold.plan import Member
from onefold.runtime import Home, home_of
from onefold.runtime.order import Wish
from onefold.tier.lower import Flat, read, write


@dataclass(frozen=True)
class _Place:
    """Where a trained parameter's states lie on this rank."""

    engine: Engine
    home: Home
    piece: Piece
    member: Member

    def master(self) -> _Stretch:
        return _Stretch(self, self.piece.master, self.piece.start)

    def gradient(self) -> _Stretch | None:
        run = self.piece.run
        if run.reduced is None:
            return None
        run.wait_for_reduced()
        return _Stretch(self, run.reduced, run.own_range[0])

    def state(self, name: str) -> _Stretch | None:
        """None before the optimizer has made it."""
        assert self.engine.optimizer is not None
        found = self.engine.optimizer.states_of(self.piece, name)
        # A piece that is all padding has no states, but other ranks wait for it.
        if not found and (self.piece.segments() or not self.engine.optimizer.num_steps):
            return None
        like = found[0][1] if found else self.piece.master
        line = torch.zeros(self.piece.stop - self.piece.start, dtype=like.dtype, device=self.piece.run.device)
        for start, tensor in found:
            line[start : start + tensor.numel()].copy_(read(tensor).flatten())
        return _Stretch(self, line, self.piece.start)

    def set_state(self, name: str, line: torch.Tensor) -> None:
        assert self.engine.optimizer is not None
        for start, tensor in self.engine.optimizer.states_of(self.piece, name):
            values = line[start : start + tensor.numel()]
            write(tensor, values.view(tensor.shape) if isinstance(tensor, torch.Tensor) else values)


@dataclass(frozen=True)
class _Stretch:
    """Part of a run's line: `tensor` lies at `start` of it."""

    place: _Place
    tensor: Flat
    start: int

    @property
    def _own(self) -> tuple[slice, slice]:
        """The parameter's elements in here: their place in the tensor, and in the flattened parameter."""
        member = self.place.member
        low = max(member.start, self.start)
        high = max(low, min(member.stop, self.start + self.tensor.numel()))
        return slice(low - self.start, high - self.start), slice(low - member.start, high - member.start)

    def whole(self) -> torch.Tensor:
        """The parameter's part of every rank's stretch."""
        member, run = self.place.member, self.place.piece.run
        own = line = read(self.tensor).to(run.device)
        if line.numel() < run.layout.total:
            home = self.place.home
            home.meet(Wish.READ, [])
            line = torch.empty(run.layout.total, dtype=line.dtype, device=line.device)
            home.collective.start_gather([Gathering(line, own)]).finish()
        return line[member.start : member.stop].view(member.shape).clone()

    def local(self) -> torch.Tensor:
        return read(self.tensor[self._own[0]]).to(self.place.piece.run.device, copy=True)

    def write(self, value: torch.Tensor, *, local: bool) -> None:
        inside, outside = self._own
        member, flat = self.place.member, value.detach().flatten()
        if not local and tuple(value.shape) != member.shape:
            raise ValueError(f"{member.name} has shape {member.shape}, the value {tuple(value.shape)}")
        if local and flat.numel() != inside.stop - inside.start:
            raise ValueError(
                f"{member.name}: this rank holds {inside.stop - inside.start} elements, not {flat.numel()}"
            )
        write(self.tensor[inside], flat if local else flat[outside])


def _place(parameter: nn.Parameter) -> _Place | None:
    home = home_of(parameter)
    engine = home.owner if home is not None else None
    if home is None or not isinstance(engine, Engine) or engine.optimizer is None:
        return None
    engine.optimizer.wait_for_host()
    run, index = home.run_of(parameter)
    return _Place(engine, home, engine.optimizer.piece_of(run), run.layout.members[index]) if run.trainable else None


def _trained(parameter: nn.Parameter) -> _Place:
    place = _place(parameter)
    if place is None:
        raise ValueError("the parameter is not trained by an engine: it has no master, gradient or state to set")
    return place


# -- parameters -------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole fp32 master; None if the parameter is not trained."""
    place = _place(param)
    return place.master().whole() if place else None


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    place = _place(param)
    return place.master().local() if place else None


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master, and with it the parameter."""
    place = _trained(param)
    place.engine.about_to_write()
    place.master().write(value, local=False)
    run, member = place.piece.run, place.member
    if run.rests_whole:
        run.full[member.start : member.stop].copy_(value.detach().flatten())
    else:
        run.change()
        place.piece.tell().wait()


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master. Only where parameters rest as shards: elsewhere ranks would differ.

    With second shards (hpZ) a write between two micro-steps is seen after the step.
    """
    place = _trained(param)
    if place.piece.run.rests_whole:
        raise ValueError(f"{place.member.name} rests whole on every rank: use safe_set_full_fp32_param")
    assert place.engine.optimizer is not None
    place.engine.optimizer.let_change()
    place.master().write(value, local=True)
    place.piece.tell().wait()


# -- gradients --------------------------------------------------------------------------------------------------


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole averaged gradient between backward and step; None where there is none, or not reduced yet."""
    return _get_gradient(param, local=False)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    return _get_gradient(param, local=True)


def _get_gradient(param: nn.Parameter, *, local: bool) -> torch.Tensor | None:
    place = _place(param)
    stretch = place.gradient() if place else None
    if place is None or stretch is None:
        return None
    return (stretch.local() if local else stretch.whole()).float() * place.engine.gradient_factor


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the averaged gradient that the next step uses."""
    _set_gradient(param, value, local=False)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    _set_gradient(param, value, local=True)


@torch.no_grad()
def _set_gradient(param: nn.Parameter, value: torch.Tensor, *, local: bool) -> None:
    place = _trained(param)
    stretch = place.gradient()
    if stretch is None:
        raise ValueError(f"{place.member.name} has no reduced gradient now: set it between backward and step")
    stretch.write(value.float() / place.engine.gradient_factor, local=local)
    place.piece.run.square = None


# -- optimizer states -------------------------------------------------------------------------------------------


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A whole state such as `exp_avg`; None before the optimizer has made it."""
    place = _place(param)
    stretch = place.state(optim_state_key) if place else None
    return stretch.whole() if stretch else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    place = _place(param)
    stretch = place.state(optim_state_key) if place else None
    return stretch.local() if stretch else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _set_state(param, value, optim_state_key, local=False)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _set_state(param, value, optim_state_key, local=True)


@torch.no_grad()
def _set_state(param: nn.Parameter, value: torch.Tensor, name: str, *, local: bool) -> None:
    place = _trained(param)
    stretch = place.state(name)
    if stretch is None:
        raise ValueError(f"{place.member.name} has no optimizer state {name!r}")
    stretch.write(value, local=local)
    place.set_state(name, read(stretch.tensor))
