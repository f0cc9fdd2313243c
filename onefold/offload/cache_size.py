"""The size of the device cache, measured while the job runs. See [Note: the device cache] in the plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.comm import Agreement
from onefold.log import format_bytes, logger
from onefold.offload.shard_store import ShardStore
from onefold.plan import Plan
from onefold.plan.buffers import CACHED_GRADIENT, CACHED_PARAMETER
from onefold.plan.device_cache import assign_device_cache, cached_bytes, filled_bytes

# The peak, as a part of the planned one, after which copies are freed.
_GROWTH = 1.05


class DeviceCache:
    """Fills the device cache after the first two steps, and frees a part of it if activations grow later.

    The peak of the first step contains start-up, and gradients on their way to the host. So it is reset then, and the
    second step shows what the job needs with the cache. All ranks agree on the size. A rank that runs out of memory
    later frees copies on its own: neither bits nor collectives depend on them.
    """

    def __init__(self, stores: Sequence[ShardStore], plan: Plan, agreement: Agreement, device: torch.device) -> None:
        self._stores, self._plan, self._agreement, self._device = list(stores), plan, agreement, device
        self._is_measured = device.type == "cuda" and plan.offload.cache_bytes is None
        self._num_steps = 0
        self._peak = 0

    def after_step(self) -> None:
        """Adjust the cache when no gradient is stored. All ranks call this together."""
        if not self._is_measured:
            return
        self._num_steps += 1
        peak = torch.cuda.max_memory_allocated(self._device)
        is_settled = self._num_steps > 2
        if is_settled and peak <= self._peak:
            return
        specs, self._peak = [store.spec for store in self._stores], peak
        # Device memory that this process can use.
        capacity = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
        limit = filled_bytes(capacity, self._plan.offload.device_bytes)
        cached = cached_bytes(specs, self._plan)
        room = limit - (peak - cached)
        if not is_settled:
            room = min(row[0] for row in self._agreement.synchronize("the size of the device cache", [room]))
        elif peak <= _GROWTH * limit:
            return
        specs = assign_device_cache(specs, self._plan, room)
        for store, spec in zip(self._stores, specs, strict=True):
            store.set_cache(spec)
        if self._num_steps == 1:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._agreement.group.rank == 0:
            gradients, parameters = (
                format_bytes(cached_bytes(specs, self._plan, [name])) for name in (CACHED_GRADIENT, CACHED_PARAMETER)
            )
            logger.info(
                "device cache: gradients %s, parameters %s; other memory %s of %s",
                gradients,
                parameters,
                format_bytes(peak - cached),
                format_bytes(limit),
            )
