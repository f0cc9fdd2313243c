"""Encode and decode the formats of `plan/state_formats.py` in torch.

`state_kernels.py` computes the same bits in Triton: every operation here is rounded separately, and none is fused.

[Note: companded bytes]
A block of 256 values is divided by its largest magnitude, its scale. A linear 8-bit code would round small values to
zero, and a table lookup is slow on a host. So a byte stores a root: the square root of signed values (the smallest
nonzero magnitude is 1/16,000 of the largest), or the fourth root of squares (1/4,000,000,000). Squares are divisors, so
none is rounded to zero unless its whole block is zero. The largest value is decoded exactly, so decoded values are
encoded to the same bytes again: skipped steps and checkpoints in fp32 change nothing.

[Note: split masters]
An fp32 value is split into its bf16 rounding, which is the model weight, and the integer difference of their bits. The
difference fits in 16 bits unless the value lies halfway between two bf16 values. Such a value, one in 65,536, is
changed by its last bit towards the model weight. The model weight is always torch's rounding of the master. The 8-bit
format stores only the upper 8 bits of the difference.

[Note: dithered rounding]
With rounding to nearest, a bf16 value would never change if updates are smaller than half a unit in its last place. So
rounding is stochastic: a value is rounded up with a probability equal to the fraction that is cut off. The random
number depends on the step, the name of the parameter and the position in it, so it is the same wherever the value is
rounded. Values that bf16 represents exactly do not change.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from onefold.gpu_kernels import kernels_of
from onefold.plan.state_formats import BF16_STOCHASTIC, BLOCK, INT8, INT8_SQUARES, SPLIT_8, SPLIT_16, StateFormat

# Blocks whose largest magnitude is below this become zero, because their smallest values would be subnormal.
TINY = 2.0**-90

_kernels = kernels_of("onefold.offload.state_kernels", "quantized states")


def host_tile() -> int:
    """Return the number of values that a host encodes or decodes at once, so that they stay in the CPU caches."""
    return torch.get_num_threads() << 18


@dataclass(frozen=True)
class Dither:
    """The random numbers that round one range of a state: they depend on the step, parameter, position and state."""

    step: int
    parameter: str
    start: int
    state: str = ""

    def after(self, num_values: int) -> Dither:
        """Return the dither of the range that starts `num_values` later."""
        return replace(self, start=self.start + num_values)

    @property
    def seed(self) -> int:
        """The seed, a signed 32-bit integer."""
        number = zlib.crc32(f"{self.step} {self.state} {self.parameter}".encode())
        return number - (1 << 32) if number >= 1 << 31 else number


def decode(format: StateFormat, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode whole blocks of values into `out`, an fp32 tensor."""
    if kernels := _kernels(out):
        kernels.decode(format, parts, out)
    else:
        decode_in_torch(format, parts, out)


def encode(
    format: StateFormat, values: torch.Tensor, parts: Sequence[torch.Tensor], dither: Dither | None = None
) -> None:
    """Encode fp32 values into the parts. Without a dither bf16 values are rounded to nearest."""
    if kernels := _kernels(values):
        kernels.encode(format, values, parts, dither)
    else:
        encode_in_torch(format, values, parts, dither)


def decode_in_torch(format: StateFormat, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode without Triton."""
    for low, high in _tiles(out):
        of_range = [_along(part, made.values, low, high) for part, made in zip(parts, format.parts, strict=True)]
        _decode(format, of_range, out[low:high])


def encode_in_torch(
    format: StateFormat, values: torch.Tensor, parts: Sequence[torch.Tensor], dither: Dither | None = None
) -> None:
    """Encode without Triton."""
    for low, high in _tiles(values):
        of_range = [_along(part, made.values, low, high) for part, made in zip(parts, format.parts, strict=True)]
        _encode(format, values[low:high], of_range, dither.after(low) if dither is not None else None)


def _tiles(values: torch.Tensor) -> Iterator[tuple[int, int]]:
    size = host_tile() if values.device.type == "cpu" else max(values.numel(), 1)
    for low in range(0, values.numel(), size):
        yield low, min(low + size, values.numel())


_of_thread = threading.local()


def _scratch(like: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Return an fp32 buffer of the size of `like`.

    On a host each thread reuses its buffers, because touching new memory is slow.
    """
    if like.device.type != "cpu":
        return torch.empty_like(like)
    memory: dict[int, torch.Tensor] = vars(_of_thread).setdefault("memory", {})
    if number not in memory or memory[number].numel() < like.numel():
        memory[number] = torch.empty(like.numel(), dtype=torch.float32)
    return memory[number][: like.numel()]


def _along(part: torch.Tensor, per_element: int, low: int, high: int) -> torch.Tensor:
    return part[low // per_element : -(-high // per_element)]


def _decode(format: StateFormat, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if format is INT8:
        # Divide by a tensor, because torch on a GPU multiplies by the reciprocal of a Python number.
        out.copy_(parts[0]).div_(out.new_full((), 127.0))
        out.mul_(torch.abs(out, out=_scratch(out)))
        out.view(-1, BLOCK).mul_(parts[1].view(-1, 1))
    elif format is INT8_SQUARES:
        out.copy_(parts[0]).div_(out.new_full((), 255.0))
        out.mul_(out).mul_(out)
        out.view(-1, BLOCK).mul_(parts[1].view(-1, 1))
    elif format is BF16_STOCHASTIC:
        out.copy_(parts[0])
    else:
        assert format in (SPLIT_16, SPLIT_8), f"no decoding for the state format {format.name}"
        weight, rest = parts
        bits = out.copy_(weight).view(torch.int32)
        below = _scratch(out).view(torch.int32).copy_(rest)
        if format is SPLIT_8:
            below.mul_(256)
        # If the program wrote zero to a model weight, a negative rest would produce a NaN.
        least = torch.bitwise_and(bits, 0x7FFFFFFF, out=_scratch(out, 1).view(torch.int32)).neg_()
        bits.add_(torch.maximum(below, least, out=below))


def _encode(format: StateFormat, values: torch.Tensor, parts: Sequence[torch.Tensor], dither: Dither | None) -> None:
    if format is INT8 or format is INT8_SQUARES:
        _companded(format, values, *parts)
    elif format is BF16_STOCHASTIC:
        _dithered(values, parts[0], dither)
    else:
        assert format in (SPLIT_16, SPLIT_8), f"no encoding for the state format {format.name}"
        _split(format, values, *parts)


def _companded(format: StateFormat, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    # New memory, comparisons and `where` are slow on a host, so only scales are compared.
    blocks, roots = values.view(-1, BLOCK), _scratch(values).view(-1, BLOCK)
    magnitudes = torch.abs(blocks, out=roots) if format is INT8 else blocks
    largest = magnitudes.amax(1, keepdim=True)
    usable = (largest >= TINY) & largest.isfinite()
    scales.view(-1, 1).copy_(torch.where(usable, largest, torch.where(largest < TINY, 0.0, torch.nan)))
    torch.div(magnitudes, torch.where(usable, largest, torch.inf), out=roots).sqrt_()
    if format is INT8:
        codes.view(-1, BLOCK).copy_(roots.mul_(127.0).add_(0.5).copysign_(blocks))
    else:
        # torch converts fp32 to bytes slowly, so convert to int16 first.
        whole = _scratch(values, 1).view(torch.int16)[: values.numel()].view(-1, BLOCK)
        codes.view(-1, BLOCK).copy_(whole.copy_(roots.sqrt_().mul_(255.0).add_(0.5).clamp_(min=1.0)))


def _split(format: StateFormat, values: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    below = _scratch(values).copy_(weight.copy_(values)).view(torch.int32)
    torch.sub(values.view(torch.int32), below, out=below)
    if format is SPLIT_16:
        rest.copy_(below.clamp_(-32767, 32767))
    else:
        rest.copy_(below.add_(128).bitwise_right_shift_(8).clamp_(-127, 127))


def _dithered(values: torch.Tensor, out: torch.Tensor, dither: Dither | None) -> None:
    nearest = values.to(torch.bfloat16)
    if dither is None:
        out.copy_(nearest)
        return
    last = dither.start + values.numel()
    places = torch.arange(dither.start, last, dtype=torch.int64, device=values.device).to(torch.int32)
    bits = values.view(torch.int32) + noise(places, dither.seed)
    rounded = bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    out.copy_(torch.where(nearest.isfinite(), rounded, nearest))


def noise(places: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 16 random bits for each place: a hash of place and seed, in 32-bit integer arithmetic."""
    mixed = places.mul_(-1640531527).add_(seed)
    for shift, mask, factor in ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387)):
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_(mask)).mul_(factor)
    return mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0xFFFF)
