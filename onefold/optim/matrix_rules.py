"""Update rules that look at whole matrices, and Muon among them.

[Note: a rule of whole matrices]
Such a rule has three parts. `prepare` is elementwise, like the update of any rule, on whatever range of a shard: it
updates states with the gradient and leaves in `update` what the matrix is to be made of. `work` gets that as one whole
matrix, on one rank, with what it has kept of that matrix before, and returns another. `finish` is elementwise again: it
moves parameters along what came back. Everything between them, who works on which matrix and how its pieces travel, is
the mechanism's (`plan/matrices.py`, `optim/matrix_steps.py`). Each matrix is worked on by itself, so its bits depend
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

# The usual quintic iteration, chosen for its slope at zero (K. Jordan, 2024), and one that has other coefficients in
# each step, which are the best for what the steps before have left (Polar Express, arXiv 2505.16932).
Coefficients = Sequence[tuple[float, float, float]]
QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Singular values are kept this far below one: beyond it those coefficients drive them away.
_CUSHION = 1.02


States = Mapping[str, torch.Tensor]
Kept = dict[str, Any]
"""Tensors and plain numbers, by name."""


# In what pieces of matrices travel (`plan.memory.MATRIX_ITEMSIZE` bytes).
WIRE = torch.bfloat16

_kernels = kernels_of("onefold.optim.matrix_kernels", "the elementwise parts of Muon and Shampoo")


@dataclass(frozen=True)
class RawPiece:
    """What a rule prepares with, as it is held: the gradient has not been cast and scaled."""

    gradient: torch.Tensor
    coefficient: float | torch.Tensor
    skip: torch.Tensor | None
    """On the device: 1 where this is no step after all."""
    states: Mapping[str, Buffer]
    update: torch.Tensor


@dataclass(frozen=True)
class MovedPiece:
    """What a rule finishes: a piece of a master, and its rounding where that computes."""

    master: Buffer
    update: torch.Tensor
    weights: torch.Tensor | None
    skip: torch.Tensor | None
    takes_over: bool
    """Weights that are not the master's rounding have been written from outside, and become the master's."""


class MatrixRule(ABC):
    """A rule of whole matrices, for the groups that ask for it; the other groups of its optimizer are stepped by AdamW
    (`rule_of`).
    """

    can_skip = False
    """Whether a step may be queued before anybody knows that it is one: `work` then leaves no trace of bad values."""
    late_states: tuple[str, ...] = ()
    name: ClassVar[str]
    """The key of a group that says whether it is stepped as matrices: `use_` and this."""

    @property
    def flag(self) -> str:
        """The name of that key."""
        return f"use_{self.name}"

    @abstractmethod
    def names_of_matrices(self, hyper: Hyper) -> list[str]:
        """States that lie along a matrix, element by element."""

    @abstractmethod
    def prepare(self, gradient: torch.Tensor, states: States, update: torch.Tensor, hyper: Hyper, step: int) -> None:
        """The elementwise part before: states are updated, and `update` is what the matrix is made of. They may share
        memory, so `update` is written last.
        """

    @abstractmethod
    def work(self, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int) -> torch.Tensor:
        """The part that sees all of it, and returns a matrix of the same shape. It may write to what it is given.
        `kept` is empty the first time, and stays with the matrix: tensors and plain numbers that are put there are
        saved in checkpoints, and go to another owner on other ranks.
        """

    @abstractmethod
    def finish(self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], hyper: Hyper) -> None:
        """The elementwise part after, on a piece of a matrix of that shape."""

    def prepare_at_once(self, piece: RawPiece, hyper: Hyper) -> bool:
        """Scale and `prepare` in one pass over memory. False: there is no kernel for such a piece."""
        return False

    def finish_at_once(self, piece: MovedPiece, shape: tuple[int, int], hyper: Hyper) -> bool:
        """`finish`, and all that is done with masters and weights around it, in one pass over memory."""
        return False

    @abstractmethod
    def cost(self, rows: int, columns: int) -> float:
        """Of `work`, in any unit: by it owners are chosen."""

    def workspace(self, rows: int, columns: int) -> int:
        """Bytes that `work` needs beside the matrix it is given."""
        return 0

    def kept_bytes(self, rows: int, columns: int) -> int:
        """Bytes of what `work` keeps of a matrix from step to step."""
        return 0

    def flops(self, rows: int, columns: int, hyper: Hyper) -> float:
        """Of the products in `work`: a plan tells what a step takes."""
        return 0.0


AnyRule = Rule | MatrixRule
"""What steps a group of parameters: element by element, or as whole matrices."""


def names_of_states(rules: Sequence[AnyRule], groups: Sequence[Hyper]) -> list[tuple[str, ...]]:
    """Return the states that lie along the parameters of each group. Groups that share an elementwise rule have the
    same, so that their parameters can share a flat parameter.
    """
    return [
        tuple(rule.names_of_matrices(group))
        if isinstance(rule, MatrixRule)
        else tuple(rule.state_names([other for its, other in zip(rules, groups, strict=True) if its is rule]))
        for rule, group in zip(rules, groups, strict=True)
    ]


def work_on(rule: MatrixRule, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int, of: str) -> torch.Tensor:
    """Call `work`, and check what it returns and keeps. `of` names the parameter that the matrix belongs to."""
    shape, dtype, device = tuple(matrix.shape), matrix.dtype, matrix.device
    who = f"MatrixRule {rule.name!r} ({type(rule).__name__}), parameter {of}"
    try:
        worked = rule.work(matrix, kept, hyper, step)
    except Exception as error:
        held = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
        error.add_note(f"{who}: raised by work() for a matrix of shape {shape}, with kept {held}")
        raise
    if not isinstance(worked, torch.Tensor):
        raise TypeError(
            f"{who}: work() returned {type(worked).__name__} for a matrix of shape {shape}. Return a tensor of that "
            "shape"
        )
    if tuple(worked.shape) != shape:
        raise ValueError(
            f"{who}: work() returned shape {tuple(worked.shape)} for a matrix of shape {shape}. Return a tensor of the "
            "shape that it was given"
        )
    if worked.layout != torch.strided or worked.is_meta or not torch.can_cast(worked.dtype, dtype):
        raise TypeError(
            f"{who}: work() returned a tensor of {worked.dtype}, {worked.layout} on {worked.device} for a matrix of "
            f"shape {shape}, {dtype} on {device}. Return one that can be cast to that"
        )
    for key, value in kept.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor | int | float):
            raise TypeError(
                f"{who}: work() put {type(value).__name__} under {key!r} into kept, and a checkpoint cannot hold that. "
                "Put tensors, ints, floats or bools there, under names"
            )
    return worked.to(device, dtype).contiguous()


class MomentumRule(MatrixRule):
    """Matrices are made of an average of gradients, and parameters decay and move along what becomes of it."""

    def names_of_matrices(self, hyper: Hyper) -> list[str]:
        return ["momentum_buffer"]

    def ratio(self, shape: tuple[int, int], hyper: Hyper) -> float:
        """By how much the rate of a matrix of that shape is larger."""
        return ratio_of(shape, hyper.get("adjust_lr_fn"))

    def prepare(self, gradient: torch.Tensor, states: States, update: torch.Tensor, hyper: Hyper, step: int) -> None:
        momentum, average = float(hyper["momentum"]), states["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        update.copy_(gradient.lerp(average, momentum) if hyper.get("nesterov") else average)

    def finish(self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], hyper: Hyper) -> None:
        rate = float(hyper["lr"])
        parameter.mul_(1 - rate * float(hyper["weight_decay"]))
        parameter.add_(update, alpha=-rate * self.ratio(shape, hyper))

    def prepare_at_once(self, piece: RawPiece, hyper: Hyper) -> bool:
        average, kernels = piece.states["momentum_buffer"], _kernels(piece.gradient)
        if kernels is None or average.is_encoded or average.dtype != torch.float32:
            return False
        momentum, nesterov = float(hyper["momentum"]), bool(hyper.get("nesterov"))
        kernels.average(
            piece.gradient, piece.coefficient, piece.skip, average.tensor, piece.update, momentum, nesterov=nesterov
        )
        return True

    def finish_at_once(self, piece: MovedPiece, shape: tuple[int, int], hyper: Hyper) -> bool:
        kernels = _kernels(piece.update)
        if kernels is None or piece.master.is_encoded or piece.master.dtype != torch.float32:
            return False
        rate = float(hyper["lr"])
        decay, along = 1 - rate * float(hyper["weight_decay"]), -rate * self.ratio(shape, hyper)
        master = piece.master.tensor
        kernels.move(master, piece.update, piece.weights, piece.skip, decay, along, takes_over=piece.takes_over)
        return True


class MuonRule(MomentumRule):
    """Muon: the momentum of each matrix, orthogonalised. As torch's, to the bit, where that has the same settings."""

    can_skip = True
    name = "muon"

    def work(self, matrix: torch.Tensor, kept: Kept, hyper: Hyper, step: int) -> torch.Tensor:
        return orthogonalize(matrix, coefficients_of(hyper), _limit(hyper), float(hyper["eps"]))

    def cost(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return short * short * (4 * long + 2 * short)

    def workspace(self, rows: int, columns: int) -> int:
        short, long = sorted((rows, columns))
        return 2 * (2 * short * short + short * long)  # two Gram matrices and the next iterate, of 16 bits

    def flops(self, rows: int, columns: int, hyper: Hyper) -> float:
        return int(hyper["ns_steps"]) * self.cost(rows, columns)


class ShampooRule(MomentumRule):
    """Shampoo: the momentum of each matrix between the inverse fourth roots of its rows' and columns' covariances, as
    long as Muon's, which it would be if covariances were those of the last step alone: rates are alike. What is kept of
    a matrix is both covariances and both roots, on its owner.
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
        return 30.0 * (rows**3 + columns**3)  # of finding eigenvectors, beside which products are nothing

    def workspace(self, rows: int, columns: int) -> int:
        # In fp32 the matrix and both products; of the longer side six more while its eigenvectors are found (measured).
        short, long = sorted((rows, columns))
        return 4 * (rows * columns + short**2 + 6 * long**2)

    def kept_bytes(self, rows: int, columns: int) -> int:
        return 4 * 2 * (rows**2 + columns**2)


def _inverse_root(covariance: torch.Tensor, eps: float) -> torch.Tensor:
    """To the power -1/4; `eps`: of the largest eigenvalue, below which none counts."""
    values, vectors = torch.linalg.eigh(covariance)
    floor = values[-1:].mul(eps).clamp_(min=1e-30)
    root: torch.Tensor = (vectors * values.maximum(floor).pow_(-0.25)) @ vectors.T
    return root


def orthogonalize(matrix: torch.Tensor, coefficients: Coefficients, limit: float, eps: float) -> torch.Tensor:
    """The matrix with all of its singular values near one, by products alone (Newton-Schulz). Writes to it."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide.div_(wide.norm().mul_(limit).clamp(min=eps))  # no singular value is above the norm
    for a, b, c in coefficients:
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def coefficients_of(hyper: Mapping[str, object]) -> Coefficients:
    """Of each iteration: `ns_coefficients` is three numbers for all of them, or the name of a list."""
    named, steps = hyper["ns_coefficients"], int(hyper["ns_steps"])  # type: ignore[call-overload]
    if named == "polar_express":
        return [POLAR_EXPRESS[min(number, len(POLAR_EXPRESS) - 1)] for number in range(steps)]
    return [QUINTIC if named == "quintic" else tuple(named)] * steps  # type: ignore[arg-type, list-item]


def _limit(hyper: Mapping[str, object]) -> float:
    return _CUSHION if hyper["ns_coefficients"] == "polar_express" else 1.0


def ratio_of(shape: tuple[int, int], adjust: str | None) -> float:
    """By how much the rate of a matrix of that shape is larger, under torch's names."""
    rows, columns = shape
    if adjust == "match_rms_adamw":  # updates as large as AdamW's
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
