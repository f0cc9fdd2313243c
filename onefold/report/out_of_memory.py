"""The report of an out-of-memory error: the use of device memory, and config changes that would free memory.

This module does not access the device. It computes with the numbers that `engine/memory_errors.py` collects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from onefold.log import format_bytes
from onefold.plan import FlatParamSpec, ModelBytes, Plan, Tier, assign_tiers, count_bytes, count_unit_in_use
from onefold.plan.buffers import gathered_bytes
from onefold.plan.device_cache import cached_bytes

# Remedies that free a smaller fraction of the device are not reported.
_WORTH = 0.01
# The unused fraction of the device from which the allocator counts as fragmented.
_FRAGMENTED = 0.05
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB|TiB)")


@dataclass(frozen=True)
class DeviceAccount:
    """The memory of one rank's device when an allocation failed, in bytes."""

    total: int
    limit: int
    """The memory that this process may use, see torch.cuda.set_per_process_memory_fraction."""
    free: int
    reserved: int
    """Bytes that torch's allocator has reserved in this process."""
    allocated: int
    """Reserved bytes that are in use."""
    held: ModelBytes
    """Model state, without `unsharded` and `slots`."""
    unsharded: int
    """Parameters of units that are unsharded while they are in use."""
    slots: int
    """Unsharded gradients that are not reduced yet."""

    @property
    def activations(self) -> int:
        """Allocated bytes that do not belong to the engine."""
        return max(0, self.allocated - self.held.total - self.unsharded - self.slots)

    @property
    def unused(self) -> int:
        return max(0, self.reserved - self.allocated)

    @property
    def others(self) -> int:
        return max(0, self.total - self.free - self.reserved)

    def lines(self) -> list[str]:
        """Return the rows of the report."""
        rows = {
            "parameters": self.held.parameters,
            "gradients": self.held.gradients,
            "masters": self.held.masters,
            "optimizer states": self.held.states,
            "unsharded units": self.unsharded,
            "unreduced gradients": self.slots,
            "activations and temporaries": self.activations,
            "reserved by torch, unused": self.unused,
            "other processes, CUDA and NCCL": self.others,
            "free": self.free,
        }
        limited = [f"  {format_bytes(self.limit):>10}  limit of this process"] if self.limit < self.total else []
        return [f"  {format_bytes(size):>10}  {name}" for name, size in rows.items() if size] + limited


class Price(IntEnum):
    """The cost of a remedy, in increasing order."""

    NOTHING = 0
    TRAFFIC = 1
    COMPUTE = 2
    BUS = 3
    ROUNDING = 4

    @property
    def words(self) -> str:
        return (
            "costs nothing", "more traffic between ranks", "more compute", "more copies over the bus",
            "values are rounded between steps",
        )[self]  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """A change of the config or the program, and the bytes that it frees on this rank."""

    change: str
    frees: int
    cost: Price
    hedge: str = ""
    """The words "about" or "up to" if the bytes are an estimate, as for activations."""

    def __str__(self) -> str:
        size = f"{self.hedge} {format_bytes(self.frees)}".strip()
        return f"{size:>15}  {self.change} ({self.cost.words})"


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run from which remedies are computed, in addition to the account."""

    plan: Plan
    units: Sequence[Sequence[FlatParamSpec]]
    with_less: Mapping[str, Plan]
    """Plans that store less on the device, keyed by the config change that selects them."""
    micro_batch: int
    accumulation: int
    asked: int | None = None
    has_expandable_segments: bool = False


def needed_bytes(units: Sequence[Sequence[FlatParamSpec]], plan: Plan) -> int:
    """Compute the device bytes of one rank at the end of backward with the largest unit in use, without activations."""
    specs = [spec for unit in units for spec in unit]
    return count_bytes(specs, plan).total + count_unit_in_use(units, plan)


def advise(account: DeviceAccount, run: RunFacts) -> list[Remedy]:
    """Return the remedies for this rank, sorted by the bytes that they free, then by their cost."""
    cached = cached_bytes([spec for unit in run.units for spec in unit], run.plan)
    found = [*_by_plan(run), *_by_live_units(account, run), *_by_activations(account, run)]
    found.append(Remedy("onefold.device_cache 0, or fewer GB", cached, Price.BUS))
    fragmented = account.unused >= min(run.asked or account.limit, _FRAGMENTED * account.limit)
    if fragmented and not run.has_expandable_segments:
        change = "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True"
        found.append(Remedy(change, account.unused, Price.NOTHING, "up to"))
    worth = [remedy for remedy in found if remedy.frees > _WORTH * account.limit]
    return sorted(worth, key=lambda remedy: (-remedy.frees, remedy.cost))


def _by_plan(run: RunFacts) -> list[Remedy]:
    now = needed_bytes(run.units, run.plan)
    found = []
    for change, plan in run.with_less.items():
        flat = assign_tiers([_under(plan, spec) for unit in run.units for spec in unit], plan)
        rest = iter(flat)
        units = [[next(rest) for _ in unit] for unit in run.units]
        instead = "" if plan.stage == run.plan.stage else f" instead of {run.plan.stage}"
        below = plan.states.tier is not Tier.DEVICE and run.plan.states.tier is Tier.DEVICE
        moves = below or plan.parameters.tier is not run.plan.parameters.tier
        frees = now - needed_bytes(units, plan)
        price = Price.BUS if moves else Price.TRAFFIC
        if plan.formats.states != run.plan.formats.states or plan.formats.masters != run.plan.formats.masters:
            price = Price.ROUNDING
        found.append(Remedy(change + instead, frees, price))
    return found


def _under(plan: Plan, spec: FlatParamSpec) -> FlatParamSpec:
    """Return a spec for another plan, before a tier is assigned, in the format of its largest parameter."""
    state_spec = spec.state_spec
    if spec.trainable:
        largest = max(spec.layout.members, key=lambda member: member.stop - member.start)
        state_spec = replace(state_spec, formats=(), master=None).held_as(
            plan.formats, largest.name, spec.dtype, largest.stop - largest.start
        )
    return replace(spec.on_device, state_spec=state_spec)


def _by_live_units(account: DeviceAccount, run: RunFacts) -> list[Remedy]:
    """Return the remedy against units that are prefetched or stay unsharded between two uses."""
    sizes = [sum(gathered_bytes(run.plan, spec) for spec in unit) for unit in run.units]
    elements = [sum(spec.layout.total for spec in unit) for unit in run.units]
    largest = max(sizes, default=0)
    live = max(elements, default=0)
    if account.unsharded <= largest or run.plan.limits.unsharded <= live:
        return []
    change = f"zero_optimization.stage3_max_live_parameters {live} with stage3_prefetch_bucket_size 0"
    return [Remedy(change, account.unsharded - largest, Price.TRAFFIC)]


def _by_activations(account: DeviceAccount, run: RunFacts) -> list[Remedy]:
    found = []
    if run.micro_batch > 1:
        micro = max(part for part in range(1, run.micro_batch // 2 + 1) if run.micro_batch % part == 0)
        accumulation = run.accumulation * run.micro_batch // micro
        change = f"train_micro_batch_size_per_gpu {micro} with gradient_accumulation_steps {accumulation}"
        frees = account.activations - account.activations * micro // run.micro_batch
        found.append(Remedy(change, frees, Price.TRAFFIC, "about"))
    if len(run.units) > 1:
        change = (
            "activation checkpointing of each unit (onefold.checkpointing.checkpoint, or gradient_checkpointing_enable "
            "of a transformers model), unless it is on"
        )
        frees = account.activations - account.activations // len(run.units)
        found.append(Remedy(change, frees, Price.COMPUTE, "up to"))
    decisions = run.plan.activations
    if decisions.loss_tiles == 0:
        change = "onefold.tiled_loss true, for models of transformers (onefold.tiled_cross_entropy in others)"
        found.append(Remedy(change, account.activations, Price.COMPUTE, "up to"))
    if not decisions.host_checkpoints:
        change = "activation_checkpointing.cpu_checkpointing true, if blocks are recomputed"
        found.append(Remedy(change, account.activations, Price.BUS, "up to"))
    return found


def asked_bytes(message: str) -> int | None:
    """Return the size of the failed allocation from the message of torch."""
    found = _ASKED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


MARK = "Memory in use on"


def explain(where: str, device: str, account: DeviceAccount, remedies: Sequence[Remedy], asked: int | None) -> str:
    """Return the report that is appended to the message of torch. `where` names rank, phase and unit."""
    wanted = f": {format_bytes(asked)} were requested" if asked is not None else ""
    lines = [f"onefold: {where}{wanted}. {MARK} {device}, of {format_bytes(account.total)}:", *account.lines()]
    if remedies:
        lines.append("Settings that free memory on this rank:")
        lines += [f"  {remedy}" for remedy in remedies]
    else:
        lines.append("No key of the config frees memory here. Use a larger device, or a smaller model.")
    return "\n".join(lines)


def explain_host(where: str, available: int, resident: int, held: ModelBytes) -> str:
    """Return the report for host memory."""
    rows = {
        "available": available,
        "resident in this process": resident,
        "of it offloaded parameters": held.parameters,
        "of it offloaded gradients": held.gradients,
        "of it offloaded masters": held.masters,
        "of it offloaded optimizer states": held.states,
    }
    lines = [f"onefold: {where}. {MARK} this host:"]
    lines += [f"  {format_bytes(size):>10}  {name}" for name, size in rows.items() if size]
    if held.total:
        lines.append(
            "Settings that free memory on this host: a lower zero_optimization.offload_optimizer.ratio, or "
            "zero_optimization.offload_optimizer.device nvme with an nvme_path"
        )
    return "\n".join(lines)
