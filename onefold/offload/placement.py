"""Which flat parameter rests in which tier, decided by all ranks alike, and room for it below the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from onefold.comm import Agreement, Group, Ledger, num_ranks_on_node
from onefold.config.zero_optimization import OffloadOptimizer, OffloadParam
from onefold.offload.bus import Bus
from onefold.offload.host_memory import available_bytes, check_room
from onefold.offload.nvme import SwapFiles
from onefold.offload.offload_memory import DiskOptions, Needs, OffloadMemory
from onefold.plan import FlatParamSpec, Plan, Tier, TierBudget, assign_tiers, count_bytes
from onefold.plan.memory import master_dtype, stays_unsharded


def place(
    specs: Sequence[FlatParamSpec], plan: Plan, agreement: Agreement, device: torch.device
) -> list[FlatParamSpec]:
    """The same flat parameters with their residency; the rank with the least room decides for all."""
    if plan.states.tier is Tier.DEVICE and plan.parameters.tier is Tier.DEVICE:
        return list(specs)
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    budget = TierBudget.of(plan, free_device=free_device, free_host=available_bytes())
    rows = agreement.meet("the room in each tier", [budget.device or 0, budget.host or 0])
    budget = replace(
        budget,
        device=min(row[0] for row in rows) if budget.device is not None else None,
        host=min(row[1] for row in rows) // num_ranks_on_node(agreement.group),
    )
    return assign_tiers(specs, plan, budget)


def make_memory(
    specs: Sequence[FlatParamSpec], plan: Plan, agreement: Agreement, ledger: Ledger, device: torch.device
) -> OffloadMemory | None:
    """Room below the device for what rests there; None where nothing does. What one rank lacks, all raise."""
    needs = needs_of(specs, plan)
    if not (needs.host_bytes or needs.states_on_disk or needs.parameters_on_disk):
        return None
    try:
        memory = _make(specs, needs, plan, agreement.group, ledger, device)
    except (OSError, MemoryError, ValueError):
        agreement.meet("the room below the device", [1])
        raise
    failed = [rank for rank, row in enumerate(agreement.meet("the room below the device", [0])) if row[0]]
    if failed:
        memory.close()
        raise RuntimeError(f"rank {failed[0]} could not make room below the device: see its error")
    return memory


def _make(
    specs: Sequence[FlatParamSpec], needs: Needs, plan: Plan, group: Group, ledger: Ledger, device: torch.device
) -> OffloadMemory:
    on_host = count_bytes(specs, plan, Tier.HOST)
    check_room(
        needs.host_bytes,
        f"masters {on_host.masters / 1e9:.2f}, states {on_host.states / 1e9:.2f}, gradients "
        f"{on_host.gradients / 1e9:.2f}, parameters {on_host.parameters / 1e9:.2f} GB",
        num_ranks_on_node(group),
    )

    def count(way: str, num_bytes: int) -> None:
        ledger.count(way, "nvme" if way in ("read", "write") else "host", num_bytes)

    def swap(section: OffloadOptimizer | OffloadParam, *, needed: bool) -> SwapFiles | None:
        return SwapFiles(section.nvme_path, aio=plan.offload.aio, rank=group.rank, count=count) if needed else None

    optimizer, param = plan.offload.optimizer, plan.offload.param
    return OffloadMemory(
        needs,
        Bus(device, count),
        pinned=optimizer.pin_memory and param.pin_memory,
        states=DiskOptions(
            optimizer.buffer_count,
            optimizer.buffer_size,
            reads_ahead=optimizer.pipeline_read is not False,
            writes_behind=optimizer.pipeline_write is not False,
        ),
        parameters=DiskOptions(param.buffer_count, param.buffer_size),
        swap_states=swap(optimizer, needed=bool(needs.states_on_disk)),
        swap_parameters=swap(param, needed=bool(needs.parameters_on_disk)),
    )


def needs_of(specs: Sequence[FlatParamSpec], plan: Plan) -> Needs:
    """What is taken of each tier below the device while the engine is built."""
    states: list[tuple[int, torch.dtype]] = []
    parameters: list[tuple[int, torch.dtype]] = []
    for spec in specs:
        if spec.trainable and spec.residency.states is Tier.NVME:
            # Where the master is what is gathered, it is reserved among the parameters.
            num = plan.num_states + (0 if spec.master_is_shard else 1)
            states += [(spec.layout.shard_size, master_dtype(spec.dtype))] * num
        if not stays_unsharded(plan, spec) and spec.residency.parameters is Tier.NVME:
            parameters.append((spec.layout.shard_size, spec.dtype))
    return Needs(count_bytes(specs, plan, Tier.HOST).total, states, parameters)
