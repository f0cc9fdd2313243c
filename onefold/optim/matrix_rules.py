"""Update rules for whole matrices: Muon, Shampoo, and the base class for user-defined rules.

[Note: a rule of whole matrices]
A matrix rule has three parts. `prepare` is elementwise and runs on any range of a shard: it updates the states with the
gradient, and writes the input of the matrix computation to `update`. `work` receives `update` as one whole matrix on
one rank, together with the matrix states of earlier steps, and returns the new update. `finish` is elementwise again:
it applies the update to the parameters. Which rank computes which matrix, and how pieces are exchanged, is independent
of the rule (`plan/matrices.py`, `optim/matrix_steps.py`). Each matrix is computed separately, so its bits depend
neither on the number of ranks nor on the stage.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from onefold.gpu_kernels import kernels_of
from onefold.offload.buffer import Buffer
from onefold.optim.rules import Hyper, Rule

# The usual quintic iteration, chosen for its slope at zero (K. Jordan, 2024), and one with separate coefficients for
# each iteration, optimal for the result of the previous ones (Polar Express, arXiv 2505.16932).
Coefficients = Sequence[tuple[float, float, float]]
QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# The norm is multiplied by this, because the coefficients of Polar Express diverge for singular values above one.
_POLAR_EXPRESS_MARGIN = 1.02


States = Mapping[str, torch.Tensor]
Kept = dict[str, Any]
"""The states of one whole matrix: tensors and plain numbers, by name."""


# The dtype in which pieces of matrices are exchanged (`plan.traffic.MATRIX_ITEMSIZE` bytes).
WIRE = torch.bfloat16

_kernels = kernels_of("onefold.optim.matrix_kernels", "the elementwise parts of Muon and Shampoo")


@dataclass(frozen=True)
class GradientPiece:
    """The input of `prepare_at_once`: a range of the unscaled gradient, and its states as they are stored."""

    gradient: torch.Tensor
    coefficient: float | torch.Tensor
    skip: torch.Tensor | None
    """A scalar on the device: 1 if the step is skipped."""
    states: Mapping[str, Buffer]
    update: torch.Tensor


@dataclass(frozen=True)
class MasterPiece:
    """The input of `finish_at_once`: a range of a master, its update, and its model weight if that is separate."""

    master: Buffer
    update: torch.Tensor
    weights: torch.Tensor | None
    skip: torch.Tensor | None
    takes_over: bool
    """Whether model weights that differ from the rounded master are copied into the master first.

    The user has written to such weights in place.
    """


class MatrixRule(ABC):
    """A rule for whole matrices. Groups whose flag is false are stepped by AdamW instead."""

    can_skip = False
    """Whether a step may be queued before it is known whether it is applied. `work` must not store bad values then."""
    late_states: tuple[str, ...] = ()
    name: ClassVar[str]
    """The name of the rule, also in `flag`."""

    @property
    def flag(self) -> str:
        """The key of a group that selects whether it is stepped as matrices."""
        return f"use_{self.name}"

    @abstractmethod
    def names_of_matrices(self, hyper: Hyper) -> list[str]:
        """Return the names of the elementwise states."""

    @abstractmethod
    def prepare(self, gradient: torch.Tensor, states: States, update: torch.Tensor, hyper: Hyper, step: int) -> None:
        """Update the states with the gradient, and write the input of `work` to `update`. Elementwise.

        `gradient` and `update` may share memory, so write `update` last.
        """

    @abstractmethod
    def work(self, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int) -> torch.Tensor:
        """Compute the update of a whole matrix, and return it in the same shape. The arguments may be written to.

        `kept` contains the states of the matrix and is empty in the first step. Tensors and plain numbers in it are
        saved in checkpoints, and loaded by the owner of the matrix on any number of ranks.
        """

    @abstractmethod
    def finish(self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], hyper: Hyper) -> None:
        """Apply the update to a part of a parameter. Elementwise. `shape` is the shape of the whole matrix."""

    def prepare_at_once(self, piece: GradientPiece, hyper: Hyper) -> bool:
        """Scale the gradient and `prepare` in one kernel. Return False, without effect, if there is no such kernel."""
        return False

    def finish_at_once(self, piece: MasterPiece, shape: tuple[int, int], hyper: Hyper) -> bool:
        """Sync the master, `finish`, and cast it to the model weight in one kernel.

        Return False, without effect, if there is no such kernel.
        """
        return False

    @abstractmethod
    def cost(self, rows: int, columns: int) -> float:
        """Return the cost of `work` in any unit, by which matrices are distributed over ranks."""

    def workspace(self, rows: int, columns: int) -> int:
        """Return the bytes that `work` allocates temporarily."""
        return 0

    def kept_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix's states."""
        return 0

    def flops(self, rows: int, columns: int, hyper: Hyper) -> float:
        """Return the floating-point operations of the matrix products in `work`, for estimates."""
        return 0.0


AnyRule = Rule | MatrixRule
"""The update rule of a group: elementwise, or for whole matrices."""


def names_of_states(rules: Sequence[AnyRule], groups: Sequence[Hyper]) -> list[tuple[str, ...]]:
    """Return the names of the elementwise states of each group.

    Groups that share an elementwise rule have the same states, so that their parameters can share a flat parameter.
    """
    return [
        tuple(rule.names_of_matrices(group))
        if isinstance(rule, MatrixRule)
        else tuple(rule.state_names([other for r, other in zip(rules, groups, strict=True) if r is rule]))
        for rule, group in zip(rules, groups, strict=True)
    ]


def work_on(rule: MatrixRule, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int, of: str) -> torch.Tensor:
    """Call `work`, and check its result and the matrix states. `of` is the name of the parameter, for messages."""
    shape, dtype, device = tuple(matrix.shape), matrix.dtype, matrix.device
    who = f"MatrixRule {rule.name!r} ({type(rule).__name__}), parameter {of}"
    try:
        result = rule.work(matrix, kept, hyper, step)
    except Exception as error:
        states = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
        error.add_note(f"{who}: raised by work() for a matrix of shape {shape}, with kept {states}")
        raise
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"{who}: work() returned {type(result).__name__} for a matrix of shape {shape}. Return a tensor of that "
            "shape."
        )
    if tuple(result.shape) != shape:
        raise ValueError(
            f"{who}: work() returned shape {tuple(result.shape)} for a matrix of shape {shape}. Return a tensor of the "
            "same shape."
        )
    if result.layout != torch.strided or result.is_meta or not torch.can_cast(result.dtype, dtype):
        raise TypeError(
            f"{who}: work() returned a tensor of {result.dtype}, {result.layout} on {result.device} for a matrix of "
            f"shape {shape}, {dtype} on {device}. Return one that can be cast to these."
        )
    for key, value in kept.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor | int | float):
            raise TypeError(
                f"{who}: work() put {type(value).__name__} under {key!r} into kept, which cannot be saved. "
                "Store tensors, ints, floats or bools, under names."
            )
    return result.to(device, dtype).contiguous()


class MomentumRule(MatrixRule):
    """A rule whose matrices are moving averages of gradients, with decoupled weight decay."""

    def names_of_matrices(self, hyper: Hyper) -> list[str]:
        return ["momentum_buffer"]

    def ratio(self, shape: tuple[int, int], hyper: Hyper) -> float:
        """Return the factor of the learning rate for matrices of that shape."""
        return ratio_of(shape, hyper.get("adjust_lr_fn"))

    def prepare(self, gradient: torch.Tensor, states: States, update: torch.Tensor, hyper: Hyper, step: int) -> None:
        momentum, average = float(hyper["momentum"]), states["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        update.copy_(gradient.lerp(average, momentum) if hyper.get("nesterov") else average)

    def finish(self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], hyper: Hyper) -> None:
        rate = float(hyper["lr"])
        parameter.mul_(1 - rate * float(hyper["weight_decay"]))
        parameter.add_(update, alpha=-rate * self.ratio(shape, hyper))

    def prepare_at_once(self, piece: GradientPiece, hyper: Hyper) -> bool:
        average, kernels = piece.states["momentum_buffer"], _kernels(piece.gradient)
        if kernels is None or average.is_encoded or average.dtype != torch.float32:
            return False
        momentum, nesterov = float(hyper["momentum"]), bool(hyper.get("nesterov"))
        kernels.average(
            piece.gradient, piece.coefficient, piece.skip, average.tensor, piece.update, momentum, nesterov=nesterov
        )
        return True

    def finish_at_once(self, piece: MasterPiece, shape: tuple[int, int], hyper: Hyper) -> bool:
        kernels = _kernels(piece.update)
        if kernels is None or piece.master.is_encoded or piece.master.dtype != torch.float32:
            return False
        rate = float(hyper["lr"])
        decay, along = 1 - rate * float(hyper["weight_decay"]), -rate * self.ratio(shape, hyper)
        master = piece.master.tensor
        kernels.move(master, piece.update, piece.weights, piece.skip, decay, along, takes_over=piece.takes_over)
        return True


class MuonRule(MomentumRule):
    """Muon: the momentum of each matrix, orthogonalised. Bit-identical to torch's Muon with the same settings."""

    can_skip = True
    name = "muon"

    def work(self, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int) -> torch.Tensor:
        return orthogonalize(matrix, coefficients_of(hyper), _limit(hyper), float(hyper["eps"]))

    def cost(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return short * short * (4 * long + 2 * short)

    def workspace(self, rows: int, columns: int) -> int:
        short, long = sorted((rows, columns))
        return 2 * (2 * short * short + short * long)  # two Gram matrices and the next iterate, in 16 bits

    def flops(self, rows: int, columns: int, hyper: Hyper) -> float:
        return int(hyper["ns_steps"]) * self.cost(rows, columns)


class ShampooRule(MomentumRule):
    """Shampoo: the momentum of each matrix, multiplied by the inverse fourth roots of its row and column covariances.

    The update has the norm of Muon's, so both use similar learning rates. If covariances were those of the last step
    only, the updates would be equal. The states of a matrix are both covariances and both roots, on its owner.
    """

    name = "shampoo"

    def work(self, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int) -> torch.Tensor:
        wide, decay, eps = matrix.float(), float(hyper["covariance_decay"]), float(hyper["covariance_eps"])
        for side, product in (("rows", wide @ wide.T), ("columns", wide.T @ wide)):
            covariance = kept.setdefault(side, torch.zeros_like(product))
            covariance.lerp_(product, 1 - decay)
            if f"{side}_root" not in kept or step % int(hyper["root_every"]) == 0:
                kept[f"{side}_root"] = _inverse_root(covariance, eps)
        update = kept["rows_root"] @ wide @ kept["columns_root"]
        length = update.norm().clamp_(min=torch.finfo(torch.float32).tiny)
        scaled: torch.Tensor = update.mul_(math.sqrt(min(matrix.shape))).div_(length).to(matrix.dtype)
        return scaled

    def cost(self, rows: int, columns: int) -> float:
        return 30.0 * (rows**3 + columns**3)  # the eigendecomposition, which dominates the matrix products

    def workspace(self, rows: int, columns: int) -> int:
        # In fp32: the matrix, both products, and (measured) six squares of the longer side in the eigendecomposition.
        short, long = sorted((rows, columns))
        return 4 * (rows * columns + short**2 + 6 * long**2)

    def kept_bytes(self, rows: int, columns: int) -> int:
        return 4 * 2 * (rows**2 + columns**2)


def _inverse_root(covariance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the covariance to the power -1/4, with eigenvalues clamped to `eps` times the largest one."""
    values, vectors = torch.linalg.eigh(covariance)
    floor = values[-1:].mul(eps).clamp_(min=1e-30)
    root: torch.Tensor = (vectors * values.maximum(floor).pow_(-0.25)) @ vectors.T
    return root


def orthogonalize(matrix: torch.Tensor, coefficients: Coefficients, limit: float, eps: float) -> torch.Tensor:
    """Return the matrix with all singular values near one, by Newton-Schulz iterations. The input is overwritten."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide.div_(wide.norm().mul_(limit).clamp(min=eps))  # the norm is an upper bound of the singular values
    for a, b, c in coefficients:
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def coefficients_of(hyper: Mapping[str, object]) -> Coefficients:
    """Return the coefficients of each iteration. `ns_coefficients` is three numbers, or the name of a list."""
    named, steps = hyper["ns_coefficients"], int(hyper["ns_steps"])  # type: ignore[call-overload]
    if named == "polar_express":
        return [POLAR_EXPRESS[min(number, len(POLAR_EXPRESS) - 1)] for number in range(steps)]
    return [QUINTIC if named == "quintic" else tuple(named)] * steps  # type: ignore[arg-type, list-item]


def _limit(hyper: Mapping[str, object]) -> float:
    return _POLAR_EXPRESS_MARGIN if hyper["ns_coefficients"] == "polar_express" else 1.0


def ratio_of(shape: tuple[int, int], adjust: str | None) -> float:
    """Return the factor of the learning rate for matrices of that shape. `adjust` has torch's names."""
    rows, columns = shape
    if adjust == "match_rms_adamw":  # updates have the RMS of AdamW's
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
