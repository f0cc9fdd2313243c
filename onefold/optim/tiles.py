"""Update ranges of shards tile by tile: cast and scale the gradient, decode, apply the rule, encode, cast out.

A tile is small enough to stay in the caches of a CPU between these operations, and large enough to fill a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.state_codec import Dither, host_tile
from onefold.offload.write_check import WriteCheck
from onefold.optim.matrix_rules import AnyRule, MatrixRule
from onefold.optim.pipeline import StateWindow
from onefold.optim.rules import MASTER, EncodedTile, Hyper, Tile
from onefold.plan import StateSpec
from onefold.plan.layout import Segment

# Elements of a tile, by device type.
TILE = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass(frozen=True)
class Step:
    """The values that all tiles of a step share. `groups` are the hyperparameters at the time `step` was called."""

    number: int
    coefficient: float | torch.Tensor
    groups: Sequence[Hyper]
    skip: torch.Tensor | None = None
    """A scalar on the device: 1 if the step is skipped."""
    begins: frozenset[int] = frozenset()
    """Groups whose late states are created by this step."""


def num_tiles(kept: StateSpec) -> int:
    """Return the number of fp32 tiles that a step on a GPU allocates: the scaled gradient and all decoded buffers.

    Adam's kernel for encoded states needs none.
    """
    if {"exp_avg", "exp_avg_sq"} == set(kept.names) and kept.formats and all(kept.formats):
        return 0
    return 1 + sum(form is not None for form in (kept.master, *kept.formats))


class Steppable(Protocol):
    """The interface of a shard that a `Tiler` needs, as `ShardStore` implements it."""

    @property
    def compared_model_weight(self) -> torch.Tensor | None: ...

    def stepped_segments(self, first: int, last: int) -> list[Segment]: ...

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]: ...


class Tiler:
    """Applies the rule of each optimizer group to ranges of a shard. For one thread at a time."""

    def __init__(self, rules: Sequence[AnyRule], size: int | None = None) -> None:
        self._rules = rules
        self._size = size
        # Host memory for the scaled gradient and for decoded values, by name.
        self._scratch: dict[str, torch.Tensor] = {}
        self.writes = WriteCheck()

    def size(self, window: StateWindow) -> int:
        """Return the elements of a tile."""
        device = window.master.device.type
        encoded = any(buffer.is_encoded for buffer in (window.master, *window.states.values()))
        if device == "cpu" and encoded:
            return host_tile()
        return self._size or TILE[device]

    def step(
        self,
        shard: Steppable,
        gradient: torch.Tensor,
        step: Step,
        window: StateWindow,
        start: int,
        stop: int,
        out: torch.Tensor | None,
    ) -> None:
        """Update [start, stop) of a window, and cast the new values into `out`.

        `gradient` covers the whole shard, `out` the range. They may share memory.
        """
        size, used = self.size(window), shard.compared_model_weight
        for segment in shard.stepped_segments(start, stop):
            rule, hyper = self._rules[segment.group], step.groups[segment.group]
            assert not isinstance(rule, MatrixRule), "matrices have flat parameters of their own"
            for first, last, dither in shard.rounded_ranges(segment.start, segment.stop, step.number):
                for low in range(first, last, size):
                    high = min(low + size, last)
                    inside = slice(low - window.start, high - window.start)
                    held = {name: state[inside] for name, state in window.states.items()}
                    held[MASTER] = window.master[inside]
                    at = dither.after(low - first) if dither is not None else None
                    weights = out[low - start : high - start] if out is not None else None
                    encoded = EncodedTile(
                        held, gradient[low:high], step.coefficient, step.skip, at, weights, used is not None
                    )
                    if rule.apply_encoded(encoded, hyper, step.number):
                        continue
                    with self.opened(held, at) as states:
                        master = states.pop(MASTER)
                        if used is not None:
                            self.writes.take_over(master, used[low:high])
                        scaled = self.scaled(gradient[low:high], step.coefficient, master.dtype, size)
                        tile = Tile(master, scaled, states, segment.group, step.skip, segment.group in step.begins)
                        rule.apply(tile, hyper, step.number)
                    if weights is not None:
                        weights.copy_(held[MASTER].weight)

    @contextmanager
    def opened(self, held: Mapping[str, Buffer], dither: Dither | None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the values of buffers, to be changed in place. Encoded ones are decoded, and encoded afterwards."""
        values = {name: self._values(name, buffer) for name, buffer in held.items()}
        yield dict(values)
        for name, buffer in held.items():
            if buffer.is_encoded:
                buffer.store(values[name], replace(dither, state=name) if dither is not None else None)

    def _values(self, name: str, buffer: Buffer) -> torch.Tensor:
        if buffer.is_encoded and not buffer.is_cuda:
            return buffer.fetch(self._memory(name, buffer.numel(), buffer.dtype))
        return buffer.fetch()

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory, which the next tile reuses."""
        found = self._scratch.get(name)
        if found is None or found.dtype != dtype or found.numel() < size:
            found = self._scratch[name] = torch.empty(size, dtype=dtype)
        return found

    def scaled(
        self, gradient: torch.Tensor, coefficient: float | torch.Tensor, dtype: torch.dtype, size: int
    ) -> torch.Tensor:
        """Return a tile of the gradient in `dtype`, scaled. The next tile may reuse its memory."""
        if isinstance(coefficient, torch.Tensor):
            return gradient.to(dtype, copy=True).mul_(coefficient)
        if coefficient == 1.0 and gradient.dtype == dtype:
            return gradient
        if gradient.is_cuda:  # torch's allocator reuses this memory at once, and for activations between steps
            scaled = gradient.to(dtype, copy=True)
            return scaled if coefficient == 1.0 else scaled.mul_(coefficient)
        # On a CPU, torch's product of two dtypes would first allocate a copy.
        scaled = self._memory("gradient", size, dtype)[: gradient.numel()].copy_(gradient)
        return scaled if coefficient == 1.0 else scaled.mul_(coefficient)
