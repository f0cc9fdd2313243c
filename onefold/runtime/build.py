"""From a model to units: cut it, lay it out, take rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from onefold.comm import Group, Ledger, broadcast_from_first
from onefold.plan import Layout, Plan, Precision, UnitCut, cut
from onefold.runtime.unit import Run, Unit


def build_units(
    model: nn.Module,
    *,
    names: Sequence[str],
    groups: Mapping[int, int],
    plan: Plan,
    precision: Precision,
    accumulates: bool,
    group: Group,
    ledger: Ledger,
    device: torch.device,
    buffer_dtype: torch.dtype | None = None,
) -> list[Unit]:
    """Flatten a model unit by unit, so that at most one unit is ever held twice.

    `groups` maps the id of each trained parameter to its optimizer group; parameters in no group are left alone.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    on_meta = {name for name, parameter in parameters.items() if parameter.is_meta}
    units = []
    for index, found in enumerate(cut(model, names)):
        runs = [
            Run(
                Layout.of([(name, tuple(parameters[name].shape), group_of) for name, group_of in members], group.size),
                [parameters[name] for name, _ in sorted(members, key=lambda member: member[1])],
                dtype,
                trainable=trainable,
                plan=plan,
                precision=precision,
                rank=group.rank,
                accumulates=accumulates,
                device=device,
            )
            for (dtype, trainable), members in _runs_of(found, parameters, groups, precision).items()
        ]
        units.append(Unit(found.module, modules[found.module], runs, index=index, shared=found.shared))
    if on_meta:
        _initialise(modules, on_meta)
    _take_first_ranks_values(model, units, group, ledger, device, buffer_dtype)
    return units


def _runs_of(
    found: UnitCut, parameters: Mapping[str, nn.Parameter], groups: Mapping[int, int], precision: Precision
) -> dict[tuple[torch.dtype, bool], list[tuple[str, int]]]:
    """(dtype, trainable) -> [(name, optimizer group)]. Parameters that are not floating point stay outside."""
    runs: dict[tuple[torch.dtype, bool], list[tuple[str, int]]] = {}
    for name in found.parameters:
        parameter = parameters[name]
        if not parameter.is_floating_point():
            continue
        trainable = parameter.requires_grad and id(parameter) in groups
        key = (precision.of_parameter(parameter.dtype), trainable)
        runs.setdefault(key, []).append((name, groups[id(parameter)] if trainable else 0))
    return runs


def _initialise(modules: Mapping[str, nn.Module], on_meta: set[str]) -> None:
    """Give values to what was built on the meta device, by each module's own `reset_parameters`."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in sorted(on_meta))
    for path in owners:
        reset = getattr(modules[path], "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"parameters of {path or 'the root module'} ({type(modules[path]).__name__}) are on the meta device "
                "and the class has no reset_parameters to give them values: define one, or build it off meta"
            )
        reset()


def _take_first_ranks_values(
    model: nn.Module,
    units: Sequence[Unit],
    group: Group,
    ledger: Ledger,
    device: torch.device,
    buffer_dtype: torch.dtype | None,
) -> None:
    with torch.no_grad():
        for unit in units:
            for run in unit.runs:
                broadcast_from_first(group, run.full, ledger)
        in_runs = {id(parameter) for unit in units for run in unit.runs for parameter in run.parameters}
        loose = [parameter for parameter in model.parameters() if id(parameter) not in in_runs]
        for buffer in model.buffers():
            if buffer.is_meta:
                raise ValueError("a buffer is on the meta device and has no values: build buffers off meta")
            if buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.data.to(buffer_dtype)
        for tensor in [*loose, *model.buffers()]:
            tensor.data = tensor.data.to(device)
            broadcast_from_first(group, tensor.data, ledger)
