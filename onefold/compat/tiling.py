"""`TiledLinear`: a linear layer in tiles, each with parameters of its own, so that no large one is gathered at once."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn


class TiledLinear(nn.Module):
    """`in_splits` x `out_splits` linear layers that compute one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} {splits} must be between 1 and {features} features")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self._columns, self._heights = _cut(in_features, in_splits), _cut(out_features, out_splits)
        # The first index of each tile, and the end of the last one.
        self.in_parts, self.out_parts = [0, *accumulate(self._columns)], [0, *accumulate(self._heights)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # The bias is added once for each output, by its last tile.
                linear_cls(columns, rows, bias=bias and index == in_splits - 1, **kwargs)
                for index, columns in enumerate(self._columns)
            )
            for rows in self._heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = input_ if self.input_is_already_split else torch.split(input_, self._columns, dim=-1)
        outputs = [self._add([tile(x) for tile, x in zip(row, inputs, strict=True)]) for row in self._rows()]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _rows(self) -> list[Any]:
        return list(self.linears)

    def _add(self, outputs: list[Any]) -> Any:
        return torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take the weights of a linear layer of the same shape."""
        from onefold.zero import GatheredParameters

        if bool(other.bias is not None) != self.use_bias:
            raise RuntimeError("TiledLinear: only one of the two layers has a bias")
        with GatheredParameters([other.weight, other.bias, *self.parameters()], modifier_rank=0):
            for row, weights in zip(self._rows(), other.weight.split(self._heights, dim=0), strict=True):
                for tile, weight in zip(row, weights.split(self._columns, dim=1), strict=True):
                    tile.weight.copy_(weight)
            if other.bias is not None:
                for row, bias in zip(self._rows(), other.bias.split(self._heights), strict=True):
                    row[-1].bias.copy_(bias)


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of layers that return their output and their bias separately."""

    def _add(self, outputs: list[Any]) -> Any:
        return super()._add([output for output, _ in outputs]), outputs[-1][1]

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._combine([output for output, _ in outputs]), torch.cat(biases, dim=-1) if biases else None


def _cut(features: int, splits: int) -> list[int]:
    """Return sizes that differ by at most one, the larger ones first."""
    return [features // splits + (index < features % splits) for index in range(splits)]


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: list[int], contiguous_split_chunks: bool = False
) -> Any:
    found = torch.split(tensor, partitions, dim=-1)
    return tuple(part.contiguous() for part in found) if contiguous_split_chunks else found
