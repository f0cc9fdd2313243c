"""Block-wise symmetric quantization for transport, specified in torch.

A row of values becomes a row of bytes: the integers, then one fp32 scale per block, so that one message carries both.

    scale = amax * (1 / limit)    limit: 127 for 8 bits, 7 for 4; all in fp32
    q     = round(x * (limit / amax)), half to even: never beyond the limit
    x'    = q * scale

[Note: what the codec promises]
* |x - x'| <= scale / 2, plus the rounding error of the product: half a quantization step of the block.
* A block of zeros stays zeros. A block whose largest value is below TINY becomes zeros.
* A block with an infinity or a NaN is all NaN after decoding, so that the overflow check finds it.
* Rows are decoded one after the other and added in their order, in fp32.
On a CUDA device Triton kernels give the same bits in one pass over memory (`comm/kernels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.gpu_kernels import kernels_of

# Values per scale. Shards are multiples of 2,048 values, so a block never straddles two ranks.
BLOCK = 256
TINY = 1e-30

_kernels = kernels_of("onefold.comm.kernels", "quantized communication")


@dataclass(frozen=True)
class Codec:
    """Quantizes floats to 8 or 4 bits. Two 4-bit integers share a byte, the first in its lower half."""

    bits: int
    block: int = BLOCK

    @property
    def limit(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def row_bytes(self, numel: int) -> int:
        """Return the bytes of a row of values, a multiple of the block."""
        assert numel % self.block == 0, "rows end with a block"
        return numel * self.bits // 8 + numel // self.block * 4

    def values_in(self, row_bytes: int) -> int:
        """Return the number of values in a row of bytes."""
        return row_bytes // self.row_bytes(self.block) * self.block

    def encode(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encode rows of any floating dtype as rows of bytes. A row may have several pieces: (rows, pieces, values)."""
        num_rows, numel = rows.shape[0], rows.shape[1:].numel()
        if out is None:
            out = rows.new_empty(num_rows, self.row_bytes(numel), dtype=torch.uint8)
        if kernels := _kernels(rows):
            kernels.encode(rows, out, self.bits, self.block)
            return out
        blocks = rows.reshape(num_rows, -1, self.block).float()
        amax = blocks.abs().amax(-1, keepdim=True)
        usable, nothing = (amax >= TINY) & amax.isfinite(), torch.zeros_like(amax)
        inverse = torch.where(usable, torch.full_like(amax, self.limit) / amax, nothing)
        scale = torch.where(amax.isfinite(), torch.where(usable, amax * (1 / self.limit), nothing), torch.nan)
        integers = torch.where(usable, blocks * inverse, nothing).round_()
        size = numel * self.bits // 8
        out[:, :size].copy_(self._pack(integers.to(torch.int8).view(num_rows, numel)))
        out[:, size:].copy_(scale.view(num_rows, -1).contiguous().view(torch.uint8))
        return out

    def decode(self, data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode rows of bytes to rows of values, in fp32 or the dtype of `out`."""
        numel = self.values_in(data.shape[1])
        if out is None:
            out = data.new_empty(data.shape[0], numel, dtype=torch.float32)
        if numel == 0:
            return out
        if kernels := _kernels(data):
            kernels.decode(data, out, self.bits, self.block)
            return out
        size = numel * self.bits // 8
        for row, target in zip(data, out, strict=True):  # row by row, to limit the memory of fp32 copies
            scale = row[size:].contiguous().view(torch.float32)
            integers = self._unpack(row[:size]).view(-1, self.block)
            target.copy_((integers.float() * scale.unsqueeze(-1)).view(numel))
        return out

    def add(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sum of rows of bytes, as fp32 values."""
        if kernels := _kernels(data):
            out = data.new_empty(self.values_in(data.shape[1]), dtype=torch.float32)
            kernels.add(data, out, self.bits, self.block)
            return out
        total = self.decode(data[:1])
        for row in range(1, data.shape[0]):
            total += self.decode(data[row : row + 1])
        return total[0]

    def recode(self, data: torch.Tensor, other: Codec, num_rows: int) -> torch.Tensor:
        """Return the sum of rows of bytes, encoded as `num_rows` rows of another codec."""
        if self.block == other.block and (kernels := _kernels(data)):
            out = data.new_empty(num_rows, other.row_bytes(self.values_in(data.shape[1]) // num_rows))
            kernels.recode(data, out, self.bits, other.bits, self.block)
            return out
        return other.encode(self.add(data).view(num_rows, -1))

    def _pack(self, integers: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return integers.view(torch.uint8)
        low, high = integers[:, 0::2] & 0xF, integers[:, 1::2] << 4
        return (low | high).view(torch.uint8)

    def _unpack(self, data: torch.Tensor) -> torch.Tensor:
        integers = data.view(torch.int8)
        if self.bits == 8:
            return integers
        # Shifting left and right again extends the sign of the lower half.
        return torch.stack([(integers << 4) >> 4, integers >> 4], -1).view(-1)
