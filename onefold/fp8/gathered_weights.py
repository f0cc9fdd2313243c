"""All-gathers of weights in FP8.

[Note: all-gathers in FP8]
The weights of layers that multiply in FP8 with one scale per tensor are in flat parameters of their own. After a step,
every rank computes the largest magnitude of its slice of each weight, and one small all-gather gives all ranks the
scales (`Fp8Scales.refresh`). An all-gather then casts the rank's shard with these scales, and sends one byte per
element. The layers multiply the bytes as they arrive. The result has the same bits as a cast of the unsharded weight.

The Parameters have no values meanwhile: reading one raises (`ParamHandle.operate`), and gives NaN in programs
that compile functions. `GatheredParameters` gathers the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onefold.comm import AllGatherOp
from onefold.fp8.linear import Fp8Linear
from onefold.fp8.scaled_tensor import E4M3, ScaledTensor, round_to_fp8, scale_of
from onefold.plan import Layout


class GatheredWeights:
    """The weights of one flat parameter in FP8, while they are unsharded."""

    def __init__(
        self, layout: Layout, layers: Sequence[Fp8Linear], dtype: torch.dtype, rank: int, device: torch.device
    ) -> None:
        self._layout, self._layers, self._dtype = layout, layers, dtype
        self._start, self._stop = layout.shard_range(rank)
        self._bytes = torch.empty(layout.total, dtype=torch.uint8, device=device)
        storage = self._bytes.untyped_storage()
        # Tensors of their own on the memory of the all-gather: autograd saves them, and they do not count its writes.
        self._values = [
            torch.empty(0, dtype=E4M3, device=device).set_(storage, start, shape, strides)
            for shape, strides, start in layout.strided
        ]
        self._scales = torch.ones(len(layers), device=device)
        self.is_current = False
        """Whether the scales are those of the present weights."""
        self.free()

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory of the weights, which is empty while they are sharded."""
        return self._bytes.untyped_storage()

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return self.storage.size()

    # -- scales -------------------------------------------------------------------------------------------------

    def largest(self, shard: Tensor) -> Tensor:
        """Return the largest magnitude in this rank's slice of each weight."""
        found = [
            torch.linalg.vector_norm(piece, torch.inf) if piece.numel() else piece.new_zeros(())
            for piece in self._pieces(shard)
        ]
        return torch.stack(found).to(self._dtype).float()

    def set_largest(self, largest: Tensor) -> None:
        """Set the scales from the largest magnitude of each weight."""
        self._scales, self.is_current = scale_of(largest, E4M3), True

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return len(self._layers)

    # -- unshard and reshard ------------------------------------------------------------------------------------

    def prepare_all_gather(self, shard: Tensor) -> AllGatherOp:
        """Allocate memory and return the all-gather that fills it."""
        storage = self._bytes.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self._bytes.numel())
        return AllGatherOp(self._bytes, _ShardInFp8(self, shard))

    def attach(self) -> None:
        """Give the layers their weights, after the all-gather has finished."""
        # cuBLAS reads a scale only from an address that is a multiple of 16 bytes.
        inverse = self._scales.reciprocal().unsqueeze(1).repeat(1, 4)
        for layer, values, scale in zip(self._layers, self._values, inverse[:, 0].unbind(), strict=True):
            layer.fp8.gathered = ScaledTensor(values, scale)

    def free(self) -> None:
        """Free the weights."""
        self._bytes.untyped_storage().resize_(0)
        for layer in self._layers:
            layer.fp8.gathered = None

    def cast(self, shard: Tensor, target: Tensor) -> None:
        """Cast this rank's shard into `target`."""
        for scale, source, piece in zip(
            self._scales.unbind(), self._pieces(shard), self._pieces(target.view(E4M3)), strict=True
        ):
            piece.copy_(round_to_fp8(source.to(self._dtype), scale, E4M3))

    def _pieces(self, shard: Tensor) -> list[Tensor]:
        """Return the part of each weight that lies in a shard, in order. It may be empty."""
        found = []
        for member in self._layout.members:
            low, high = max(member.start, self._start), min(member.stop, self._stop)
            found.append(shard[low - self._start : max(low, high) - self._start] if low < high else shard[:0])
        return found


@dataclass(frozen=True)
class _ShardInFp8:
    """The source of an all-gather, which casts while it copies."""

    weights: GatheredWeights
    shard: Tensor

    def copy_to(self, target: Tensor) -> None:
        """Cast the shard into `target`."""
        self.weights.cast(self.shard, target)


class Fp8Scales:
    """The scales of all weights of an engine that are gathered in FP8."""

    def __init__(self, weights: Sequence[tuple[GatheredWeights, Callable[[], Tensor]]]) -> None:
        # With the function that returns the present shard of each.
        self._weights = weights

    def refresh(self, all_gather: Callable[[str, Tensor], Tensor]) -> None:
        """Agree on the scales of weights that have changed. All ranks call this at the same place of their order.

        `all_gather` takes a name and a vector, and returns the vectors of all ranks one after the other.
        """
        changed = [(weights, shard) for weights, shard in self._weights if not weights.is_current]
        if not changed:
            return
        mine = torch.cat([weights.largest(shard()) for weights, shard in changed])
        largest = all_gather("gather of FP8 scales", mine).view(-1, mine.numel()).amax(dim=0)
        for (weights, _), part in zip(
            changed, largest.split([weights.num_weights for weights, _ in changed]), strict=True
        ):
            weights.set_largest(part)
