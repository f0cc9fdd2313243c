"""The step of one shard: fetch, update, store and publish, chunk by chunk.

[Note: the step pipeline]
Every shard is stepped by `step_shard`, wherever its state is stored. The stages differ by tier only:

| master and states | fetch and store | update | publish |
|---|---|---|---|
| device | in place, one window | kernels of the device | cast in the same kernel (`InPlace`) |
| host | in place, one window | host thread, in chunks | copied to the device, or cast into the host shard |
| NVMe | a window is read while one is updated and one is written (`NvmeWindows`) | as on the host | as on the host |

A chunk is published as soon as it is updated, while the next one is updated. Shards that are streamed through the GPU
overlap the copies of their chunks as well (`gpu_stream.py`). An optimizer of whole matrices runs the pipeline twice:
the first pass updates states from gradients, the second updates masters, and matrices are exchanged in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from onefold.offload.buffer import Buffer
from onefold.offload.bus import CopyEvent
from onefold.offload.publish import Publisher
from onefold.offload.shard_store import ShardStore


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


Windows = Callable[[ShardStore], Iterator[StateWindow]]

Update = Callable[[StateWindow, int, int, torch.Tensor | None], None]
"""Updates [start, stop) of a window. The last argument is the memory that the model weight is cast into, if any."""


def whole_window(store: ShardStore) -> Iterator[StateWindow]:
    """Return the only window of a shard whose state is in memory."""
    yield StateWindow(0, store.stop - store.start, store.master, store.states)


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
