"""Elementwise update rules: Adam, AdamW, SGD, Adagrad and Lion.

A rule can be applied to any range of a flat shard. It names its states, and updates one tile at a time, whose
parameter, gradient and states have the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from onefold.gpu_kernels import Kernels, kernels_of
from onefold.offload.buffer import Buffer
from onefold.offload.state_codec import Dither

Hyper = Mapping[str, Any]


@dataclass(frozen=True)
class Tile:
    """A range of one optimizer group, as a rule updates it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: Mapping[str, torch.Tensor]
    group: int = 0
    skip: torch.Tensor | None = None
    """A scalar on the device: 1 if the step is skipped. Only for rules with `can_skip`."""
    begins: bool = False
    """Whether this step creates the late states of the group."""


# The name of the master among the buffers of a stored tile.
MASTER = "master"


@dataclass(frozen=True)
class StoredTile:
    """A range of one optimizer group as it is stored: its buffers may be encoded, and the gradient is unscaled."""

    held: Mapping[str, Buffer]
    gradient: torch.Tensor
    coefficient: float | torch.Tensor
    skip: torch.Tensor | None = None
    dither: Dither | None = None
    weights: torch.Tensor | None = None
    """The model weight, which the new master is cast into, if it is a separate tensor."""
    takes_over: bool = False
    """Whether weights that differ from the rounded master are copied into the master before the update.

    The user has written to such weights ([Note: a write that no counter shows]).
    """


class Rule(Protocol):
    """The interface of an elementwise update rule."""

    can_skip: bool
    """Whether `apply` supports `Tile.skip`."""
    late_states: tuple[str, ...]
    """States that may be created during the run, when a hyperparameter that requires them changes."""

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        """Return the names of the states that groups with these hyperparameters require."""
        ...

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        """Update a tile in place."""
        ...

    def apply_together(self, tiles: Sequence[Tile], hyper: Hyper, step: int) -> None:
        """Update several tiles of one group in place, with the bits of `apply`."""
        ...

    def apply_stored(self, tile: StoredTile, hyper: Hyper, step: int) -> bool:
        """Update a stored tile in one kernel. Return False, without effect, if there is no such kernel."""
        ...

    def apply_stored_together(self, tiles: Sequence[StoredTile], hyper: Hyper, step: int) -> bool:
        """Update stored tiles of one group in few kernels. Return False, without effect, if there are none."""
        ...


class PlainRule:
    """A rule without kernels for stored tiles, which are decoded for it."""

    late_states: tuple[str, ...] = ()

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        raise NotImplementedError

    def apply_together(self, tiles: Sequence[Tile], hyper: Hyper, step: int) -> None:
        for tile in tiles:
            self.apply(tile, hyper, step)

    def apply_stored(self, tile: StoredTile, hyper: Hyper, step: int) -> bool:
        return False

    def apply_stored_together(self, tiles: Sequence[StoredTile], hyper: Hyper, step: int) -> bool:
        return False


# The step number as a tensor, as torch's fused kernels require it. There is one for each device and stream, because
# host and device step at the same time, and the device uses a second stream for states that are streamed through it.
_step_tensors: dict[tuple[torch.device, int], tuple[int, torch.Tensor]] = {}


def _step_tensor(step: int, device: torch.device) -> torch.Tensor:
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    number, tensor = _step_tensors.get(key, (0, None))
    if tensor is None or number != step:
        tensor = torch.full((), float(step), dtype=torch.float32, device=device)
        _step_tensors[key] = step, tensor
    return tensor


_kernels = kernels_of("onefold.optim.adam_kernels", "AdamW with quantized states")
_fused_kernels = kernels_of("onefold.optim.fused_adam_kernels", "AdamW in one pass")


@dataclass(frozen=True)
class AdamNumbers:
    """The scalars of one step of Adam."""

    decay: float
    """The factor of the parameter if weight decay is decoupled, else the factor of its part in the gradient."""
    decoupled: bool
    beta1: float
    beta2: float
    step_size: float
    root: float
    """The divisor of the root of the average of squares."""
    eps: float
    sign: float

    @staticmethod
    def of(hyper: Hyper, step: int) -> AdamNumbers:
        """Compute the scalars of a step."""
        beta1, beta2 = (float(beta) for beta in hyper["betas"])
        rate, decay, decoupled = float(hyper["lr"]), float(hyper["weight_decay"]), hyper["decoupled_weight_decay"]
        return AdamNumbers(
            decay=1 - rate * decay if decoupled else decay,
            decoupled=bool(decoupled),
            beta1=beta1,
            beta2=beta2,
            step_size=rate / (1 - beta1**step),
            root=math.sqrt(1 - beta2**step),
            eps=float(hyper["eps"]),
            sign=-1.0 if hyper.get("maximize") else 1.0,
        )


def adam_in_single_operations(tile: Tile, numbers: AdamNumbers) -> None:
    """Compute a step of Adam with the bits of the kernel for encoded tiles, which rounds after every operation.

    torch's fused kernel differs in the last bits.
    """
    parameter, average, squares = tile.parameter, tile.states["exp_avg"], tile.states["exp_avg_sq"]
    gradient = tile.gradient * numbers.sign
    if numbers.decoupled:
        parameter.mul_(numbers.decay)
    else:
        gradient = gradient + parameter * numbers.decay
    average.mul_(numbers.beta1).add_(gradient * (1 - numbers.beta1))
    squares.mul_(numbers.beta2).add_((gradient * gradient).mul_(1 - numbers.beta2))
    divisor = squares.sqrt().div_(torch.full_like(squares, numbers.root)).add_(numbers.eps)
    parameter.sub_((average / divisor).mul_(numbers.step_size))


class AdamRule:
    """Adam and AdamW, by torch's fused kernels."""

    can_skip = True
    late_states: tuple[str, ...] = ()

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        extra = ["max_exp_avg_sq"] if any(group.get("amsgrad") for group in groups) else []
        return ["exp_avg", "exp_avg_sq", *extra]

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        self.apply_together([tile], hyper, step)

    def apply_together(self, tiles: Sequence[Tile], hyper: Hyper, step: int) -> None:
        beta1, beta2 = hyper["betas"]
        fused = torch._fused_adamw_ if hyper["decoupled_weight_decay"] else torch._fused_adam_
        amsgrad = bool(hyper.get("amsgrad", False))
        fused(
            [tile.parameter for tile in tiles],
            [tile.gradient for tile in tiles],
            [tile.states["exp_avg"] for tile in tiles],
            [tile.states["exp_avg_sq"] for tile in tiles],
            [tile.states["max_exp_avg_sq"] for tile in tiles] if amsgrad else [],
            [_step_tensor(step, tiles[0].parameter.device)] * len(tiles),
            lr=float(hyper["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(hyper["weight_decay"]),
            eps=float(hyper["eps"]),
            amsgrad=amsgrad,
            maximize=bool(hyper.get("maximize", False)),
            found_inf=tiles[0].skip,
        )

    def apply_stored(self, tile: StoredTile, hyper: Hyper, step: int) -> bool:
        if hyper.get("amsgrad"):
            return False
        held = [tile.held[name] for name in (MASTER, "exp_avg", "exp_avg_sq")]
        if _is_plain(tile):
            fused = self._kernels_for(tile, hyper)
            if fused is not None:
                fused.step(tile, hyper, step)
            return fused is not None
        encoded_twice = tile.weights is not None and tile.held[MASTER].is_encoded
        if encoded_twice or not all(buffer.is_encoded for buffer in held[1:]):
            return False
        kernels = _kernels(tile.gradient)
        if kernels is not None:
            kernels.step(tile, AdamNumbers.of(hyper, step))
        return kernels is not None

    def apply_stored_together(self, tiles: Sequence[StoredTile], hyper: Hyper, step: int) -> bool:
        if hyper.get("amsgrad") or not all(map(_is_plain, tiles)):
            return False
        fused = self._kernels_for(tiles[0], hyper)
        if fused is None or any(self._kernels_for(tile, hyper) is None for tile in tiles):
            return False
        alike: dict[Any, list[StoredTile]] = {}
        for tile in tiles:
            weights = tile.weights.dtype if tile.weights is not None else None
            alike.setdefault((tile.gradient.dtype, weights, tile.takes_over), []).append(tile)
        for some in alike.values():
            fused.step_together(some, hyper, step)
        return True

    @staticmethod
    def _kernels_for(tile: StoredTile, hyper: Hyper) -> Kernels | None:
        """Return the kernels for a tile with fp32 states, or None if torch's need as few passes or have other bits."""
        needs_casts = tile.weights is not None or tile.gradient.dtype != torch.float32
        decays_alike = hyper["decoupled_weight_decay"] or not hyper["weight_decay"]
        return _fused_kernels(tile.gradient) if needs_casts and decays_alike else None


def _is_plain(tile: StoredTile) -> bool:
    """Return whether master and states are fp32 tensors."""
    buffers = (tile.held[name] for name in (MASTER, "exp_avg", "exp_avg_sq"))
    return all(buffer.is_plain_tensor and buffer.dtype == torch.float32 for buffer in buffers)


class SGDRule(PlainRule):
    """SGD with momentum, dampening, Nesterov, by torch's fused kernel."""

    can_skip = True
    late_states: tuple[str, ...] = ("momentum_buffer",)

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        return ["momentum_buffer"] if any(group["momentum"] for group in groups) else []

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        momentum = float(hyper["momentum"])
        torch._fused_sgd_(
            [tile.parameter],
            [tile.gradient],
            [tile.states["momentum_buffer"]] if momentum else [],
            weight_decay=float(hyper["weight_decay"]),
            momentum=momentum,
            lr=float(hyper["lr"]),
            dampening=float(hyper["dampening"]),
            nesterov=bool(hyper["nesterov"]) and momentum != 0,
            maximize=bool(hyper.get("maximize", False)),
            is_first_step=tile.begins,
            found_inf=tile.skip,
        )


class AdagradRule(PlainRule):
    """Adagrad, with torch's learning rate decay."""

    can_skip = False

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        return ["sum"]

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        gradient, total = tile.gradient, tile.states["sum"]
        if step == 1 and hyper.get("initial_accumulator_value"):
            total.fill_(hyper["initial_accumulator_value"])
        if hyper.get("maximize"):
            gradient = gradient.neg()
        if hyper["weight_decay"]:
            gradient = gradient.add(tile.parameter, alpha=hyper["weight_decay"])
        rate = float(hyper["lr"]) / (1 + (step - 1) * hyper["lr_decay"])
        total.addcmul_(gradient, gradient, value=1)
        tile.parameter.addcdiv_(gradient, total.sqrt().add_(hyper["eps"]), value=-rate)


class LionRule(PlainRule):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay."""

    can_skip = False

    def state_names(self, groups: Sequence[Hyper]) -> list[str]:
        return ["exp_avg"]

    def apply(self, tile: Tile, hyper: Hyper, step: int) -> None:
        beta1, beta2 = hyper["betas"]
        rate, average = float(hyper["lr"]), tile.states["exp_avg"]
        tile.parameter.mul_(1 - rate * hyper["weight_decay"])
        tile.parameter.add_(average.lerp(tile.gradient, 1 - beta1).sign_(), alpha=-rate)
        average.lerp_(tile.gradient, 1 - beta2)
