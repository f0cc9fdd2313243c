"""Host-device and NVMe traffic of a step, and the processor that steps offloaded states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onefold.plan.buffers import MASTER, PARAMETER, REDUCED_GRADIENT, FlatParamSpec, master_dtype
from onefold.plan.plan import Plan, Tier

# Bytes per element of the matrices that are sent to their owners and back.
MATRIX_ITEMSIZE = 2


class OffloadedStepSplit:
    """Splits the step of offloaded units between the host and the GPU.

    [Note: host and device step together]
    A step on the host is bound by its memory bandwidth, and streaming states through the GPU is bound by the bus. Both
    together are faster than either: 0.46 s a step for 1.3B parameters on an H200 and 16 cores, instead of 0.53 and
    0.61 s. Units are assigned by their size, in model order, which is close to the order of the next forward. The GPU
    rounds differently from the host, so under the same config the split depends only on the units and on the trained
    parameters. Results are then bit-equal for every stage, tier and number of ranks.
    """

    # The fraction of all trained elements that the GPU steps.
    SHARE = 0.6

    def __init__(self) -> None:
        self._host = self._device = 0

    def assign(self, numel: int) -> bool:
        """Assign the next unit, which has `numel` trained elements. Return True if the GPU steps it."""
        is_devices = self._device * (1 - self.SHARE) < self._host * self.SHARE
        self._device += numel * is_devices
        self._host += numel * (not is_devices)
        return is_devices


def is_streamed(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether the offloaded states of a flat parameter are streamed through the GPU for the step.

    See [Note: states streamed through the GPU].
    """
    states = spec.state_spec
    if plan.delays_host or states.as_matrices or states.by_own_class or plan.offloaded_step == "host":
        return False
    if plan.offloaded_step == "device" or (plan.offloaded_step == "auto" and not plan.formats.are_plain):
        return True
    # Copies are several times slower from memory that is not page-locked.
    return spec.given_to_device and (plan.offload.is_pinned or plan.offloaded_step == "both")


def can_be_stepped_early(spec: FlatParamSpec) -> bool:
    """Return whether a step under the backward can update a flat parameter.

    Its master must be in host memory, and another tensor than the model weight, with which the backward computes.
    """
    if not spec.trainable or spec.residency.states is not Tier.HOST or spec.state_spec.as_matrices:
        return False
    return not spec.master_is_shard and not spec.weight_is_part_of_master


def is_stepped_early(plan: Plan, spec: FlatParamSpec) -> bool:
    """Return whether a flat parameter is stepped under the backward ([Note: speculative steps])."""
    return plan.steps_in_backward and can_be_stepped_early(spec) and (spec.has_second_state or not plan.speculates)


@dataclass(frozen=True)
class OffloadTraffic:
    """Bytes that one rank copies between tiers in one step.

    `up` and `read` count one all-gather of each unit per forward and one per backward. Units that the program leaves
    unsharded between two uses need fewer.
    """

    down: int
    """Bytes copied from the device to the host."""
    up: int
    """Bytes copied from the host to the device."""
    read: int
    """Bytes read from disk."""
    written: int
    """Bytes written to disk."""

    @property
    def any(self) -> bool:
        return bool(self.down or self.up or self.read or self.written)


def count_offload_traffic(
    specs: Iterable[FlatParamSpec], plan: Plan, num_micro_steps: int, *, device_casts: bool
) -> OffloadTraffic:
    """Compute the bytes that a step of `num_micro_steps` micro-steps copies between tiers.

    `device_casts` is True if the device is a GPU, which then casts fp32 masters to the parameter shards of the host:
    in the step if it is streamed through the GPU, otherwise when the master is gathered for the first time.
    """
    found = (copy for spec in specs for copy in _copies(spec, plan, num_micro_steps, device_casts=device_casts))
    copies = [(source, target, num_bytes) for source, target, num_bytes in found if source is not target]
    # A copy between the device and NVMe passes through host memory, so it counts as both kinds of traffic.
    return OffloadTraffic(
        down=sum(num_bytes for source, _, num_bytes in copies if source is Tier.DEVICE),
        up=sum(num_bytes for _, target, num_bytes in copies if target is Tier.DEVICE),
        read=sum(num_bytes for source, _, num_bytes in copies if source is Tier.NVME),
        written=sum(num_bytes for _, target, num_bytes in copies if target is Tier.NVME),
    )


def _stays_in_memory(spec: FlatParamSpec, plan: Plan) -> bool:
    """Return whether the first forward and backward after a step read a shard on NVMe from host memory.

    See [Note: weights that a step leaves in memory].
    """
    if not spec.trainable or not spec.residency.offloads_states or spec.residency.parameters is not Tier.NVME:
        return False
    is_cast = spec.dtype != master_dtype(spec.dtype) and not spec.weight_is_part_of_master
    return is_cast and not _host_casts(spec, plan)


def _host_casts(spec: FlatParamSpec, plan: Plan) -> bool:
    """Return whether weights are cast after the step: a delayed one, or one of all shards by a user-defined class."""
    return plan.delays_host or (spec.state_spec.by_own_class and plan.states.tier is not Tier.NVME)


def _copies(
    spec: FlatParamSpec, plan: Plan, num_micro_steps: int, *, device_casts: bool
) -> Iterator[tuple[Tier, Tier, int]]:
    """Yield the source, target and bytes of each copy in a step. Source and target may be the same tier."""
    buffers, states = spec.buffers(plan), spec.residency.states
    first = {buffer.name: buffer for buffer in reversed(buffers)}
    parameter = first[PARAMETER]
    # With secondary shards, and from the device cache, only the first all-gather of a step reads the offloaded shard.
    # Copies of frozen parameters remain valid.
    is_copied = plan.node_shard_size > 1 or spec.caches_parameter
    processor = Tier.DEVICE if device_casts and is_streamed(plan, spec) else Tier.HOST
    # The GPU writes the weights of shards that it steps to the cache itself.
    is_on_device = spec.caches_parameter and spec.residency.offloads_states and processor is Tier.DEVICE
    gathers = int(spec.trainable and not is_on_device) if is_copied else 2 * num_micro_steps
    # Memory of the gradient is not overwritten before the last micro-step if the device caches the gradient.
    num_before_overwritten = gathers if spec.caches_gradient else min(gathers, 2)
    from_memory = num_before_overwritten if _stays_in_memory(spec, plan) else 0
    yield Tier.HOST, Tier.DEVICE, from_memory * parameter.num_bytes
    yield parameter.tier, Tier.DEVICE, (gathers - from_memory) * parameter.num_bytes
    if not spec.trainable or not spec.residency.offloads_states:
        return
    gradient, weight = first[REDUCED_GRADIENT], first[MASTER]
    # One micro-step of one rank is exact in its own dtype; sums over ranks are not. Sums over micro-steps are copied to
    # the GPU, which adds to them, and back.
    is_summed = device_casts and plan.num_micro_steps > 1
    reduced = plan.precision.of_reduced(spec.dtype, 2 if is_summed else 1, spec.used_layout.num_shards)
    if spec.caches_gradient:
        yield Tier.DEVICE, processor, gradient.num_bytes
    else:
        yield Tier.DEVICE, gradient.tier, num_micro_steps * gradient.numel * reduced.itemsize
        if is_summed:
            yield gradient.tier, Tier.DEVICE, (num_micro_steps - 1) * gradient.numel * reduced.itemsize
        yield gradient.tier, processor, gradient.num_bytes
    if spec.state_spec.as_matrices:  # copied to the device for the update, and back
        yield Tier.HOST, Tier.DEVICE, gradient.numel * MATRIX_ITEMSIZE
        yield Tier.DEVICE, Tier.HOST, gradient.numel * MATRIX_ITEMSIZE
    # The step: the master and the states are copied to the processor, and back.
    stepped = sum(buffer.num_bytes for buffer in buffers if buffer.is_stepped)
    yield states, processor, stepped
    yield processor, states, stepped
    if plan.delays_host:  # masters that a delayed step updated are read again when they are used
        yield states, Tier.HOST, weight.num_bytes
    if weight.alias_of is not None:
        return
    # The new weights are copied to the parameter. A step under the backward leaves them in host memory until `step` is
    # called.
    waits = is_stepped_early(plan, spec) and not is_on_device
    publisher = Tier.HOST if waits else processor
    if parameter.tier is Tier.DEVICE:
        yield publisher, Tier.DEVICE, weight.num_bytes
    elif parameter.tier is Tier.NVME:
        yield Tier.HOST, Tier.NVME, parameter.num_bytes
    elif publisher is Tier.DEVICE:
        yield Tier.DEVICE, Tier.HOST, parameter.num_bytes
    elif device_casts and states is Tier.HOST and spec.state_spec.master is None and not _host_casts(spec, plan):
        # The first all-gather copies the master instead of the parameter, and returns the cast parameter.
        yield Tier.HOST, Tier.DEVICE, weight.num_bytes - parameter.num_bytes
        yield Tier.DEVICE, Tier.HOST, parameter.num_bytes
