"""Copies of offloaded state on the device, as far as memory allows.

[Note: the device cache]
Device memory that neither model state nor activations need stores copies that save traffic on the bus:

* **Gradients.** Reductions add to a gradient on the device, as without offload. It is copied to the host once, after
  the last micro-step, and not at all if the GPU steps the shard. Without a copy every micro-step adds to a sum in host
  memory ([Note: gradient offload]).
* **Parameters.** The first all-gather after a step copies the shard to the device, and later ones read it there.

Copies are made in model order: gradients of the first units are reduced last, and the step waits for them. Sums and
norms have the same bits with and without copies, so free memory never changes a result.

The size is `onefold.device_cache`. By default the ranks measure it after the first two steps (`offload/cache_size.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from onefold.plan.buffers import CACHED_GRADIENT, CACHED_PARAMETER, FlatParamSpec, stays_unsharded
from onefold.plan.plan import Plan, Tier
from onefold.plan.traffic import is_streamed

# Parts of `device_memory` and of the device's memory that a job uses when its cache is filled. Other programs, and
# larger batches as in an evaluation, may need the rest of the device.
_OF_LIMIT, _OF_DEVICE = 0.9, 0.75


def filled_bytes(device_bytes: int, limit: int | None) -> int:
    """Return the bytes that a job may use with a filled cache. `limit` is `device_memory` in bytes."""
    of_device = int(_OF_DEVICE * device_bytes)
    return of_device if limit is None else min(of_device, int(_OF_LIMIT * limit))


def assign_device_cache(specs: Sequence[FlatParamSpec], plan: Plan, num_bytes: int) -> list[FlatParamSpec]:
    """Return the flat parameters with the copies that fit in `num_bytes` of device memory."""
    assigned = [replace(spec, caches_gradient=False, caches_parameter=False) for spec in specs]
    left = num_bytes
    for gains, cache in ((_gains_from_gradient, _with_gradient), (_gains_from_parameter, _with_parameter)):
        for place, spec in enumerate(assigned):
            needed = cached_bytes([cache(spec)], plan) - cached_bytes([spec], plan)
            if gains(plan, spec) and needed <= left:
                assigned[place] = cache(spec)
                left -= needed
    return assigned


def cached_bytes(
    specs: Iterable[FlatParamSpec], plan: Plan, names: Collection[str] = (CACHED_GRADIENT, CACHED_PARAMETER)
) -> int:
    """Compute the bytes of the copies on one rank."""
    buffers = (buffer for spec in specs for buffer in spec.buffers(plan))
    return sum(buffer.own_bytes for buffer in buffers if buffer.name in names)


def _with_gradient(spec: FlatParamSpec) -> FlatParamSpec:
    return replace(spec, caches_gradient=True)


def _with_parameter(spec: FlatParamSpec) -> FlatParamSpec:
    return replace(spec, caches_parameter=True)


def _gains_from_gradient(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a gradient on the device saves traffic: it is accumulated, or the GPU steps it."""
    return spec.trainable and spec.residency.offloads_states and (plan.accumulates or is_streamed(plan, spec))


def _gains_from_parameter(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a copy of the parameter shard saves traffic: it is offloaded and gathered more than once a step.

    Secondary shards are such copies already. A shard that is the master, or a part of it, changes in every step without
    a copy to anywhere.
    """
    if stays_unsharded(plan, spec) or plan.node_shard_size > 1 or spec.master_is_shard or spec.weight_is_part_of_master:
        return False
    return spec.residency.parameters is Tier.HOST
