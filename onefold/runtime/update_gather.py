"""All-gathers of updated parameters that stay unsharded, after a step."""

from __future__ import annotations

from functools import partial

from onefold.comm import AllGatherOp
from onefold.runtime.parameter_proxy import set_proxy_class, set_updating_class
from onefold.runtime.unit import Unit


def launch_update_gather(units: list[Unit]) -> None:
    """All-gather the updated slices of parameters that stay unsharded, in place.

    With several ranks this waits for the host to step the units, while it steps the next ones: a rank that
    evaluates alone after a step must not wait for other ranks. A single rank waits where it uses a unit.
    """
    context = units[0].context
    plan, in_flight = context.plan, context.in_flight
    params = [param for unit in units for param in unit.updated_params]
    is_gathered = plan.shards_states and in_flight.collective.group.size > 1
    if not params or not (is_gathered or any(param.store.is_stepping for param in params)):
        return
    assert not any(unit.is_updating for unit in units)
    names = [unit.name for unit in units]
    num_elements = sum(param.layout.total for param in params)
    on_finish = partial(_set_updating, units, False)

    def wait_for_step() -> None:
        for param in params:
            param.store.finish_step()

    def prepare() -> list[AllGatherOp]:
        _set_updating(units, True)
        wait_for_step()
        return [AllGatherOp(param.full) for param in params]

    if is_gathered:
        in_flight.enqueue_update(names, prepare, num_elements=num_elements, on_finish=on_finish)
    else:
        _set_updating(units, True)
        in_flight.enqueue_local_update(names, wait_for_step, num_elements=num_elements, on_finish=on_finish)


def _set_updating(units: list[Unit], updating: bool) -> None:
    for unit in units:
        unit.is_updating = updating
        for parameter in (parameter for param in unit.updated_params for parameter in param.parameters):
            if updating:
                set_updating_class(parameter)
            else:
                set_proxy_class(parameter, sharded=False)
