"""The offload tiers of one engine: host memory, swap files, the bus, and the worker threads.

All ranks assign the same tier to each flat parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from onefold.comm import Agreement, Ledger, num_ranks_on_node
from onefold.log import logger
from onefold.offload.bus import Bus
from onefold.offload.disk_shard import DiskShard, StagingBuffers
from onefold.offload.grad_offload import GradOffload
from onefold.offload.host_memory import PAGE, Arena, available_bytes, check_room, page_aligned
from onefold.offload.host_shard import HostShard
from onefold.offload.nvme import DiskTensor, SwapFiles
from onefold.offload.param_shard import DeviceShard, ParamShard
from onefold.plan import FlatParamSpec, Plan, Tier, assign_tiers, count_bytes
from onefold.plan.buffers import PARAMETER
from onefold.plan.device_cache import assign_device_cache
from onefold.plan.plan import Offload
from onefold.plan.speculation import assign_second_states, second_bytes


def agree_on_tiers(
    specs: Sequence[FlatParamSpec], plan: Plan, agreement: Agreement, device: torch.device
) -> list[FlatParamSpec]:
    """Return the flat parameters with their residency, which the rank with the least memory determines."""
    if plan.states.tier is Tier.DEVICE and plan.parameters.tier is Tier.DEVICE:
        return list(specs)
    on_device, on_host = plan.offload.device_bytes, plan.offload.host_bytes
    if on_device is None and device.type == "cuda":  # on a CPU, device memory is no limit
        on_device = torch.cuda.mem_get_info(device)[0] * 3 // 4
    available = available_bytes() * 9 // 10
    mine = [on_device or 0, available if on_host is None else on_host, plan.offload.cache_bytes or 0]
    rows = agreement.synchronize("the room in each tier", [*mine, min(mine[1], available), on_host is not None])
    on_device = min(row[0] for row in rows) if on_device is not None else None
    on_host, for_second = (min(row[at] for row in rows) // num_ranks_on_node(agreement.group) for at in (1, 3))
    assigned = assign_tiers(specs, plan, device_bytes=on_device, host_bytes=on_host)
    keeps_half_free, device_is_host = not all(row[4] for row in rows), device.type == "cpu"
    assigned = assign_second_states(
        assigned, plan, for_second, keeps_half_free=keeps_half_free, device_is_host=device_is_host
    )
    return assign_device_cache(assigned, plan, min(row[2] for row in rows))


def make_memory(
    specs: Sequence[FlatParamSpec], plan: Plan, agreement: Agreement, ledger: Ledger, device: torch.device
) -> OffloadMemory | None:
    """Allocate the memory and files of offloaded state, or return None if nothing is offloaded.

    If one rank fails, all ranks raise.
    """
    needs = Needs.of(specs, plan)
    if not (needs.host_bytes or needs.states_on_disk or needs.parameters_on_disk):
        return None

    def count(way: str, num_bytes: int) -> None:
        ledger.count(way, "nvme" if way in ("read", "write") else "host", num_bytes)

    on_host = count_bytes(specs, plan, Tier.HOST)
    what = (
        f"masters {on_host.masters / 1e9:.2f}, states {on_host.states / 1e9:.2f}, gradients "
        f"{on_host.gradients / 1e9:.2f}, parameters {on_host.parameters / 1e9:.2f} GB"
    )
    if plan.speculates:
        what += f" (of them {second_bytes(specs, plan) / 1e9:.2f} GB second masters and states)"
    try:
        ratio = plan.offload.optimizer.ratio
        check_room(needs.host_bytes, what, num_ranks_on_node(agreement.group), ratio)
        memory = OffloadMemory(needs, plan.offload, Bus(device, count), agreement.group.rank)
    except (OSError, MemoryError, ValueError):
        agreement.synchronize("the memory for offloading", [1])
        raise
    failed = [rank for rank, row in enumerate(agreement.synchronize("the memory for offloading", [0])) if row[0]]
    if failed:
        memory.close()
        raise RuntimeError(f"rank {failed[0]} cannot allocate memory for offloading. See the error of that rank.")
    return memory


Need = tuple[int, torch.dtype]
# How long closing an engine waits for threads after a failed step.
_DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Needs:
    """The bytes of host memory, and the tensors on disk as (elements, dtype), that offloaded state needs."""

    host_bytes: int
    states_on_disk: Sequence[Need]
    parameters_on_disk: Sequence[Need]

    @staticmethod
    def of(specs: Sequence[FlatParamSpec], plan: Plan) -> Needs:
        """Compute the needs of the given flat parameters."""
        stored = [buffer for spec in specs for buffer in spec.buffers(plan) if buffer.alias_of is None]
        on_disk = [buffer for buffer in stored if buffer.tier is Tier.NVME]
        return Needs(
            sum(buffer.own_bytes for buffer in stored if buffer.tier is Tier.HOST),
            [(buffer.numel, buffer.dtype) for buffer in on_disk if buffer.name != PARAMETER],
            [(buffer.numel, buffer.dtype) for buffer in on_disk if buffer.name == PARAMETER],
        )


class OffloadMemory:
    """The memory, files and threads that the flat parameters and the optimizer of an engine use for offload."""

    def __init__(self, needs: Needs, options: Offload, bus: Bus, rank: int) -> None:
        self.options = options
        self.bus = bus
        self._rank = rank
        self.pinned = options.is_pinned and bus.crosses
        # A single thread runs jobs in order. It also allocates the memory that it works on.
        self.worker = ThreadPoolExecutor(1, "onefold-host")
        # A second thread launches the copies of states that are streamed through the GPU.
        self.stream_worker = ThreadPoolExecutor(1, "onefold-stream")
        if bus.crosses:
            num = torch.get_num_threads()
            # A step waits for its slowest thread, so two cores are left for the main thread and the driver.
            self._prepare_thread(self.worker, num - 2 if num >= 8 else num)
            self._prepare_thread(self.stream_worker, min(num, 2))
        self.gradients = GradOffload(bus)
        self._arena = self.worker.submit(Arena, needs.host_bytes, pinned=self.pinned).result()
        self._swaps: list[SwapFiles] = []
        # The measured rates of file systems. All swap files of this engine use them.
        self._rates: dict[int, float] = {}
        self._states = self._reserve(needs.states_on_disk, options.optimizer.nvme_path, rank)
        self._parameters = self._reserve(needs.parameters_on_disk, options.param.nvme_path, rank)
        for swap in self._swaps:
            swap.open()
        self._parameter_buffers: StagingBuffers | None = None
        self._longest_parameter = max((numel * dtype.itemsize for numel, dtype in needs.parameters_on_disk), default=0)

    def _reserve(self, needs: Sequence[Need], paths: Sequence[str], rank: int) -> dict[Need, list[DiskTensor]]:
        """Reserve tensors on disk, before the files are created."""
        reserved: dict[Need, list[DiskTensor]] = {}
        if needs:
            swap = SwapFiles(paths, aio=self.options.aio, rank=rank, count=self.bus.count, rates=self._rates)
            self._swaps.append(swap)
            for need in needs:
                reserved.setdefault(need, []).append(swap.reserve(*need))
        return reserved

    @property
    def num_bytes_in_folders(self) -> dict[str, int]:
        """The bytes on disk in each folder of `nvme_path`."""
        found: Counter[str] = Counter()
        for swap in self._swaps:
            found.update(swap.num_bytes_in_folders)
        return dict(found)

    def _prepare_thread(self, thread: ThreadPoolExecutor, num_cores: int) -> None:
        num = torch.get_num_threads()
        thread.submit(torch.cuda.set_device, self.bus.device).result()  # new threads start with the first GPU
        thread.submit(torch.set_num_threads, num_cores).result()
        torch.set_num_threads(num)  # new threads inherit the last number that was set

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed host memory that the plan has counted."""
        return self._arena.take(numel, dtype)

    def more_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that the plan has not counted."""
        return self.worker.submit(page_aligned, numel * dtype.itemsize, pinned=self.pinned).result().view(dtype)

    def more_states(self, tier: Tier, needs: Sequence[Need]) -> Iterator[torch.Tensor | DiskTensor]:
        """Allocate optimizer states that the plan has not counted, all zero, in the order of `needs`."""
        if tier is not Tier.NVME:
            return (self.more_host(*need).zero_() for need in needs)
        reserved = self._reserve(needs, self.options.optimizer.nvme_path, self._rank)
        self._swaps[-1].open()
        return (reserved[need].pop(0) for need in needs)

    def buffers(self, num: int, num_bytes: int) -> StagingBuffers:
        """Allocate staging buffers in host memory."""
        return self.worker.submit(StagingBuffers, num, num_bytes, pinned=self.pinned).result()

    def param_shard(self, tier: Tier, numel: int, dtype: torch.dtype) -> ParamShard:
        """Allocate a parameter shard in a tier."""
        if tier is Tier.DEVICE:
            return DeviceShard(torch.empty(numel, dtype=dtype, device=self.bus.device), self.bus)
        if tier is Tier.HOST:
            return HostShard(self.host(numel, dtype), self.bus)
        if self._parameter_buffers is None:
            options = self.options.param
            size = min(options.buffer_size * 2 // PAGE * PAGE or PAGE, self._longest_parameter)
            self._parameter_buffers = self.buffers(options.buffer_count, size)
        return DiskShard(self._parameters[numel, dtype].pop(0), self._parameter_buffers, self.bus)

    def state(self, tier: Tier, numel: int, dtype: torch.dtype) -> torch.Tensor | DiskTensor:
        """Return zeroed storage for an offloaded master or optimizer state, or for a part of one."""
        return self._states[numel, dtype].pop(0) if tier is Tier.NVME else self.host(numel, dtype)

    def forget_prefetched(self) -> None:
        """Discard prefetched parameter shards, because the shards are about to change."""
        for holder in list(self._parameter_buffers.holders) if self._parameter_buffers is not None else ():
            holder.forget_prefetched()

    def drain(self) -> None:
        """Wait until both threads are idle. The wait has a timeout, because the caller may be one of these threads."""
        wait([thread.submit(int) for thread in (self.worker, self.stream_worker)], _DRAIN_SECONDS)

    def close(self) -> None:
        """Finish all jobs and copies, then remove files and release the host memory."""
        self.worker.shutdown()
        self.stream_worker.shutdown()
        try:
            self.bus.drain()
        except RuntimeError as error:  # a device that has failed
            logger.warning("the device-to-host copies did not finish: %s", error)
        self._arena = Arena(0, pinned=False)
        for swap in self._swaps:
            swap.close()
