"""This rank's shard of a flat parameter between uses, in all its forms. The runtime and the optimizer ask it, and
nobody else tests in which tier something rests.

[Note: what a store holds]
* `param`: the parameter shard that a gather starts from; None for a flat parameter that stays unsharded.
* `master`: the fp32 values that the optimizer updates, and `states` beside it. The master is the parameter shard itself
  where that can be (`FlatParamSpec.master_is_shard`), and this rank's slice of the flat parameter where that stays
  unsharded and computes in fp32: nothing is held twice. Otherwise it is a tensor of its own, and a step tells what
  computes of the new values (`push`); what was written from outside is taken over the other way (`pull`). A master in
  another form ([Note: forms of states]) has the weight as its first part: in the same tier it is what computes itself.
* `grad`: the reduced gradient.

Each rests in the tier that the plan's `Residency` says. What rests below the device is stepped on threads of their own,
by the host or by the device: `finish_step` waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from onefold.allocator import zeros_apart
from onefold.offload.buffer import Buffer
from onefold.offload.bus import HERE, Arrival
from onefold.offload.fingerprint import fingerprint
from onefold.offload.grad_shard import DeviceGrad, GradShard, HostGrad
from onefold.offload.nvme import DiskTensor
from onefold.offload.offload_memory import OffloadMemory
from onefold.offload.param_shard import DeviceShard, ParamShard
from onefold.offload.publish import LastUse, Publisher, ToDevice
from onefold.offload.state_codec import Dither
from onefold.offload.write_check import WriteCheck
from onefold.plan import FlatParamSpec, Plan, Tier
from onefold.plan.forms import Form, FormPart
from onefold.plan.layout import PARAMETER_ALIGNMENT, Segment, round_up
from onefold.plan.memory import master_dtype

# Elements of a master that are compared with the model weight at once.
_COMPARED = 1 << 22


def _widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return zeros_apart(values.numel(), dtype, values.device).copy_(values)


class ShardStore:
    """Where this rank's shard of one flat parameter lives."""

    def __init__(
        self, spec: FlatParamSpec, plan: Plan, rank: int, device: torch.device, memory: OffloadMemory | None
    ) -> None:
        self.spec = spec
        # The unit's name.
        self.unit = ""
        self.device = device
        self.param: ParamShard | None = None
        self.grad: GradShard | None = None
        self.states: dict[str, Buffer] = {}
        # Trained parameters that the user has frozen since, by their place: the step leaves them out,
        self.frozen: set[int] = set()
        # and so they were when it was asked for: the host may still be at it when they change.
        self._frozen_in_step: frozenset[int] = frozenset()
        # What this rank steps.
        self.start, self.stop = spec.layout.shard_range(rank) if plan.shards_states else (0, spec.layout.total)
        self._plan, self._memory, self._rank = plan, memory, rank
        # The last copy up that reads the master.
        self._sent: Arrival = HERE
        self._master: Buffer | None = None
        # Of a flat parameter that stays unsharded: what computes, beside a master of its own.
        self.computes: torch.Tensor | None = None
        self._step: Future[Arrival] | None = None
        # Of what computes, as the last step left it, where that cannot be compared with the master.
        self._fingerprint: torch.Tensor | None = None

    @property
    def steps_on_host(self) -> bool:
        """Whether master, states and gradient rest below the device, so that the host steps them."""
        return self.spec.residency.offloads_states

    @property
    def state_tier(self) -> Tier:
        return self.spec.residency.states

    # -- the parameter shard ------------------------------------------------------------------------------------

    def write_back(self, values: torch.Tensor) -> None:
        """This rank's slice of the unsharded parameters becomes the shard."""
        if self.param is None:
            spec = self.spec
            tier, size = spec.residency.parameters, spec.layout.shard_size
            dtype = master_dtype(spec.dtype) if tier is Tier.DEVICE and spec.master_is_shard else spec.dtype
            if self._memory is not None:
                self.param = self._memory.param_shard(tier, size, dtype)
            else:
                self.param = DeviceShard(zeros_apart(size, dtype, self.device))
        self.param.write(values)

    def prefetch(self) -> bool:
        """A gather comes soon. False where its shard cannot be read ahead yet."""
        assert self.param is not None
        if self.param.tier is not Tier.NVME:
            return True
        return (self._step is None or self._step.done()) and self.param.prefetch()

    # -- the step -----------------------------------------------------------------------------------------------

    @property
    def master(self) -> Buffer:
        assert self._master is not None, "only what an optimizer steps has a master"
        return self._master

    @property
    def param_copy(self) -> Buffer | None:
        """What computes, or is gathered, where that is another tensor than the master."""
        if self.param is None:
            return Buffer.of(self.computes) if self.computes is not None else None
        is_master = self._master is not None and self.param.values is self._master.parts[0]
        return None if self.spec.weight_is_master or is_master else self.param.buffer

    def make_master(self, unsharded: torch.Tensor) -> None:
        """An optimizer will step this shard. `unsharded`: the flat parameter, where it stays unsharded."""
        used = self.param.values if self.param is not None else unsharded[self.start : self.stop]
        wide, form, size = master_dtype(self.spec.dtype), self.spec.kept.master, self.stop - self.start
        if form is not None:
            parts = [self._room(part) for part in self.spec.parts_of_master()]
            self._master = Buffer([used, *parts] if self.spec.weight_is_master else parts, size, form)
            if not self.spec.weight_is_master:
                self._master.store(Buffer.of(used).fetch())
        elif self.steps_on_host and not self.spec.master_is_shard:
            self._master = Buffer.of(self._room(FormPart(wide)))
            self._master.store(Buffer.of(used).fetch().to(wide))
        else:
            self._master = Buffer.of(used if used.dtype == wide else _widened(Buffer.of(used).fetch(), wide))
        if self.param is None and self._master.parts[0] is not used:
            assert isinstance(used, torch.Tensor)
            self.computes = used
        self.take_fingerprint()

    def make_states(self) -> None:
        """Room for the states that a rule keeps beside the master, all zero."""
        kept = self.spec.kept
        self.states = {name: self._state(kept.form_of(name)) for name in kept.names}

    def add_state(self, name: str, room: Buffer | None) -> None:
        """Take a state that the plan did not count, all zero, in the dtype of the master. `room` is where it rests,
        None where that is the device.
        """
        kept, numel = self.spec.kept, self.stop - self.start
        forms = (*kept.forms, None) if kept.forms else ()
        self.spec = replace(self.spec, kept=replace(kept, names=(*kept.names, name), forms=forms))
        if room is None:
            room = Buffer.of(zeros_apart(numel, master_dtype(self.spec.dtype), self.device))
        self.states[name] = room

    def _state(self, form: Form | None) -> Buffer:
        parts = (FormPart(master_dtype(self.spec.dtype)),) if form is None else form.parts
        return Buffer([self._room(part) for part in parts], self.stop - self.start, form)

    def _room(self, part: FormPart) -> torch.Tensor | DiskTensor:
        """Where masters and states rest, all zero."""
        numel = part.numel(self.stop - self.start)
        if not self.steps_on_host:
            return zeros_apart(numel, part.dtype, self.device)
        assert self._memory is not None
        return self._memory.state(self.state_tier, numel, part.dtype)

    def make_grad(self, dtype: torch.dtype, *, in_place: bool) -> GradShard:
        """Where reduced gradients go, in the tier where they are stepped with."""
        size, delays = self.spec.layout.shard_size, self._plan.delays_host
        if not self.steps_on_host:
            self.grad = DeviceGrad(size, dtype, self._rank, in_place=in_place)
        else:
            assert self._memory is not None
            alone = self.spec.layout.num_shards == 1
            self.grad = HostGrad(size, dtype, self.spec.dtype, self._memory, alone=alone, delays=delays)
        return self.grad

    def wait_for_master(self) -> None:
        """Until no copy up reads the master any more: a unit that nothing has used since may still be on its way."""
        self._sent.wait()
        if self.param is not None and not self._plan.delays_host:  # with a delay no gather starts from the master
            self.param.wait()

    def set_last_read(self, event: Arrival) -> Arrival:
        """Store and return the event after which the master may be overwritten."""
        self._sent = event
        return event

    def publisher(self, gradient: torch.Tensor, last_use: LastUse) -> Publisher:
        """Return what publishes an offloaded step to the model weight. It may overwrite the gradient."""
        size = self.stop - self.start
        if self.param_copy is None:
            return Publisher()
        if self.param is not None:
            ends = [0, *(end for s in self.stepped_segments(0, size) for end in (s.start, s.stop)), size]
            unstepped = [(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low < high]
            return self.param.publisher(self.master, gradient, last_use, unstepped)
        assert self.computes is not None
        assert self._memory is not None
        return ToDevice(self.computes, self._memory.bus, last_use)

    def start_step(self, step: Future[Arrival]) -> None:
        """The host steps this shard: whoever needs it waits for that."""
        assert self._step is None
        assert isinstance(self.grad, HostGrad)
        self._step = step
        self.grad.read_by(step)

    @property
    def is_stepping(self) -> bool:
        return self._step is not None

    def finish_step(self) -> None:
        """The host has stepped this shard, and what it sends up has arrived, as the caller's stream sees it."""
        if self._step is not None:
            arrival = self._step.result()
            self.give_up_step()
            arrival.order()
            self.take_fingerprint()

    def give_up_step(self) -> None:
        """Nothing that is still to come from a step is waited for any more."""
        self._step = None
        if isinstance(self.grad, HostGrad):
            self.grad.read_by(None)

    def push(self) -> Arrival:
        """What computes becomes what the master is, for the caller's stream; the master is read until the arrival."""
        if self.param is not None:
            self.param.forget_prefetched()  # also where the master itself is what was read ahead
        copy = self.param_copy
        if copy is None:
            return HERE
        weights = Buffer.of(self.master.parts[0]).fetch()
        if self.steps_on_host and (self.param is None or self.param.tier is Tier.DEVICE):
            assert self._memory is not None
            arrival = self._memory.bus.up(weights, copy.tensor)
            arrival.order()
            self.take_fingerprint()
            return arrival
        if self.param is not None:
            self.param.write(weights)
        else:
            copy.store(weights)
        self.take_fingerprint()
        return HERE

    def pull(self) -> None:
        """What computes was written from outside: the master becomes it."""
        copy = self.param_copy
        if self.spec.weight_is_master:
            for rest in self.master.parts[1:]:
                Buffer.of(rest).store(torch.zeros(rest.numel(), dtype=rest.dtype))
        elif copy is not None:
            if self.param is not None:
                self.param.refresh()
            self.master.store(copy.fetch().to(self.master.dtype))
            self.take_fingerprint()

    # -- writes to unsharded parameters from outside ------------------------------------------------------------

    @property
    def comparable(self) -> torch.Tensor | None:
        """The model weight, if a step finds in-place writes to it by comparing it with the master tile by tile.

        None where master and model weight are on different devices, and with a delayed step, during which the model
        weight is older than its master: a fingerprint shows writes there.
        """
        apart = self.steps_on_host and (self.device.type != "cpu" or self._plan.delays_host)
        return None if apart else self._watched

    @property
    def _watched(self) -> torch.Tensor | None:
        return self.computes if self._plan.honours_writes else None

    def take_fingerprint(self) -> None:
        """What computes has just become what the master says; they cannot be compared later."""
        if self._watched is not None and self.comparable is None:
            self._fingerprint = fingerprint(self._watched)

    @staticmethod
    def written(stores: Sequence[ShardStore]) -> list[ShardStore]:
        """Those whose parameters were written since the last step, as fingerprints show."""
        watched = [store for store in stores if store._fingerprint is not None]
        if not watched:
            return []
        before = torch.stack([store._fingerprint for store in watched if store._fingerprint is not None])
        now = torch.stack([fingerprint(store._watched) for store in watched if store._watched is not None])
        return [store for store, is_changed in zip(watched, now.ne(before).tolist(), strict=True) if is_changed]

    def sync_master_from_model_weight(self) -> None:
        """Copy in-place writes to the model weight into the master weight ([Note: a write that no counter shows]).

        Nothing is compared while a host step or `offload_states` keeps either of them elsewhere.
        """
        weight = self._watched
        if weight is None or self._step is not None:
            return
        held = [weight, *self.master.tensors]
        if not all(tensor.untyped_storage().size() for tensor in held if tensor.numel()):
            return
        if self.comparable is None and not self.written([self]):
            return
        if self.steps_on_host:
            self.wait_for_master()
        master, check, is_changed = self.master.fetch(), WriteCheck(), False
        for low in range(0, master.numel(), _COMPARED):
            inside = slice(low, low + _COMPARED)
            is_changed |= check.take_over(master[inside], weight[inside].to(master.device))
        if is_changed and not self.master.is_plain_tensor:
            self.master.store(master)
        self.take_fingerprint()

    # -- ranges -------------------------------------------------------------------------------------------------

    def segments(self, first: int = 0, last: int | None = None) -> list[Segment]:
        """Ranges of one optimizer group each, in [first, last), counted from the start of what is stepped."""
        stop = self.stop if last is None else self.start + last
        found = self.spec.layout.segments(self.start + first, stop)
        return [Segment(segment.group, segment.start - self.start, segment.stop - self.start) for segment in found]

    def begin_step(self) -> None:
        """A step is asked for, of what is not frozen now."""
        self._frozen_in_step = frozenset(self.frozen)

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        """The same without what the user had frozen when the step began."""
        segments = self.segments(first, last)
        for index in sorted(self._frozen_in_step):
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
        """A range as it is rounded: parameter by parameter where that is done at random, else in one piece."""
        kept = self.spec.kept
        if not any(form is not None and form.is_dithered for form in (kept.master, *kept.forms)):
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
        """Of a parameter shard that is not the master."""
        if self.param is None or self.param.tier is not tier or self.spec.master_is_shard:
            return 0
        return self.param.values.nbytes

    def master_bytes(self, tier: Tier) -> int:
        """Of a master that is not a slice of the flat parameter itself, or its weights."""
        return sum(part.nbytes for part in self.own_master()) if self.state_tier is tier else 0

    def own_master(self) -> list[torch.Tensor | DiskTensor]:
        """What is held of the master and is neither a slice of the flat parameter nor its weights."""
        if self.spec.weight_is_master:
            return list(self.master.parts[1:])
        is_slice = self.param is None and self.computes is None
        return [] if is_slice else list(self.master.parts)

    def state_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def device_params(self) -> list[torch.Tensor]:
        """Parameters on the device that are not the master."""
        copy, on_device = self.param_copy, self.param is None or self.param.tier is Tier.DEVICE
        if self.spec.weight_is_master and self.param is not None:
            copy = self.param.buffer
        return copy.tensors if copy is not None and on_device else []

    def cast(self, dtype: torch.dtype) -> None:
        """Another dtype, while nobody trains it. What is unsharded casts itself."""
        self.spec = replace(self.spec, dtype=dtype)
        if self.param is not None:
            self.param = DeviceShard(self.param.buffer.fetch().to(dtype))

    def forget_training(self) -> None:
        """The engine goes: hold nothing but the parameter shard, in memory of its own."""
        self.grad = self._master = self.computes = self._fingerprint = None
        self.states = {}
        if self.param is not None:
            self.param = self.param.in_own_memory()
