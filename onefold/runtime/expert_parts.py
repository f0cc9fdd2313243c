"""Stacked experts that are divided over ranks: their flat parameters, and their values while a layer computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from onefold.plan import FlatParamSpec, Layout, Plan
from onefold.runtime.param_handle import handle_of


def divided_spec(name: str, shape: tuple[int, ...], group: int, plan: Plan, **alike: Any) -> FlatParamSpec | None:
    """Return the flat parameter of stacked experts that are divided, or None if they cannot be.

    `alike` has the other fields of the spec: dtype, trainable, persistent, packed, multiplies_in_fp8 and state_spec.
    """
    if plan.num_expert_parts == 1 or not plan.shards_states or alike["persistent"] or alike["packed"]:
        return None
    layout = Layout.of([(name, shape, group)], plan.num_shards, alike["dtype"].itemsize)
    if not layout.has_parts(plan.num_expert_parts):
        return None
    return FlatParamSpec(layout, **alike, num_expert_parts=plan.num_expert_parts)


@contextmanager
def part_attached(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Attach the gathered experts of this rank to their Parameters while their layer computes.

    Parameters that are not divided keep the values that they have.
    """
    handles = ((handle_of(parameter), parameter) for parameter in parameters)
    places = (handle.location_of(parameter) for handle, parameter in handles if handle is not None)
    found = [(param, index) for param, index in places if param.has_part]
    for param, index in found:
        param.attach_part(index)
    try:
        yield
    finally:
        for param, index in found:
            param.hide_part(index)
