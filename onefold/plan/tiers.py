"""Which run rests in which tier: the device is filled first, then the host, then the disks. No tensors.

Units are taken in their order, so what stays on the device is used first: its forward runs while the host still steps
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.config import Config
from onefold.plan.memory import Counting, Rest, RunShape, count_bytes, master_dtype
from onefold.plan.table import Tier

GB = 1_000_000_000


@dataclass(frozen=True)
class Room:
    """How much of each tier model state may take, in bytes, and how much a config asks to be kept from lower ones."""

    ratio: float | None = 1.0
    """The share of the states that is offloaded; None: as little as the device has room for."""
    device: int | None = None
    host: int | None = None
    states_on_host: int = 0
    """Elements whose states stay on the host where others go to disk; parameters alike."""
    parameters_on_host: int = 0

    @staticmethod
    def of(config: Config, *, free_device: int | None, free_host: int) -> Room:
        """`free_device`: None where the device is the host itself, whose memory is then no reason to leave it."""
        zero, own = config.zero_optimization, config.onefold
        device = free_device * 3 // 4 if free_device is not None else None
        return Room(
            ratio=zero.offload_optimizer.ratio,
            device=int(own.device_memory * GB) if own.device_memory is not None else device,
            host=int(own.host_memory * GB) if own.host_memory is not None else free_host * 9 // 10,
            states_on_host=zero.offload_optimizer.max_in_cpu,
            parameters_on_host=zero.offload_param.max_in_cpu,
        )


def settle_tiers(runs: Sequence[RunShape], counting: Counting, room: Room) -> list[RunShape]:
    """The same runs, each with its resting place."""
    wanted = counting.plan.states.tier
    settled = list(runs)
    trained = [place for place, run in enumerate(runs) if run.trainable]
    if wanted is not Tier.DEVICE:
        on_host = trained if wanted is Tier.HOST or room.ratio is None else []
        for place in trained:
            settled[place] = replace(runs[place], rest=Rest(Tier.HOST if place in on_host else Tier.NVME))
        settled = [_with_parameters(run, counting) for run in settled]
        for place in _kept_on_device(settled, trained, counting, room):
            settled[place] = replace(runs[place], rest=Rest())
    left = [place for place in trained if settled[place].rest.offloads_states]
    if wanted is Tier.NVME and room.ratio is None:
        _spill(settled, left, counting, room)
    elif wanted is Tier.NVME:
        spare = room.states_on_host
        for place in left:
            spare -= runs[place].layout.shard_size
            if spare >= 0:
                settled[place] = replace(settled[place], rest=Rest(Tier.HOST))
    return _settle_parameters(settled, counting, room)


def _kept_on_device(settled: list[RunShape], trained: list[int], counting: Counting, room: Room) -> list[int]:
    """The first runs, as far as the ratio or the budget goes."""
    kept: list[int] = []
    if room.ratio is None:
        if room.device is None:
            return trained
        trial = list(settled)
        for place in trained:
            trial[place] = replace(trial[place], rest=Rest())
            bytes_ = count_bytes(trial, counting)
            if bytes_.total + 2 * bytes_.largest_slot > room.device:
                break
            kept.append(place)
        return kept
    total = sum(settled[place].layout.numel for place in trained)
    used = 0
    for place in trained:
        used += settled[place].layout.numel
        if used > (1 - room.ratio) * total:
            break
        kept.append(place)
    return kept


def _spill(settled: list[RunShape], left: list[int], counting: Counting, room: Room) -> None:
    """What the host has no room for goes to disk, the last first."""
    for place in reversed(left):
        if room.host is None or count_bytes(settled, counting, Tier.HOST).total <= room.host:
            return
        settled[place] = replace(settled[place], rest=Rest(Tier.NVME))


def _settle_parameters(settled: list[RunShape], counting: Counting, room: Room) -> list[RunShape]:
    """Where parameters rest, the first on the host as far as it was asked to keep them."""
    found, spare = [], room.parameters_on_host
    for run in settled:
        run = _with_parameters(run, counting)
        if run.rest.parameters is Tier.NVME:
            spare -= run.layout.shard_size
            if spare >= 0:
                run = replace(run, rest=replace(run.rest, parameters=Tier.HOST))
        found.append(run)
    return found


def _with_parameters(run: RunShape, counting: Counting) -> RunShape:
    """What rests whole stays on the device, and so does what is cast from a master there: it is held once."""
    plan, rest = counting.plan, run.rest
    wanted = plan.parameters.tier
    stays = not plan.shards_parameters or run.persistent or (run.trainable and not rest.offloads_states)
    if wanted is Tier.NVME and rest.states is Tier.HOST and run.trainable and master_dtype(run.dtype) == run.dtype:
        wanted = Tier.HOST  # the master there is what is gathered
    return replace(run, rest=Rest(rest.states, Tier.DEVICE if stays else wanted, apart=plan.delays_host))
