"""The tiers below the device, as one engine has them: host memory, files, the bus, and the thread that works there."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from onefold.offload.bus import Arrival, Bus
from onefold.offload.host_memory import PAGE, Arena, page_aligned
from onefold.offload.nvme import DiskTensor, SwapFiles
from onefold.offload.param_shard import Buffers, DeviceShard, DiskShard, Flat, HostShard, ParamShard
from onefold.plan import Tier
from onefold.pool import Pool


@dataclass(frozen=True)
class DiskOptions:
    """How what rests on disk passes through host memory."""

    num_buffers: int
    buffer_size: int
    reads_ahead: bool = True
    writes_behind: bool = True


@dataclass(frozen=True)
class Needs:
    """What the tiers below the device have to hold, by arithmetic: bytes, and tensors as (elements, dtype)."""

    host_bytes: int = 0
    states_on_disk: Sequence[tuple[int, torch.dtype]] = ()
    parameters_on_disk: Sequence[tuple[int, torch.dtype]] = ()


class OffloadMemory:
    """What an engine's runs and its optimizer take from below the device."""

    def __init__(
        self,
        needs: Needs,
        bus: Bus,
        *,
        pinned: bool,
        states: DiskOptions,
        parameters: DiskOptions,
        swap_states: SwapFiles | None,
        swap_parameters: SwapFiles | None,
    ) -> None:
        self.bus = bus
        self.pinned = pinned and bus.crosses
        self.disk_options = states
        self._parameter_options = parameters
        # One thread, so that what is asked of the host is done in that order. It makes the memory it will work on.
        self.worker = ThreadPoolExecutor(1, "onefold-host", initializer=_use, initargs=(bus.device,))
        self._leave_cores()
        self.gradients = GradOffload(bus, self.worker, pinned=self.pinned)
        self._arena = self.worker.submit(Arena, needs.host_bytes, pinned=self.pinned).result()
        self._swaps = [swap for swap in (swap_states, swap_parameters) if swap is not None]
        self._states = _Reserved(swap_states, needs.states_on_disk)
        self._parameters = _Reserved(swap_parameters, needs.parameters_on_disk)
        for swap in self._swaps:
            swap.open()
        self._parameter_buffers: Buffers | None = None
        self._longest_parameter = max((numel * dtype.itemsize for numel, dtype in needs.parameters_on_disk), default=0)

    def _leave_cores(self) -> None:
        """Every operation of the host waits for its slowest thread: two cores are left to the trainer and its device,
        which would take them anyway.
        """
        num = torch.get_num_threads()
        if self.bus.crosses and num >= 8:
            self.worker.submit(torch.set_num_threads, num - 2).result()
            torch.set_num_threads(num)  # threads that are new take the last number that anybody set

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the plan has counted; zero."""
        return self._arena.take(numel, dtype)

    def more_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that nobody could plan for."""
        return self.worker.submit(page_aligned, numel * dtype.itemsize, pinned=self.pinned).result().view(dtype)

    def buffers(self, num: int, num_bytes: int) -> Buffers:
        return self.worker.submit(Buffers, num, num_bytes, pinned=self.pinned).result()

    def param_shard(self, tier: Tier, numel: int, dtype: torch.dtype) -> ParamShard:
        """Room for a parameter shard in one of the tiers."""
        if tier is Tier.DEVICE:
            return DeviceShard(torch.empty(numel, dtype=dtype, device=self.bus.device), self.bus)
        if tier is Tier.HOST:
            return HostShard(self.host(numel, dtype), self.bus)
        return DiskShard(self._parameters.take(numel, dtype), self._buffers_of_parameters(), self.bus)

    def state(self, tier: Tier, numel: int, dtype: torch.dtype) -> Flat:
        """Room for a master or an optimizer state below the device, all zero."""
        return self._states.take(numel, dtype) if tier is Tier.NVME else self.host(numel, dtype)

    def _buffers_of_parameters(self) -> Buffers:
        if self._parameter_buffers is None:
            options = self._parameter_options
            size = min(options.buffer_size * 2 // PAGE * PAGE or PAGE, self._longest_parameter)
            self._parameter_buffers = self.buffers(options.num_buffers, size)
        return self._parameter_buffers

    def forget_prefetched(self) -> None:
        """Shards are about to change: what was read ahead is old."""
        for holder in list(self._parameter_buffers.holders) if self._parameter_buffers is not None else ():
            holder.forget_prefetched()

    def close(self) -> None:
        """What was asked of the host is done; files are removed, and what still holds a shard holds no more than it."""
        self.worker.shutdown()
        self._arena = Arena(0, pinned=False)
        for swap in self._swaps:
            swap.close()


def _use(device: torch.device) -> None:
    """A new thread begins with the first GPU, whichever its process uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Reserved:
    """Tensors on disk that were reserved before the files were made."""

    def __init__(self, swap: SwapFiles | None, needs: Sequence[tuple[int, torch.dtype]]) -> None:
        self._free: dict[tuple[int, torch.dtype], list[DiskTensor]] = {}
        for need in needs:
            assert swap is not None
            self._free.setdefault(need, []).append(swap.reserve(*need))

    def take(self, numel: int, dtype: torch.dtype) -> DiskTensor:
        return self._free[numel, dtype].pop(0)


# Copies down that may be under way before the oldest holds the compute up.
COPIES_IN_FLIGHT = 3


class GradOffload:
    """Copies of reduced gradients to host memory, in the order in which they are reduced.

    [Note: gradient offload]
    Where the host steps, a reduced gradient leaves the device as soon as it is reduced, in the narrowest dtype that
    holds it. The first one of an accumulation window is copied straight to where it waits for the step; the host adds
    the others to it, so that no accumulator fills the device. The device's buffer is given back once the compute
    stream is ordered behind the copy: a few units later, when that costs no waiting.
    """

    def __init__(self, bus: Bus, worker: ThreadPoolExecutor, *, pinned: bool) -> None:
        self._bus, self._worker, self._pinned = bus, worker, pinned
        self._largest = 0
        self._landings: Buffers | None = None
        self._under_way: deque[tuple[Arrival, torch.Tensor, torch.Tensor, Pool, Hashable]] = deque()

    def expect(self, num_bytes: int) -> None:
        """A gradient of this size will come."""
        self._largest = max(self._largest, num_bytes)

    @torch.no_grad()
    def start(
        self, total: torch.Tensor, target: torch.Tensor, slot: torch.Tensor, pool: Pool, key: Hashable, *, add: bool
    ) -> Arrival | Future[None]:
        """What to wait for until `target` has it."""
        bus = self._bus
        arriving: Arrival | Future[None]
        if not add and total.dtype == target.dtype:
            arriving = arrival = bus.down(total, target)
        elif bus.crosses:
            landings = self._landings or self._make_landings()
            buffer = landings.take()
            landed = buffer[: total.nbytes].view(total.dtype)
            arrival = bus.down(total, landed)
            arriving = self._worker.submit(_take_over, arrival, landings, buffer, landed, target, add)
        else:
            arriving = arrival = bus.down(total, target, add=add)
        self._under_way.append((arrival, total, slot, pool, key))
        while len(self._under_way) > (COPIES_IN_FLIGHT if bus.crosses else 0):
            self._give_back()
        return arriving

    def finish(self) -> None:
        """The device's buffers are free again, as the compute stream sees it."""
        while self._under_way:
            self._give_back()

    def _give_back(self) -> None:
        arrival, total, slot, pool, key = self._under_way.popleft()
        arrival.order()
        pool.give_back(slot, key)
        if total is not slot:
            pool.give_back(total)

    def _make_landings(self) -> Buffers:
        self._landings = self._worker.submit(Buffers, 2, self._largest, pinned=self._pinned).result()
        return self._landings


def _take_over(
    arrival: Arrival,
    landings: Buffers,
    buffer: torch.Tensor,
    landed: torch.Tensor,
    target: torch.Tensor,
    add: bool,
) -> None:
    """On the host's thread: what has come down joins what waits there."""
    try:
        arrival.wait()
        if add:
            target.add_(landed)
        else:
            target.copy_(landed)
    finally:  # a unit that comes later waits for it
        landings.give_back(buffer)
