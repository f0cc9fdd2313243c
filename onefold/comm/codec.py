"""Block-wise symmetric integers: the form in which quantized wires carry floats. A specification in torch.

A row of values becomes a row of bytes: first the integers, then one fp32 scale a block: one message carries both.

    scale = amax / limit          limit: 127 for 8 bits, 7 for 4
    q     = round(x * (limit / amax)), half to even, within [-limit, limit]
    x'    = q * scale

[Note: what the codec promises]
* |x - x'| <= scale / 2, and a little for the rounding of the product: half a step of the block it is in.
* A block of zeros is zeros. A block whose largest value is below TINY is taken for zeros.
* A block with an infinity or a NaN is all NaN when it is decoded, so that an overflow is seen by whoever looks for it.
* Encoding what was decoded gives the same bytes: q = limit at the largest value, so the scale is the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Values that share a scale. Shards are multiples of 2,048 values, so a block never straddles two ranks.
BLOCK = 256
TINY = 1e-30


@dataclass(frozen=True)
class Codec:
    """Floats as integers of `bits` bits, 8 or 4; two of the latter in a byte, the first in its lower half."""

    bits: int
    block: int = BLOCK

    @property
    def limit(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def row_bytes(self, numel: int) -> int:
        """Of a row of so many values, which end with a block."""
        assert numel % self.block == 0, "rows end with a block"
        return numel * self.bits // 8 + numel // self.block * 4

    def encode(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(n, values) of any floating dtype to (n, bytes)."""
        num_rows, numel = rows.shape
        data = rows.new_empty(num_rows, self.row_bytes(numel), dtype=torch.uint8) if out is None else out
        blocks = rows.float().view(num_rows, -1, self.block)
        amax = blocks.abs().amax(-1, keepdim=True)
        usable = (amax >= TINY) & amax.isfinite()
        inverse = torch.where(usable, self.limit / amax, torch.zeros_like(amax))
        scale = torch.where(amax >= TINY, amax / self.limit, torch.zeros_like(amax))
        scale = torch.where(amax.isfinite(), scale, torch.full_like(amax, torch.nan))
        integers = torch.where(usable, blocks * inverse, torch.zeros_like(blocks)).round_()
        integers = integers.clamp_(-self.limit, self.limit).to(torch.int8).view(num_rows, numel)
        size = numel * self.bits // 8
        data[:, :size].copy_(self._pack(integers))
        data[:, size:].copy_(scale.view(num_rows, -1).contiguous().view(torch.uint8))
        return data

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """(n, bytes) to (n, values) in fp32."""
        size = numel * self.bits // 8
        scale = data[:, size:].contiguous().view(torch.float32)
        integers = self._unpack(data[:, :size]).view(data.shape[0], -1, self.block)
        return (integers.float() * scale.unsqueeze(-1)).view(data.shape[0], numel)

    def _pack(self, integers: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return integers.view(torch.uint8)
        low, high = integers[:, 0::2] & 0xF, integers[:, 1::2] << 4
        return (low | high).view(torch.uint8)

    def _unpack(self, data: torch.Tensor) -> torch.Tensor:
        integers = data.view(torch.int8)
        if self.bits == 8:
            return integers
        # Shifted up and down again, a half keeps its sign.
        return torch.stack([(integers << 4) >> 4, integers >> 4], -1).view(data.shape[0], -1)
