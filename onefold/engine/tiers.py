"""What the engine makes of the tiers below the device: who rests where, and room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from onefold.comm import Agreement, Group, Ledger, num_ranks_on_host
from onefold.config import Config, OffloadOptimizer, OffloadParam
from onefold.plan import Counting, Room, RunShape, Tier, count_bytes, settle_tiers
from onefold.plan.memory import master_dtype, rests_whole
from onefold.runtime.build import Draft
from onefold.tier.bus import Bus
from onefold.tier.host import available_bytes, check_room
from onefold.tier.lower import DiskOptions, LowerTiers, Needs
from onefold.tier.nvme import Swap


def settle_drafts(
    drafts: Sequence[Draft], config: Config, counting: Counting, agreement: Agreement, device: torch.device
) -> list[Draft]:
    """The same drafts, with a tier for every run; all ranks decide alike, by the rank with the least room."""
    plan = counting.plan
    if plan.states.tier is Tier.DEVICE and plan.parameters.tier is Tier.DEVICE:
        return list(drafts)
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    room = Room.of(config, free_device=free_device, free_host=available_bytes())
    rows = agreement.meet("the room in each tier", [room.device or 0, room.host or 0])
    room = replace(
        room,
        device=min(row[0] for row in rows) if room.device is not None else None,
        host=min(row[1] for row in rows) // num_ranks_on_host(agreement.group),
    )
    settled = iter(settle_tiers([shape for draft in drafts for shape in draft.shapes], counting, room))
    return [replace(draft, shapes=[next(settled) for _ in draft.shapes]) for draft in drafts]


def make_lower(
    drafts: Sequence[Draft],
    config: Config,
    counting: Counting,
    agreement: Agreement,
    ledger: Ledger,
    device: torch.device,
) -> LowerTiers | None:
    """Room below the device for what rests there; None where nothing does. What one rank lacks, all raise."""
    shapes = [shape for draft in drafts for shape in draft.shapes]
    needs = needs_of(shapes, counting)
    if not (needs.host_bytes or needs.states_on_disk or needs.parameters_on_disk):
        return None
    try:
        lower = _make(shapes, needs, config, counting, agreement.group, ledger, device)
    except (OSError, MemoryError, ValueError):
        agreement.meet("the room below the device", [1])
        raise
    failed = [rank for rank, row in enumerate(agreement.meet("the room below the device", [0])) if row[0]]
    if failed:
        lower.close()
        raise RuntimeError(f"rank {failed[0]} could not make room below the device: see its error")
    return lower


def _make(
    shapes: Sequence[RunShape],
    needs: Needs,
    config: Config,
    counting: Counting,
    group: Group,
    ledger: Ledger,
    device: torch.device,
) -> LowerTiers:
    zero = config.zero_optimization
    on_host = count_bytes(shapes, counting, Tier.HOST)
    check_room(
        needs.host_bytes,
        f"masters {on_host.masters / 1e9:.2f}, states {on_host.states / 1e9:.2f}, gradients "
        f"{on_host.gradients / 1e9:.2f}, parameters {on_host.parameters / 1e9:.2f} GB",
        num_ranks_on_host(group),
    )

    def count(way: str, num_bytes: int) -> None:
        ledger.count(way, "nvme" if way in ("read", "write") else "host", num_bytes)

    def swap(section: OffloadOptimizer | OffloadParam, *, needed: bool) -> Swap | None:
        return Swap(section.nvme_path, aio=config.aio, rank=group.rank, count=count) if needed else None

    optimizer, param = zero.offload_optimizer, zero.offload_param
    return LowerTiers(
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


def needs_of(shapes: Sequence[RunShape], counting: Counting) -> Needs:
    """What is taken of each lower tier while the engine is built."""
    states: list[tuple[int, torch.dtype]] = []
    parameters: list[tuple[int, torch.dtype]] = []
    for shape in shapes:
        if shape.trainable and shape.rest.states is Tier.NVME:
            # Where the master is what is gathered, it is reserved among the parameters.
            num = counting.num_states + (0 if shape.master_is_shard else 1)
            states += [(shape.layout.shard_size, master_dtype(shape.dtype))] * num
        if not rests_whole(counting.plan, shape, counting.world_size) and shape.rest.parameters is Tier.NVME:
            parameters.append((shape.layout.shard_size, shape.dtype))
    return Needs(count_bytes(shapes, counting, Tier.HOST).total, states, parameters)
