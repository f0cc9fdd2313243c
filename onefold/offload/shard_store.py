"""The state of this rank's shard of one flat parameter: parameter shard, master weight, optimizer states, gradient.

[Note: what a store holds]
* `param`: the parameter shard, which is the source of the all-gather. None for a flat parameter that stays unsharded.
* `model_weight`: of a flat parameter that stays unsharded, this rank's range of it, if the master is another tensor.
* `master`: the fp32 weight that the optimizer updates, and its `states`.
* `grad`: the reduced gradient.
* `second`: the master and states that a speculative step writes ([Note: speculative steps]). None without one.

Nothing else is stored twice. The master is the parameter shard itself where that is possible
(`FlatParamSpec.master_is_shard`), or this rank's range of an unsharded fp32 flat parameter. The bf16 part of a split
master in the same tier is the model weight (`FlatParamSpec.weight_is_part_of_master`). Otherwise the master is a
separate tensor, and a step copies it into the model weight (`sync_model_weight_from_master`).

Each buffer is stored in the tier that the plan's `Residency` names. Offloaded shards are stepped by other threads;
`finish_step` waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from onefold.allocator import zeros_apart
from onefold.offload.buffer import Buffer
from onefold.offload.bus import COMPLETE, CopyEvent
from onefold.offload.disk_shard import DiskShard
from onefold.offload.grad_shard import DeviceGrad, GradShard, HostGrad
from onefold.offload.host_shard import HostShard
from onefold.offload.nvme import DiskTensor
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import DeviceShard, LastUse, ParamShard, Publisher, ToDevice
from onefold.offload.state_codec import Dither
from onefold.offload.write_check import WriteCheck, fingerprint
from onefold.plan import FlatParamSpec, Plan, Tier
from onefold.plan.buffers import MASTER, PARAMETER, SECOND, BufferSpec, master_dtype
from onefold.plan.layout import PARAMETER_ALIGNMENT, Segment, round_up
from onefold.plan.traffic import is_streamed

# Elements of a master that are compared with the model weight at once.
_COMPARED = 1 << 22


@dataclass(frozen=True)
class StepState:
    """The master and the states of a shard: what a step reads and writes."""

    master: Buffer
    states: dict[str, Buffer]


class ShardStore:
    """The buffers of this rank's shard of one flat parameter. See [Note: what a store holds]."""

    def __init__(
        self, spec: FlatParamSpec, plan: Plan, rank: int, device: torch.device, memory: OffloadMemory | None
    ) -> None:
        self.spec = spec
        # The name of the unit.
        self.unit_name = ""
        self.device = device
        self.param: ParamShard | None = None
        self.grad: GradShard | None = None
        self.states: dict[str, Buffer] = {}
        self.second: StepState | None = None
        # Whether user code may hold, read and write the tensors of the master or the states.
        self.is_exposed = False
        # Indices of parameters that the user has frozen since initialize. A step does not change them.
        self.frozen: set[int] = set()
        # The same when the last step was started: an offloaded step may still run when `frozen` changes.
        self.frozen_in_step: frozenset[int] = frozenset()
        # The range of the flat parameter that this rank steps.
        self.start, self.stop = spec.layout.shard_range(rank) if plan.shards_states else (0, spec.layout.total)
        self._plan, self._memory, self._rank = plan, memory, rank
        # Completes when the last host-to-device copy has read the master, which may then be overwritten.
        self._master_free: CopyEvent = COMPLETE
        self._master: Buffer | None = None
        # The model weight of an unsharded flat parameter, if it is a separate tensor.
        self.model_weight: torch.Tensor | None = None
        self._step_task: Future[CopyEvent] | None = None
        # The fingerprint of the model weight after the last step, if it cannot be compared with the master.
        self._fingerprint: torch.Tensor | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether master, states and gradient are in host memory or on NVMe."""
        return self.spec.residency.offloads_states

    @property
    def state_tier(self) -> Tier:
        """The tier of the master and the states."""
        return self.spec.residency.states

    # -- the parameter shard ------------------------------------------------------------------------------------

    def write_back(self, values: torch.Tensor) -> None:
        """Store this rank's range of the unsharded parameters as the parameter shard."""
        if self.param is None:
            (shard,) = self._planned(PARAMETER)
            if self._memory is not None:
                self.param = self._memory.param_shard(shard.tier, shard.numel, shard.dtype)
                self.set_cache(self.spec)
            else:
                self.param = DeviceShard(zeros_apart(shard.numel, shard.dtype, self.device))
        self.param.write(values)

    def prefetch(self) -> bool:
        """Read the parameter shard ahead of its all-gather. Return False if it must be tried again later."""
        assert self.param is not None
        if self.param.tier is not Tier.NVME:
            return True
        return (self._step_task is None or self._step_task.done()) and self.param.prefetch()

    # -- the step -----------------------------------------------------------------------------------------------

    @property
    def master(self) -> Buffer:
        """The weight that the optimizer updates."""
        assert self._master is not None, "only trained shards have a master"
        return self._master

    @property
    def separate_model_weight(self) -> Buffer | None:
        """The model weight, or the parameter shard it is gathered from, if the master is a different tensor."""
        if self.param is None:
            return Buffer.of(self.model_weight) if self.model_weight is not None else None
        is_master = self._master is not None and self.param.values is self._master.parts[0]
        return None if self.spec.weight_is_part_of_master or is_master else self.param.buffer

    def make_master(self, unsharded: torch.Tensor) -> None:
        """Create the master weight. `unsharded` is the flat parameter, for one that stays unsharded."""
        used = self.param.values if self.param is not None else unsharded[self.start : self.stop]
        parts = [used if part.alias_of is not None else self._allocate(part) for part in self._planned(MASTER)]
        self._master = Buffer(parts, self.stop - self.start, self.spec.state_spec.master)
        if parts[0] is not used:
            self._master.store(Buffer.of(used).fetch())
            if self.param is None:
                assert isinstance(used, torch.Tensor)
                self.model_weight = used
        self.take_fingerprint()

    def make_states(self) -> None:
        """Allocate the optimizer states, all zero."""
        spec, numel = self.spec.state_spec, self.stop - self.start
        self.states = {
            name: Buffer([self._allocate(part) for part in self._planned(name)], numel, spec.format_of(name))
            for name in spec.names
        }
        if self.spec.has_second_state:
            second = self.master.like(iter([self._allocate(part) for part in self._planned(SECOND + MASTER)]))
            states = {
                name: state.like(iter([self._allocate(part) for part in self._planned(SECOND + name)]))
                for name, state in self.states.items()
            }
            self.second = StepState(second, states)

    def add_state(self, name: str, room: Buffer | None) -> None:
        """Add a state that the plan did not count, all zero, in the dtype of the master.

        `room` is its offloaded buffer, or None to allocate it on the device.
        """
        spec, numel = self.spec.state_spec, self.stop - self.start
        formats = (*spec.formats, None) if spec.formats else ()
        # A second master without a second tensor of the new state is of no use.
        self.spec, self.second = replace(self.spec, has_second_state=False), None
        self.spec = replace(self.spec, state_spec=replace(spec, names=(*spec.names, name), formats=formats))
        if room is None:
            room = Buffer.of(zeros_apart(numel, master_dtype(self.spec.dtype), self.device))
        self.states[name] = room

    def _planned(self, name: str) -> list[BufferSpec]:
        """Return the planned buffer of this name: one spec for each of its parts."""
        return [buffer for buffer in self.spec.buffers(self._plan) if buffer.name == name]

    def _allocate(self, part: BufferSpec) -> torch.Tensor | DiskTensor:
        """Allocate a part of a master or state, all zero."""
        if part.tier is Tier.DEVICE:
            return zeros_apart(part.numel, part.dtype, self.device)
        assert self._memory is not None
        return self._memory.state(part.tier, part.numel, part.dtype)

    def make_grad(self, dtype: torch.dtype, *, in_place: bool) -> GradShard:
        """Allocate the reduced gradient in the tier in which the step reads it."""
        layout, delays = self.spec.used_layout, self._plan.delays_host
        size = layout.shard_size
        if not self.is_offloaded:
            self.grad = DeviceGrad(size, dtype, self._rank % layout.num_shards, in_place=in_place)
        else:
            assert self._memory is not None
            self.grad = HostGrad(
                size,
                dtype,
                self._memory,
                alone=layout.num_shards == 1,
                delays=delays,
                steps_on_device=self._memory.bus.crosses and is_streamed(self._plan, self.spec),
            )
            self.grad.set_cached(on=self.spec.caches_gradient)
        return self.grad

    def set_cache(self, spec: FlatParamSpec) -> None:
        """Store the copies on the device that a new spec plans, and free the others. Called between two steps."""
        before = self.spec.caches_gradient, self.spec.caches_parameter
        if (spec.caches_gradient, spec.caches_parameter) != before:
            self.finish_step()  # another thread may be reading and writing the copies
        self.spec = spec
        if isinstance(self.grad, HostGrad):
            self.grad.set_cached(on=spec.caches_gradient)
        if isinstance(self.param, HostShard):
            self.param.set_cached(on=spec.caches_parameter)

    def wait_until_master_is_free(self) -> None:
        """Block until no host-to-device copy reads the master. Nothing may have waited for the last one yet."""
        self._master_free.synchronize()
        if self.param is not None and not self._plan.delays_host:  # with a delay no gather starts from the master
            self.param.wait()

    def set_master_free_event(self, event: CopyEvent) -> CopyEvent:
        """Store and return the event after which the master may be overwritten."""
        self._master_free = event
        return event

    def publisher(self, gradient: torch.Tensor, last_use: LastUse) -> Publisher:
        """Return what publishes an offloaded step to the model weight. It may overwrite the gradient."""
        size = self.stop - self.start
        if self.separate_model_weight is None:
            return Publisher()
        if self.param is not None:
            ends = [0, *(end for s in self.stepped_segments(0, size) for end in (s.start, s.stop)), size]
            unstepped = [(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low < high]
            if isinstance(self.param, DiskShard):  # it keeps the new values in the gradient's memory
                assert isinstance(self.grad, HostGrad)
                self.grad.on_overwrite = self.param.forget_memory
            return self.param.publisher(self.master, gradient, last_use, unstepped)
        assert self.model_weight is not None
        assert self._memory is not None
        return ToDevice(self.model_weight, self._memory.bus, last_use)

    def start_step(self, step: Future[CopyEvent]) -> None:
        """Set the task that steps this shard. `finish_step` waits for it."""
        assert self._step_task is None
        assert isinstance(self.grad, HostGrad)
        self._step_task = step
        self.grad.read_by(step)

    @property
    def is_stepping(self) -> bool:
        """Whether an offloaded step has been started and not finished."""
        return self._step_task is not None

    def finish_step(self) -> None:
        """Wait for the offloaded step, and make the caller's stream wait for the new model weight."""
        if self._step_task is not None:
            arrival = self._step_task.result()
            self.abandon_step()
            arrival.wait_on_stream()
            self.take_fingerprint()

    def abandon_step(self) -> None:
        """Stop waiting for the offloaded step."""
        self._step_task = None
        if isinstance(self.grad, HostGrad):
            self.grad.read_by(None)

    def sync_model_weight_from_master(self) -> CopyEvent:
        """Copy the master weight into the model weight on the caller's stream.

        The returned event completes when the master may be overwritten.
        """
        if self.param is not None:
            self.param.forget_prefetched()  # the master itself may be what was read ahead
        copy = self.separate_model_weight
        if copy is None:
            return COMPLETE
        weights = Buffer.of(self.master.parts[0]).fetch()
        if self.is_offloaded and (self.param is None or self.param.tier is Tier.DEVICE):
            assert self._memory is not None
            arrival = self._memory.bus.up(weights, copy.tensor)
            arrival.wait_on_stream()
            self.take_fingerprint()
            return arrival
        if self.param is not None:
            self.param.write(weights)
        else:
            copy.store(weights)
        self.take_fingerprint()
        return COMPLETE

    def sync_master_from_model_weight(self) -> None:
        """Copy the model weight, which the program has written, into the master weight."""
        copy = self.separate_model_weight
        if self.spec.weight_is_part_of_master:
            for rest in self.master.parts[1:]:
                Buffer.of(rest).store(torch.zeros(rest.numel(), dtype=rest.dtype))
        elif copy is not None:
            if self.param is not None:
                self.param.refresh()
            self.master.store(copy.fetch().to(self.master.dtype))
            self.take_fingerprint()

    # -- writes to unsharded parameters from outside ------------------------------------------------------------

    @property
    def compared_model_weight(self) -> torch.Tensor | None:
        """The model weight, if a step finds in-place writes to it by comparing it with the master tile by tile.

        None where master and model weight are on different devices, and with a delayed step, during which the model
        weight is older than its master: a fingerprint shows writes there.
        """
        apart = self.is_offloaded and (self.device.type != "cpu" or self._plan.delays_host)
        return None if apart else self._watched_weight

    @property
    def _watched_weight(self) -> torch.Tensor | None:
        return self.model_weight if self._plan.honours_writes else None

    def take_fingerprint(self) -> None:
        """Record the model weight right after a sync, if it cannot be compared with the master later."""
        if self._watched_weight is not None and self.compared_model_weight is None:
            self._fingerprint = fingerprint(self._watched_weight)

    @staticmethod
    def written(stores: Sequence[ShardStore]) -> list[ShardStore]:
        """Return the stores whose model weight was written in place since the last step, by its fingerprint."""
        watched = [store for store in stores if store._fingerprint is not None]
        if not watched:
            return []
        before = torch.stack([store._fingerprint for store in watched if store._fingerprint is not None])
        now = torch.stack(
            [fingerprint(store._watched_weight) for store in watched if store._watched_weight is not None]
        )
        return [store for store, is_changed in zip(watched, now.ne(before).tolist(), strict=True) if is_changed]

    def take_over_writes(self) -> None:
        """Copy in-place writes to the model weight into the master weight ([Note: a write that no counter shows]).

        Nothing is compared while a host step or `offload_states` keeps either of them elsewhere.
        """
        weight = self._watched_weight
        if weight is None or self._step_task is not None:
            return
        held = [weight, *self.master.tensors]
        if not all(tensor.untyped_storage().size() for tensor in held if tensor.numel()):
            return
        if self.compared_model_weight is None and not self.written([self]):
            return
        if self.is_offloaded:
            self.wait_until_master_is_free()
        master, check, is_changed = self.master.fetch(), WriteCheck(), False
        for low in range(0, master.numel(), _COMPARED):
            inside = slice(low, low + _COMPARED)
            is_changed |= check.take_over(master[inside], weight[inside].to(master.device))
        if is_changed and not self.master.is_plain_tensor:
            self.master.store(master)
        self.take_fingerprint()

    # -- ranges -------------------------------------------------------------------------------------------------

    def segments(self, first: int = 0, last: int | None = None) -> list[Segment]:
        """Split [first, last) by optimizer group. Positions are relative to the range that this rank steps."""
        stop = self.stop if last is None else self.start + last
        found = self.spec.layout.segments(self.start + first, stop)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def use_second(self) -> None:
        """Exchange the master and the states with the second ones, which a speculative step has written."""
        assert self.second is not None
        first = StepState(self.master, self.states)
        self._master, self.states, self.second = self.second.master, self.second.states, first

    def begin_step(self) -> None:
        """Record which parameters are frozen when the step starts."""
        self.frozen_in_step = frozenset(self.frozen)

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        """Like `segments`, without the parameters that were frozen when the step started."""
        segments = self.segments(first, last)
        for index in sorted(self.frozen_in_step):
            member = self.spec.layout.members[index]
            low, high = member.start - self.start, round_up(member.stop, PARAMETER_ALIGNMENT) - self.start
            segments = [
                Segment(segment.group, start, stop)
                for segment in segments
                for start, stop in ((segment.start, min(segment.stop, low)), (max(segment.start, high), segment.stop))
                if start < stop
            ]
        return segments

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        """Split a range as it is rounded: by parameter for stochastic rounding, else in one piece."""
        spec = self.spec.state_spec
        if not any(each is not None and each.is_dithered for each in (spec.master, *spec.formats)):
            return [(first, last, None)]
        ranges: list[tuple[int, int, Dither | None]] = []
        for member in self.spec.layout.members:
            start, stop = member.start - self.start, round_up(member.stop, PARAMETER_ALIGNMENT) - self.start
            low, high = max(first, start), min(last, stop)
            if low < high:
                ranges.append((low, high, Dither(step, member.name, low - start)))
        return ranges

    # -- bytes, and the end -------------------------------------------------------------------------------------

    def param_bytes(self, tier: Tier) -> int:
        """Return the bytes of the parameter shard in a tier, unless it is the master."""
        cached = self.param.cached if isinstance(self.param, HostShard) else None
        if tier is Tier.DEVICE and cached is not None:
            return cached.nbytes
        if self.param is None or self.param.tier is not tier or self.spec.master_is_shard:
            return 0
        return self.param.values.nbytes

    def master_bytes(self, tier: Tier) -> int:
        """Return the bytes of the master in a tier, without what the flat parameter or the shard stores."""
        if self.state_tier is not tier:
            return 0
        second = self.second.master.nbytes if self.second is not None else 0
        return second + sum(part.nbytes for part in self.own_master())

    def own_master(self) -> list[torch.Tensor | DiskTensor]:
        """Return the parts of the master that neither the flat parameter nor the parameter shard stores."""
        if self.spec.weight_is_part_of_master:
            return list(self.master.parts[1:])
        is_slice = self.param is None and self.model_weight is None
        return [] if is_slice else list(self.master.parts)

    def state_bytes(self) -> int:
        """Return the bytes of all optimizer states."""
        second = self.second.states if self.second is not None else {}
        return sum(state.nbytes for state in (*self.states.values(), *second.values()))

    def device_params(self) -> list[torch.Tensor]:
        """Return the model weight or parameter shard on the device, unless it is the master, or the cached copy."""
        if isinstance(self.param, HostShard):
            return [self.param.cached] if self.param.cached is not None else []
        copy, on_device = self.separate_model_weight, self.param is None or self.param.tier is Tier.DEVICE
        if self.spec.weight_is_part_of_master and self.param is not None:
            copy = self.param.buffer
        return copy.tensors if copy is not None and on_device else []

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of a frozen shard. An unsharded flat parameter casts itself."""
        self.spec = replace(self.spec, dtype=dtype)
        if self.param is not None:
            self.param = DeviceShard(self.param.buffer.fetch().to(dtype))

    def forget_training(self) -> None:
        """Free everything but the parameter shard, because the engine is destroyed."""
        self.grad = self._master = self.model_weight = self._fingerprint = None
        self.states, self.second = {}, None
        if self.param is not None:
            self.param = self.param.in_own_memory()
