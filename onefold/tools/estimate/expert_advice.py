"""Forecasts of mixtures of experts: active parameters, and whether expert parallelism pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onefold.config import ConfigError, check_topology, load_config, with_expert_parallel_size
from onefold.log import format_bytes
from onefold.moe import count_parameters, expert_layers, requested_parallel_size
from onefold.tools.estimate.forecast import Forecast, forecast
from onefold.tools.estimate.machines import PlanError
from onefold.tools.estimate.models import build_once
from onefold.tools.estimate.ops import OpTimer
from onefold.tools.estimate.question import Question, Setting, settings_for

_KEY = "onefold.expert_parallel_size"
# Settings whose times differ by less are equally fast.
_ABOUT = 1.03


def with_requested_experts(question: Question) -> Question:
    """Return the question with the `expert_parallel_size` that the layers of its model request, if they do."""
    size = requested_parallel_size(build_once(question.model.name, question.model.build))
    config = with_expert_parallel_size(load_config(question.config), size)
    return question.with_key("onefold", "expert_parallel_size", config.expert_parallel_size) if size else question


def possible_settings(question: Question) -> list[Setting]:
    """Return the settings of the machine that can be combined with the expert parallelism of the config."""
    found, refusals = [], []
    for setting in settings_for(question.machine):
        try:
            check_topology(load_config(question.document(setting, 1)), question.machine.world)
        except ConfigError as error:
            refusals.append(error)
        else:
            found.append(setting)
    if not found:
        raise refusals[0]
    return found


def expert_notes(question: Question) -> list[str]:
    """Return a note about the parameters of a mixture of experts."""
    counts = count_parameters(build_once(question.model.name, question.model.build))
    if not counts.of_experts:
        return []
    active = f", {counts.active:,} of them active for a token" if counts.active is not None else ""
    return [f"{counts.total:,} parameters, {counts.of_experts:,} in experts{active}"]


def hint_at_experts(question: Question, best: Forecast, found: Sequence[Forecast], timer: OpTimer | None = None) -> str:
    """Compare the best setting with expert parallelism of some sizes, by traffic and time.

    Settings that cannot be combined with it are compared with stage 3.
    """
    config, machine = load_config(question.document(best.setting, 1)), question.machine
    if config.expert_parallel_size > 1 or best.traffic is None or best.step is None or machine.world == 1:
        return ""
    layers = expert_layers(build_once(question.model.name, question.model.build))
    common = math.gcd(machine.world, *(layer.num_experts for layer in layers)) if layers else 1
    sizes = sorted({size for size in (machine.nodes, common) if size > 1 and common % size == 0})
    plain = [each for each in found if each.setting.name == "stage 3" and each is not best]
    divided: list[tuple[int, Forecast]] = []
    for size, base in ((size, base) for base in (best, *plain) for size in sizes):
        with_size = question.with_key("onefold", "expert_parallel_size", size)
        if divided and base.setting is not divided[0][1].setting:
            break
        try:
            check_topology(load_config(with_size.document(base.setting, 1)), machine.world)
            (each,) = forecast(with_size, [base.setting], finds_batch=False, timer=timer)
        except (ConfigError, PlanError):  # keys that cannot be combined, or a layer that cannot be traced
            continue
        if each.fits and each.step is not None:
            divided.append((size, each))
    if not divided:
        return ""
    size, each = min(divided, key=lambda pair: (pair[1].step or 0.0, pair[0]))
    compared = f"{_sent(each)} in a step instead of {_sent(best)}"
    if (each.step or 0.0) * _ABOUT >= best.step:
        return f" Expert parallelism does not pay: {_KEY} {size} sends {compared}, and is not faster."
    where = "it" if each.setting is best.setting else each.setting.name
    return f" With {_KEY} {size}, {where} takes about {each.step:.2g} s/step: it sends {compared}."


def _sent(each: Forecast) -> str:
    assert each.traffic is not None
    inside = f"{format_bytes(each.traffic.inside)} of a rank inside its node"
    return f"{inside} and {format_bytes(each.traffic.across)} of a node to others" if each.traffic.across else inside
