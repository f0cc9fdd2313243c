"""The step of one shard: fetch, update, store and publish, chunk by chunk.

[Note: the step pipeline]
Every shard is stepped by `step_shard`, wherever its state is stored. The stages differ by tier only:

| master and states | fetch and store | update | publish |
|---|---|---|---|
| device | in place, one window | kernels of the device | cast in the same kernel (`InPlace`) |
| host | in place, one window | host thread, in chunks | copied to the device, or cast into the host shard |
| NVMe | a window is read while one is updated and one is written (`NvmeWindows`) | as on the host | as on the host |

A chunk is published as soon as it is updated, while the next one is updated. Shards that are streamed through the GPU
overlap the copies of their chunks as well (`gpu_stream.py`).

The update stage is `ElementwiseUpdate`: it casts and scales the gradient, decodes the state, applies the rule and
encodes the state, one tile at a time. A tile is small enough to stay in the caches of a CPU between these operations,
and large enough to fill a GPU. An optimizer of whole matrices runs the pipeline twice (`MatrixUpdate`): the first pass
updates states from gradients, the second updates masters, and matrices are exchanged in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.bus import CopyEvent
from onefold.offload.param_shard import InPlace, Publisher
from onefold.offload.shard_store import ShardStore
from onefold.offload.state_codec import Dither, host_tile
from onefold.offload.write_check import WriteCheck
from onefold.optim.matrix_rules import AnyRule, MatrixRule
from onefold.optim.rules import MASTER, Hyper, Rule, StoredTile, Tile
from onefold.plan import StateSpec
from onefold.plan.layout import Segment, round_up
from onefold.runtime import Unit

# Elements of a tile, by device type.
TILE = {"cpu": 1 << 20, "cuda": 1 << 24}
# Elements of the small shards that are stepped together, by device type.
_TOGETHER = {"cpu": TILE["cpu"], "cuda": 1 << 26}


@dataclass(frozen=True)
class StepValues:
    """The values that all tiles of a step share. `groups` are the hyperparameters at the time `step` was called."""

    number: int
    coefficient: float | torch.Tensor
    groups: Sequence[Hyper]
    skip: torch.Tensor | None = None
    """A scalar on the device: 1 if the step is skipped."""
    begins: frozenset[int] = frozenset()
    """Groups whose late states are created by this step."""


@dataclass(frozen=True)
class StateWindow:
    """The master and states of a range of a shard, in memory."""

    start: int
    stop: int
    master: Buffer
    states: Mapping[str, Buffer]
    is_reused: bool = False
    """Whether another window uses this memory next."""

    def chunks(self, size: int | None) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of at most `size` elements, or over the whole window if None."""
        yield from pairwise([*range(self.start, self.stop, size or max(self.stop - self.start, 1)), self.stop])

    def master_in(self, start: int, stop: int) -> Buffer:
        """Return [start, stop) of the shard's master."""
        return self.master[start - self.start : stop - self.start]

    def parts_in(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return [start, stop) of all tensors, in a fixed order."""
        inside = slice(start - self.start, stop - self.start)
        return [part for buffer in (self.master, *self.states.values()) for part in buffer[inside].tensors]


Windows = Callable[[ShardStore], Iterator[StateWindow]]

Update = Callable[[StateWindow, int, int, torch.Tensor | None], None]
"""Updates [start, stop) of a window. The last argument is the memory that the model weight is cast into, if any."""


def whole_window(store: ShardStore) -> Iterator[StateWindow]:
    """Return the only window of a shard whose state is in memory."""
    yield StateWindow(0, store.stop - store.start, store.master, store.states)


def copied_window(window: StateWindow, target: StateWindow, chunk_size: int | None) -> Iterator[StateWindow]:
    """Copy a window into other memory, chunk by chunk, and return each copied chunk as a window."""
    for start, stop in window.chunks(chunk_size):
        for old, new in zip(window.parts_in(start, stop), target.parts_in(start, stop), strict=True):
            new.copy_(old)
        inside = slice(start - target.start, stop - target.start)
        states = {name: state[inside] for name, state in target.states.items()}
        yield StateWindow(start, stop, target.master[inside], states)


def step_shard(
    windows: Iterable[StateWindow], update: Update, publisher: Publisher, chunk_size: int | None = None
) -> CopyEvent:
    """Update all windows of a shard and publish each chunk. See [Note: the step pipeline].

    The iterator over `windows` fetches each of them, and stores it when the next one is requested. The returned event
    completes when the master may be overwritten.
    """
    for window in windows:
        for start, stop in window.chunks(chunk_size):
            update(window, start, stop, publisher.memory(start, stop))
            publisher.send(window.master_in(start, stop).weight, start, stop)
        if window.is_reused:
            publisher.release()
    return publisher.finish()


class Steppable(Protocol):
    """The interface of a shard that `ElementwiseUpdate` needs, as `ShardStore` implements it."""

    @property
    def compared_model_weight(self) -> torch.Tensor | None: ...

    def stepped_segments(self, first: int, last: int) -> list[Segment]: ...

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]: ...


class ElementwiseUpdate:
    """The update stage of the pipeline: the rule of each optimizer group, tile by tile. For one thread at a time."""

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

    def update(
        self,
        shard: Steppable,
        gradient: torch.Tensor,
        step: StepValues,
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
                    stored = StoredTile(
                        held, gradient[low:high], step.coefficient, step.skip, at, weights, used is not None
                    )
                    if rule.apply_stored(stored, hyper, step.number):
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

    @staticmethod
    def can_join(store: ShardStore) -> bool:
        """Return whether `update_together` can update a shard: its master and states are plain tensors here."""
        buffers = (store.master, *store.states.values())
        return not store.is_offloaded and all(buffer.is_plain_tensor for buffer in buffers)

    def update_together(self, shards: Sequence[tuple[ShardStore, torch.Tensor]], step: StepValues) -> None:
        """Update whole shards and cast their new weights, with the bits of `update`, in as few kernels as possible.

        A kernel of a small shard takes less time than its launch.
        """
        by_group: dict[int, list[StoredTile]] = {}
        for store, gradient in shards:
            size = store.stop - store.start
            used, out = store.compared_model_weight, store.model_weight
            for segment in store.stepped_segments(0, size):
                inside = slice(segment.start, segment.stop)
                held = {name: state[inside] for name, state in store.states.items()}
                held[MASTER] = store.master[inside]
                part, weights = gradient, out
                if segment.start != 0 or segment.stop != size:
                    part, weights = gradient[inside], out[inside] if out is not None else None
                by_group.setdefault(segment.group, []).append(
                    StoredTile(held, part, step.coefficient, step.skip, None, weights, used is not None)
                )
        for group, stored in by_group.items():
            rule = self._rules[group]
            assert not isinstance(rule, MatrixRule), "matrices have flat parameters of their own"
            if rule.apply_stored_together(stored, step.groups[group], step.number):
                continue
            for some in _split(stored, TILE[stored[0].gradient.device.type]):
                self._update_in_torch(rule, group, some, step)

    def _update_in_torch(self, rule: Rule, group: int, stored: Sequence[StoredTile], step: StepValues) -> None:
        """Update stored tiles of one group by kernels of torch for several tensors."""
        masters = [tile.held[MASTER].tensor for tile in stored]
        used = [(master, tile.weights) for master, tile in zip(masters, stored, strict=True) if tile.takes_over]
        self.writes.take_over_all([(master, weights) for master, weights in used if weights is not None])
        for dtype in dict.fromkeys(master.dtype for master in masters):
            some = [tile for tile, master in zip(stored, masters, strict=True) if master.dtype == dtype]
            scaled = self._scaled_together([tile.gradient for tile in some], step.coefficient, dtype)
            tiles = []
            for tile, gradient in zip(some, scaled, strict=True):
                states = {name: buffer.tensor for name, buffer in tile.held.items()}
                master = states.pop(MASTER)
                tiles.append(Tile(master, gradient, states, group, step.skip, group in step.begins))
            rule.apply_together(tiles, step.groups[group], step.number)
        cast = [
            (tile.weights, master) for tile, master in zip(stored, masters, strict=True) if tile.weights is not None
        ]
        if cast:
            torch._foreach_copy_([weights for weights, _ in cast], [master for _, master in cast])

    def _scaled_together(
        self, gradients: list[torch.Tensor], coefficient: float | torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return gradients in `dtype`, scaled, in new memory if they change."""
        is_scaled = isinstance(coefficient, torch.Tensor) or coefficient != 1.0
        if not is_scaled and all(gradient.dtype == dtype for gradient in gradients):
            return gradients
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.empty(sum(sizes), dtype=dtype, device=gradients[0].device)
        scaled = [*flat.split(sizes)]
        torch._foreach_copy_(scaled, gradients)
        if is_scaled:
            flat.mul_(coefficient)
        return scaled

    @contextmanager
    def opened(self, held: Mapping[str, Buffer], dither: Dither | None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the values of buffers, to be changed in place. Encoded ones are decoded, and encoded afterwards."""
        values = {name: self._values(name, buffer) for name, buffer in held.items()}
        yield dict(values)
        for name, buffer in held.items():
            if buffer.is_encoded:
                buffer.store(values[name], replace(dither, state=name) if dither is not None else None)

    def _values(self, name: str, buffer: Buffer) -> torch.Tensor:
        if buffer.format is not None and not buffer.is_cuda:
            # The last range of a shard may end within a block, which is decoded as a whole.
            return buffer.fetch(self._memory(name, round_up(buffer.numel(), buffer.format.block), buffer.dtype))
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


class ElementwiseStep:
    """The main thread's step of shards with elementwise rules. Small shards are stepped together.

    On a GPU they wait for those of later batches, too, because a kernel of a small shard takes less time than its
    launch. On a CPU they only wait for those of their batch.
    """

    def __init__(self, rules: Sequence[AnyRule]) -> None:
        self._elementwise = ElementwiseUpdate(rules)
        # Small shards that wait for others, with their gradients, and their elements.
        self._small: list[tuple[ShardStore, torch.Tensor]] = []
        self._num_waiting = 0
        # Batches whose shards were all passed to `step`, some of which wait.
        self._batches: list[list[Unit]] = []
        self._num_final = 0
        self._values: StepValues | None = None

    def step(self, store: ShardStore, gradient: torch.Tensor, step: StepValues) -> None:
        """Step a shard whose state is on the device, now or with others."""
        if self._values is not step:  # discard what a failed step has left
            self._small, self._num_waiting, self._batches, self._num_final, self._values = [], 0, [], 0, step
        size, device = store.stop - store.start, store.device.type
        if size <= TILE[device] // 2 and self._elementwise.can_join(store):
            if self._num_waiting + size > _TOGETHER[device]:
                self.step_small(step)
            self._small.append((store, gradient))
            self._num_waiting += size
            return
        update = partial(self._elementwise.update, store, gradient, step)
        step_shard(whole_window(store), update, publisher_on_device(store))

    def step_small(self, step: StepValues) -> None:
        """Step the small shards that wait for others."""
        small, self._small, self._num_waiting = self._small, [], 0
        if small:
            self._elementwise.update_together(small, step)
        self._num_final = len(self._batches)

    def end_batch(self, batch: list[Unit], step: StepValues) -> Iterator[list[Unit]]:
        """Yield the batches whose parameters are final, after all shards of a batch were passed to `step`."""
        self._batches.append(batch)
        if not (self._small and self._small[0][0].device.type == "cuda"):
            self.step_small(step)
        yield from self._final_batches()

    def end_step(self, batches: Sequence[list[Unit]]) -> Iterator[list[Unit]]:
        """Yield the batches that `end_batch` has not yielded, after the last batch."""
        if self._values is not None:
            self.step_small(self._values)
        yield from self._final_batches()

    def _final_batches(self) -> list[list[Unit]]:
        found, self._batches, self._num_final = self._batches[: self._num_final], self._batches[self._num_final :], 0
        return found


def _split(tiles: Sequence[StoredTile], size: int) -> Iterator[Sequence[StoredTile]]:
    """Split tiles into parts of at most `size` elements, which bounds the memory for their scaled gradients."""
    start = num_elements = 0
    for stop, tile in enumerate(tiles):
        num_elements += tile.gradient.numel()
        if num_elements > size and stop > start:
            yield tiles[start:stop]
            start, num_elements = stop, tile.gradient.numel()
    yield tiles[start:]


def publisher_on_device(store: ShardStore) -> Publisher:
    """Return the publisher of a shard whose state is on the device."""
    return InPlace(store.model_weight) if store.model_weight is not None else Publisher()


def num_tiles(kept: StateSpec) -> int:
    """Return the number of fp32 tiles that a step on a GPU allocates: the scaled gradient and all decoded buffers.

    Adam's kernel for encoded states needs none.
    """
    if {"exp_avg", "exp_avg_sq"} == set(kept.names) and kept.formats and all(kept.formats):
        return 0
    return 1 + sum(form is not None for form in (kept.master, *kept.formats))
