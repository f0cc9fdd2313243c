"""Experts that are divided over ranks: their flat parameters, and the values of stacked ones while a layer computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from onefold.plan import FlatParamSpec, Layout, Plan
from onefold.runtime.param_handle import handle_of

# The name, the shape and the optimizer group of a parameter.
PlacedParameter = tuple[str, tuple[int, ...], int]


class ExpertOf(NamedTuple):
    """The expert that a parameter belongs to. Stacked experts, which are one parameter, have no number."""

    layer: str
    num_experts: int
    number: int | None = None


def divided_spec(
    parameters: Mapping[int | None, Sequence[PlacedParameter]], num_experts: int, plan: Plan, **spec_fields: Any
) -> FlatParamSpec | None:
    """Return the flat parameter of experts that are divided, or None if they cannot be.

    `parameters` has those of each expert by its number, or one parameter of stacked experts. `spec_fields` are the
    other fields of the spec: dtype, trainable, persistent, packed, multiplies_in_fp8 and state_spec.
    """
    num_parts, itemsize = plan.num_expert_parts, spec_fields["dtype"].itemsize
    if num_parts == 1 or not plan.shards_states or spec_fields["persistent"] or spec_fields["packed"]:
        return None
    if None in parameters:
        layout = Layout.of(parameters[None], plan.num_shards, itemsize)
        if not layout.has_parts(num_parts):
            return None
    else:
        shapes = [[shape for _, shape, _ in parameters.get(number, ())] for number in range(num_experts)]
        if any(shape != shapes[0] for shape in shapes):  # the others are persistent, frozen or in other groups
            return None
        size = num_experts // num_parts
        parts = [
            [each for number in range(part * size, (part + 1) * size) for each in parameters[number]]
            for part in range(num_parts)
        ]
        layout = Layout.of_parts(parts, plan.num_shards, itemsize)
    return FlatParamSpec(layout, **spec_fields, num_expert_parts=num_parts)


@contextmanager
def part_attached(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Attach the gathered experts of this rank to the Parameters of stacked experts while their layer computes.

    Parameters that are not divided keep the values that they have.
    """
    handles = ((handle_of(parameter), parameter) for parameter in parameters)
    places = (handle.location_of(parameter) for handle, parameter in handles if handle is not None)
    found = [(param, index) for param, index in places if param.has_part and param.spec.is_stacked]
    for param, index in found:
        param.attach_part(index)
    try:
        yield
    finally:
        for param, index in found:
            param.hide_part(index)
