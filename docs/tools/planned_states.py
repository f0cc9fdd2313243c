"""Bytes of model states per element in each setting of the page, computed by onefold's plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from case import PerElement

from onefold.config import load_config
from onefold.plan import FlatParamSpec, Layout, Placement, Plan, StateSpec, Tier, assign_tiers, count_bytes, make_plan
from onefold.plan.buffers import REDUCED_GRADIENT, gathered_bytes, reduces_in_place, stays_unsharded
from onefold.plan.plan import TABLE
from onefold.tools.estimate.question import DEFAULT_CONFIG

SETTING = ("stage", "offload_optimizer", "offload_param", "precision", "state_dtype", "master_dtype")
"""The controls that the plan depends on, in addition to accumulation and whether there are several GPUs."""

_COLUMNS = {
    "device_parameters": (Tier.DEVICE, ["parameters"]),
    "device_gradients": (Tier.DEVICE, ["gradients"]),
    "device_masters": (Tier.DEVICE, ["masters"]),
    "device_states": (Tier.DEVICE, ["states"]),
    "host_parameters": (Tier.HOST, ["parameters"]),
    "host_gradients": (Tier.HOST, ["gradients"]),
    "host_masters_and_states": (Tier.HOST, ["masters", "states"]),
    "nvme_parameters": (Tier.NVME, ["parameters"]),
    "nvme_masters_and_states": (Tier.NVME, ["masters", "states"]),
}
# Elements of the flat parameter that is planned. Padding and blocks of quantized states divide it.
_NUMEL = 1 << 24


def config_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config that the page shows, without the batch. Settings without an effect are left out."""
    place = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": "/local_nvme"}}
    zero: dict[str, Any] = {"stage": values["stage"], "overlap_comm": True}
    shards_parameters, _, shards_states = (placement is Placement.SHARDED for placement in TABLE[values["stage"]])
    if shards_states and values["offload_optimizer"] != "none":
        zero["offload_optimizer"] = {**place[values["offload_optimizer"]], "pin_memory": True}
        if shards_parameters and values["offload_param"] != "none":
            zero["offload_param"] = {**place[values["offload_param"]], "pin_memory": True}
    is_fp32 = values["precision"] == "fp32"
    base = {key: value for key, value in DEFAULT_CONFIG.items() if key != "bf16" or not is_fp32}
    if values["precision"] == "fp8":
        base["fp8"] = {"enabled": True}
    formats = ("state_dtype",) if is_fp32 else ("state_dtype", "master_dtype")
    own = {name: values[name] for name in formats if values[name] != "fp32"}
    return {**base, **({"onefold": own} if own else {}), "zero_optimization": zero}


def planned_states(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Case` that the plan determines, for values of the page's controls."""
    many = values["gpus"] * values["nodes"] > 1
    return _planned_states(json.dumps(config_of(values)), values["accumulation"] > 1, many)


@cache
def _planned_states(document: str, accumulates: bool, many: bool) -> dict[str, Any]:
    config = load_config(json.loads(document))
    # With several ranks, bytes per element are a constant and a part that is proportional to 1 / ranks.
    plans = [replace(make_plan(config, num), accumulates=accumulates) for num in ((2, 4) if many else (1,))]
    found: dict[str, dict[str, float]] = {column: {} for column in _COLUMNS}
    for name, max_in_cpu in (("in_cpu", _NUMEL), ("rest", 0)):
        specs = [_spec(plan, max_in_cpu) for plan in plans]
        pairs = list(zip(specs, plans, strict=True))
        for column, (tier, kinds) in _COLUMNS.items():
            held = [count_bytes([spec], plan, tier) for spec, plan in pairs]
            first, *second = (sum(getattr(each, kind) for kind in kinds) / _NUMEL for each in held)
            sharded = 4 * (first - second[0]) if second else 0
            found[column] |= {name: first - sharded / 2, f"{name}_sharded": sharded}
    plan, spec = plans[0], specs[0]
    streamed = [each for each in spec.buffers(plan) if each.is_stepped or each.name == REDUCED_GRADIENT]
    (reduced,) = (each for each in streamed if each.name == REDUCED_GRADIENT)
    offloads = spec.residency.offloads_states
    return {
        **{column: PerElement(**numbers) for column, numbers in found.items()},
        "itemsize": spec.dtype.itemsize,
        "gathered_itemsize": gathered_bytes(plan, replace(spec, multiplies_in_fp8=True)) / spec.layout.total,
        "reduced_itemsize": reduced.dtype.itemsize,
        "streamed_itemsize": sum(each.num_bytes for each in streamed) / spec.layout.shard_size if offloads else 0,
        "stays_unsharded": stays_unsharded(plan, spec),
        "reduces_in_place": reduces_in_place(plan, spec, plan.num_micro_steps),
        "shards_states": plan.shards_states,
    }


def _spec(plan: Plan, max_in_cpu: int) -> FlatParamSpec:
    """Return a flat parameter with its tiers."""
    dtype = plan.precision.of_parameter(torch.float32)
    states = StateSpec(("exp_avg", "exp_avg_sq")).held_as(plan.formats, "weight", dtype, _NUMEL)
    layout = Layout.of([("weight", (_NUMEL,), 0)], plan.num_shards)
    spec = FlatParamSpec(layout, dtype, trainable=True, persistent=False, state_spec=states)
    param = replace(plan.offload.param, max_in_cpu=max_in_cpu)
    return assign_tiers([spec], replace(plan, offload=replace(plan.offload, param=param)))[0]
