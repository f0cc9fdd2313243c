"""Assign a tier to each flat parameter.

Tiers are filled in order: the device first, then host memory, then the disks. Units are assigned in model order, so the
first units stay on the device and their forward runs while the host still steps the offloaded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from onefold.plan.buffers import FlatParamSpec, Residency, master_dtype
from onefold.plan.memory import count_bytes
from onefold.plan.plan import Plan, Tier


def assign_tiers(
    specs: Sequence[FlatParamSpec], plan: Plan, *, device_bytes: int | None = None, host_bytes: int | None = None
) -> list[FlatParamSpec]:
    """Return the flat parameters with their residency.

    `device_bytes` and `host_bytes` limit the model state in these tiers if the config has no `ratio`. None is no limit.
    """
    wanted, ratio = plan.states.tier, plan.offload.optimizer.ratio
    settled = list(specs)
    trained = [place for place, spec in enumerate(specs) if spec.trainable]
    if wanted is not Tier.DEVICE:
        below = Residency(Tier.HOST if ratio is None else wanted)
        for place in trained:
            settled[place] = replace(specs[place], residency=below)
        settled = [_with_parameters(spec, plan) for spec in settled]
        for place in _first_on_device(settled, trained, plan, device_bytes):
            settled[place] = replace(specs[place], residency=Residency())
    left = [place for place in trained if settled[place].residency.offloads_states]
    if wanted is Tier.NVME and ratio is None:
        on_host = [count_bytes([spec], plan, Tier.HOST).total for spec in settled]
        for place in reversed(left):  # those that do not fit in host memory are stored on disk, the last ones first
            if host_bytes is None or sum(on_host) <= host_bytes:
                break
            settled[place] = _with_parameters(replace(settled[place], residency=Residency(Tier.NVME)), plan)
            on_host[place] = count_bytes([settled[place]], plan, Tier.HOST).total
    elif wanted is Tier.NVME:
        spare = plan.offload.optimizer.max_in_cpu
        for place in left:
            spare -= specs[place].layout.shard_size
            if spare >= 0:
                settled[place] = replace(settled[place], residency=Residency(Tier.HOST))
    settled = [_with_parameters(spec, plan) for spec in settled]
    spare = plan.offload.param.max_in_cpu
    for place, spec in enumerate(settled):
        if spec.residency.parameters is Tier.NVME:
            spare -= spec.layout.shard_size
            if spare >= 0:
                settled[place] = replace(spec, residency=replace(spec.residency, parameters=Tier.HOST))
    return settled


def _first_on_device(
    settled: list[FlatParamSpec], trained: list[int], plan: Plan, device_bytes: int | None
) -> list[int]:
    """Return the first trained flat parameters, as many as the ratio or the device memory allows."""
    ratio = plan.offload.optimizer.ratio
    if ratio is not None:
        numels = accumulate(settled[place].layout.numel for place in trained)
        total = sum(settled[place].layout.numel for place in trained)
        return [place for place, used in zip(trained, numels, strict=True) if used <= (1 - ratio) * total]
    if device_bytes is None:
        return trained
    held = [count_bytes([spec], plan) for spec in settled]
    for number, place in enumerate(trained):
        held[place] = count_bytes([replace(settled[place], residency=Residency())], plan)
        if sum(each.total for each in held) + 2 * max(each.largest_slot for each in held) > device_bytes:
            return trained[:number]
    return trained


def _with_parameters(spec: FlatParamSpec, plan: Plan) -> FlatParamSpec:
    """Return the spec with the tier of its parameters.

    Flat parameters that stay unsharded, or whose master is on the device, have no offloaded parameter shard.
    """
    states, tier = spec.residency.states, plan.parameters.tier
    has_master_dtype = spec.trainable and master_dtype(spec.dtype) == spec.dtype
    if not plan.shards_parameters or spec.persistent or (spec.trainable and states is Tier.DEVICE):
        tier = Tier.DEVICE
    elif tier is Tier.NVME and states is Tier.HOST and has_master_dtype:
        tier = Tier.HOST  # the master in host memory is the source of the all-gather
    return replace(spec, residency=Residency(states, tier, apart=plan.delays_host))
