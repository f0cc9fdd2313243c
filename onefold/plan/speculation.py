"""Second masters and states, which the step under the backward writes if its result may have to be discarded.

[Note: speculative steps]
With `onefold.step_in_backward` shards are stepped before the gradients of all units are known. If gradients are clipped
by their norm, or if gradients that are not finite skip or stop a step, such a step is speculative: it assumes that
gradients are finite and not clipped. It reads the master and the states of a shard, and writes the new values to second
ones. When `step` is called, the norm is known. If the assumption was right, first and second are exchanged. Otherwise
the second ones are ignored, and the shard is stepped again. So nothing is ever restored, and the result has the same
bits in both cases.

Second buffers are host memory, 12 bytes per parameter with fp32 Adam. Units get them in backward order, as far as
memory allows, because the units whose backward comes first leave the most time for their step. Shards without them wait
for `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onefold.plan.buffers import FlatParamSpec, stays_unsharded
from onefold.plan.memory import count_bytes
from onefold.plan.plan import Plan, Tier
from onefold.plan.traffic import can_be_stepped_early


def assign_second_states(
    specs: Sequence[FlatParamSpec], plan: Plan, host_bytes: int, *, keeps_half_free: bool, device_is_host: bool
) -> list[FlatParamSpec]:
    """Return the flat parameters with the second masters and states that fit in this rank's `host_bytes`.

    `keeps_half_free`: use half of what the first ones leave, because the job may need the rest. `device_is_host`: the
    model trains on the CPU, where a step compares unsharded parameters with their masters for in-place writes, so that
    they wait for `step`.
    """
    assigned = [replace(spec, has_second_state=False) for spec in specs]
    if not plan.speculates:
        return assigned
    left = host_bytes - count_bytes(assigned, plan, Tier.HOST).total
    if keeps_half_free:
        left //= 2
    for place, spec in reversed([*enumerate(assigned)]):
        needed = second_bytes([replace(spec, has_second_state=True)], plan)
        is_compared = device_is_host and plan.honours_writes and stays_unsharded(plan, spec)
        if can_be_stepped_early(spec) and not is_compared and needed <= left:
            assigned[place] = replace(spec, has_second_state=True)
            left -= needed
    return assigned


def second_bytes(specs: Sequence[FlatParamSpec], plan: Plan) -> int:
    """Compute the bytes of second masters and states on one rank."""
    without = [replace(spec, has_second_state=False) for spec in specs]
    return count_bytes(specs, plan, Tier.HOST).total - count_bytes(without, plan, Tier.HOST).total
