"""From a model to units: cut it, lay it out, take rank 0's values."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onefold.comm import Group, Ledger, broadcast_from
from onefold.config import Config
from onefold.plan import Layout, Plan, Precision, RunShape, UnitCut, cut, persistent_parameters
from onefold.plan.table import DTYPES
from onefold.runtime.held import plain_class
from onefold.runtime.homes import gathered, home_of, leave_home, whole_shape
from onefold.runtime.unit import Run, Unit
from onefold.tier.lower import LowerTiers


@dataclass(frozen=True)
class Draft:
    """A unit before it has tensors: its runs as shapes, each with the names of its parameters in their order."""

    found: UnitCut
    shapes: list[RunShape]


def draft_units(
    model: nn.Module, *, config: Config, groups: Mapping[int, int], precision: Precision, group: Group
) -> list[Draft]:
    """Cut a model and lay it out. `groups` maps the id of each trained parameter to its optimizer group; parameters in
    no group are left alone.
    """
    zero = config.zero_optimization
    parameters = dict(model.named_parameters())
    _check_modules(model)
    check_apart(parameters)
    shapes = {name: tuple(whole_shape(parameter)) for name, parameter in parameters.items()}
    persistent = persistent_parameters(
        {name: math.prod(shape) for name, shape in shapes.items()},
        zero.stage3_param_persistence_threshold,
        zero.stage3_model_persistence_threshold,
    )
    cuts = cut(model, config.onefold.units, zero.leaf_module, lambda parameter: whole_shape(parameter).numel())
    return [
        Draft(
            found,
            [
                RunShape(
                    Layout.of([(name, shapes[name], of) for name, of in inside], group.num_shards),
                    dtype,
                    trainable,
                    persists,
                )
                for (dtype, trainable, persists), inside in _runs_of(
                    found, parameters, groups, precision, persistent
                ).items()
            ],
        )
        for found in cuts
    ]


def build_units(
    model: nn.Module,
    drafts: Sequence[Draft],
    *,
    config: Config,
    plan: Plan,
    precision: Precision,
    accumulates: bool,
    group: Group,
    ledger: Ledger,
    device: torch.device,
    lower: LowerTiers | None,
) -> list[Unit]:
    """Flatten a model unit by unit, so that at most one unit is ever held twice, and rank 0's values are taken."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    on_meta = {name for name, parameter in parameters.items() if parameter.is_meta}
    units: list[Unit] = []
    for index, draft in enumerate(drafts):
        names = [[member.name for member in shape.layout.members] for shape in draft.shapes]
        with gathered([parameters[name] for some in names for name in some]):
            runs = [
                Run(
                    shape,
                    [parameters[name] for name in some],
                    plan=plan,
                    precision=precision,
                    rank=group.shard,
                    accumulates=accumulates,
                    device=device,
                    lower=lower,
                )
                for shape, some in zip(draft.shapes, names, strict=True)
            ]
        leave_home(parameter for run in runs for parameter in run.parameters)
        found = draft.found
        unit = Unit(found.module, modules[found.module], runs, index=index, shared=found.shared)
        _initialise(modules, on_meta & {member.name for run in runs for member in run.layout.members}, units)
        for run in runs:
            broadcast_from(group, 0, run.full, ledger)
            run.store()
        unit.release()
        units.append(unit)
    for unit in units:
        inside = {id(module) for module in unit.module.modules()} - {id(unit.module)}
        unit.encloses = any(id(other.module) in inside for other in units)
    everywhere = config.data_types.buffer_dtype
    buffer_dtypes = BufferDtypes(DTYPES[everywhere] if everywhere is not None else None, precision.compute)
    _take_first_ranks_values(model, units, group, ledger, device, buffer_dtypes)
    return units


@dataclass(frozen=True)
class BufferDtypes:
    """Which floating-point buffers are cast. `everywhere` is the config's `data_types.buffer_dtype`.

    Without it, buffers of torch's own layers follow the parameters they meet, as in `module.to(dtype)`: running
    statistics of batch norms, the vectors of spectral and orthogonal norms. Buffers of other modules stay as they are:
    many are made to be precise (rotary frequencies, position tables).
    """

    everywhere: torch.dtype | None
    compute: torch.dtype | None

    def of(self, module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return dtype
        # `spectral_norm` as a hook keeps weight_u and weight_v beside weight_orig, on whatever module it is given.
        of_hook = f"{name.rpartition('_')[0]}_orig" in module._parameters
        follows = isinstance(module, _NormBase) or type(module).__module__.startswith("torch.nn.") or of_hook
        return self.everywhere or (self.compute if follows and self.compute is not None else dtype)


def _runs_of(
    found: UnitCut,
    parameters: Mapping[str, nn.Parameter],
    groups: Mapping[int, int],
    precision: Precision,
    persistent: Container[str],
) -> dict[tuple[torch.dtype, bool, bool], list[tuple[str, int]]]:
    """(dtype, trainable, persistent) -> [(name, optimizer group)].

    Of what is not trained, parameters that are not floating point, and subclasses of Parameter that carry their own
    format (quantized weights), stay outside.
    """
    runs: dict[tuple[torch.dtype, bool, bool], list[tuple[str, int]]] = {}
    for name in found.parameters:
        parameter = parameters[name]
        trainable = parameter.requires_grad and id(parameter) in groups
        if trainable:
            _check_trainable(name, parameter)
        elif not parameter.is_floating_point() or plain_class(parameter) is not nn.Parameter:
            continue
        key = (precision.of_parameter(parameter.dtype), trainable, name in persistent)
        runs.setdefault(key, []).append((name, groups[id(parameter)] if trainable else 0))
    return runs


def _check_trainable(name: str, parameter: nn.Parameter) -> None:
    """Refuse, by name, what cannot be stepped as plain numbers in a flat line."""
    kind = plain_class(parameter)
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name} is complex ({parameter.dtype}), and flat shards hold real numbers: keep it as a real "
            "parameter of shape (..., 2) and use torch.view_as_complex(weight) in the forward, or freeze it"
        )
    if parameter.layout is not torch.strided:
        raise ValueError(f"parameter {name} has the layout {parameter.layout}: only dense parameters can be sharded")
    disabled = torch._C._disabled_torch_function_impl
    own_format = kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    if own_format or getattr(kind, "__torch_function__", disabled) is not disabled:
        raise ValueError(
            f"parameter {name} is a {kind.__module__}.{kind.__qualname__}, which gives torch functions a meaning of "
            "its own: it cannot be trained as plain numbers. Freeze it, leave it out of the optimizer, or make it an "
            "nn.Parameter"
        )


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {name or '(root)'} is a torch.jit ScriptModule, which takes no hooks: its parameters cannot "
                "be unsharded or reduced. Pass the Python module, and compile it with torch.compile or engine.compile()"
            )


def check_apart(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that lie in the same memory: each would get memory of its own, and they would part."""
    ranges = []
    for name, parameter in parameters.items():
        if (
            home_of(parameter) is None
            and parameter.layout is torch.strided
            and parameter.numel()
            and not parameter.is_meta
        ):
            start = parameter.data_ptr()
            ranges.append((str(parameter.device), start, start + _span(parameter) * parameter.itemsize, name))
    ranges.sort()
    for index, (device, _, end, name) in enumerate(ranges):
        for other_device, start, _, other in ranges[index + 1 :]:
            if device != other_device or start >= end:
                break
            trained = parameters[name].requires_grad or parameters[other].requires_grad
            if trained and _overlap(parameters[name], parameters[other]):
                raise ValueError(
                    f"parameters {name} and {other} share memory but are two Parameter objects, and each would be "
                    "trained by itself. Tie the Parameter: assign one module's parameter to the other (b.weight = "
                    "a.weight), or clone it"
                )


def _span(parameter: nn.Parameter) -> int:
    """Elements from the first to the last, with what lies between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))


def _overlap(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether some byte belongs to both. Columns of one matrix lie between each other, and share nothing."""
    if all(parameter.numel() == _span(parameter) for parameter in (one, other)):
        return True  # no gaps, and their ranges meet
    begin = min(one.data_ptr(), other.data_ptr())
    end = max(parameter.data_ptr() + _span(parameter) * parameter.itemsize for parameter in (one, other))
    taken = torch.zeros(end - begin, dtype=torch.bool)
    for parameter in (one, other):
        bytes_of = torch.as_strided(
            taken,
            (*parameter.shape, parameter.itemsize),
            (*(stride * parameter.itemsize for stride in parameter.stride()), 1),
            parameter.data_ptr() - begin,
        )
        if parameter is other and bool(bytes_of.any()):
            return True
        bytes_of.fill_(True)
    return False


def _initialise(modules: Mapping[str, nn.Module], on_meta: set[str], earlier: Sequence[Unit]) -> None:
    """Give values to what was built on the meta device, by each module's own `reset_parameters`."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in sorted(on_meta))
    for path in owners:
        reset = getattr(modules[path], "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"parameters of {path or 'the root module'} ({type(modules[path]).__name__}) are on the meta device "
                "and the class has no reset_parameters to give them values: define one, or build it off meta"
            )
        resting = {
            member.name
            for unit in earlier
            for run in unit.sharded
            for member, parameter in zip(run.layout.members, run.parameters, strict=True)
            if any(parameter is own for own in modules[path].parameters(recurse=False))
        }
        if resting:
            raise ValueError(
                f"{path} shares {', '.join(sorted(resting))} with another module and is on the meta device: "
                "reset_parameters cannot reach shared weights that are sharded already. Build it off meta"
            )
        reset()


def _take_first_ranks_values(
    model: nn.Module,
    units: Sequence[Unit],
    group: Group,
    ledger: Ledger,
    device: torch.device,
    buffer_dtypes: BufferDtypes,
) -> None:
    """Of what lies in no run: buffers, and parameters that are left alone."""
    with torch.no_grad():
        in_runs = {id(parameter) for unit in units for run in unit.runs for parameter in run.parameters}
        loose = [parameter for parameter in model.parameters() if id(parameter) not in in_runs]
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    raise ValueError(f"buffer {name} is on the meta device and has no values: build buffers off meta")
                buffer.data = buffer.data.to(buffer_dtypes.of(module, name, buffer.dtype))
        for tensor in [*loose, *model.buffers()]:
            tensor.data = tensor.data.to(device)
            broadcast_from(group, 0, tensor.data, ledger)
