"""Build the units of a model: cut it, lay it out, and broadcast rank 0's values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onefold.comm import Agreement, Group, Ledger, broadcast_from
from onefold.config import ConfigError
from onefold.fp8 import Fp8Linear
from onefold.offload.offload_memory import OffloadMemory, agree_on_tiers, make_memory
from onefold.plan import FlatParamSpec, Layout, Plan, Precision, StateSpec, UnitCut, cut, persistent_parameters
from onefold.plan.traffic import OffloadedStepSplit
from onefold.runtime.batch_chunks import check_blocks
from onefold.runtime.expert_parts import ExpertOf, PlacedParameter, divided_spec
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.param_handle import detach, handle_of, unsharded, unsharded_shape
from onefold.runtime.parameter_proxy import plain_class
from onefold.runtime.quantized_layers import follow_weights, scales_of
from onefold.runtime.tiled_modules import check_tiled_modules
from onefold.runtime.torch_internals import is_plain_float
from onefold.runtime.unit import Unit


@dataclass(frozen=True)
class UnitSpec:
    """A unit without tensors: its flat parameters as specs."""

    found: UnitCut
    params: list[FlatParamSpec]


class _SpecFields(NamedTuple):
    """Properties that all parameters of one flat parameter share."""

    dtype: torch.dtype
    trainable: bool
    persistent: bool
    packed: bool
    multiplies_in_fp8: bool
    state_spec: StateSpec


def lay_out(
    model: nn.Module,
    plan: Plan,
    groups: Mapping[int, int],
    states: Sequence[StateSpec],
    group: Group,
    ledger: Ledger,
    device: torch.device,
    elsewhere: Collection[int] = (),
    in_fp8: Mapping[str, Fp8Linear] | None = None,
    experts: Mapping[str, ExpertOf] | None = None,
) -> tuple[list[Unit], OffloadMemory | None]:
    """Cut a model into units, assign a tier to each of their flat parameters, and build them.

    `elsewhere` has the ids of parameters that another engine manages, `in_fp8` the layers that multiply in FP8 by the
    names of their weights, `experts` the parameters of experts that are divided, by name.
    """
    in_fp8 = in_fp8 or {}
    agreement = Agreement(group, ledger)
    specs = [
        replace(spec, params=[_of_rank(param, group) for param in spec.params])
        for spec in plan_units(model, plan, groups, states, elsewhere, in_fp8, experts)
    ]
    placed = agree_on_tiers([param for spec in specs for param in spec.params], plan, agreement, device)
    memory = make_memory(placed, plan, agreement, ledger, device)
    rest = iter(placed)
    specs = [replace(spec, params=[next(rest) for _ in spec.params]) for spec in specs]
    return build_units(model, specs, plan, group, ledger, device, memory, elsewhere, in_fp8), memory


def plan_units(
    model: nn.Module,
    plan: Plan,
    groups: Mapping[int, int],
    states: Sequence[StateSpec],
    elsewhere: Collection[int] = (),
    in_fp8: Collection[str] = (),
    experts: Mapping[str, ExpertOf] | None = None,
) -> list[UnitSpec]:
    """Cut a model and lay it out.

    `groups` maps the id of each trained parameter to its optimizer group. `states` has the optimizer states of each
    group: groups with different states have separate flat parameters. So have weights in `in_fp8`, in every stage, and
    `experts` that are divided ([Note: experts of a rank] in `moe/divided_experts.py`).
    """
    parameters = dict(model.named_parameters())
    _check_modules(model)
    check_apart(parameters)
    for pattern in plan.formats.fp32_names:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ConfigError(
                f"onefold.fp32_state_names: {pattern!r} matches no parameter. Use a name such as "
                f"{next(iter(parameters), '')!r}, in which * matches any part."
            )
    shapes = {name: tuple(unsharded_shape(parameter)) for name, parameter in parameters.items()}
    persistent = persistent_parameters(
        {name: math.prod(shape) for name, shape in shapes.items()},
        plan.cut.persistence_threshold,
        plan.cut.persistence_in_all,
    )
    specs = []
    split = OffloadedStepSplit()
    leaves = plan.cut.leaves
    if lists := {each.layer for each in (experts or {}).values() if each.number is not None and each.layer}:
        leaves = replace(leaves, names=(*leaves.names, *sorted(lists)))
    cuts = cut(model, plan.cut.units, leaves, lambda parameter: unsharded_shape(parameter).numel())
    if plan.activations.batch_chunks != 0:
        check_blocks(model, cuts)
    if plan.activations.mlp_tiles != 0:
        check_tiled_modules(model, plan.activations.tiled_modules, cuts)
    for found in cuts:
        flat: dict[_SpecFields, list[PlacedParameter]] = {}
        of_experts: dict[tuple[_SpecFields, str, int, int], dict[int | None, list[PlacedParameter]]] = {}
        for name in found.parameters:
            parameter = parameters[name]
            if id(parameter) in elsewhere:
                continue
            trainable = parameter.requires_grad and id(parameter) in groups
            if trainable:
                _check_trainable(name, parameter)
            elif not _fits_in_flat(parameter):
                continue
            packed = not trainable and not (is_plain_float(parameter.dtype) and plain_class(parameter) is nn.Parameter)
            dtype = parameter.dtype if packed else plan.precision.of_parameter(parameter.dtype)
            of_group = groups[id(parameter)] if trainable else 0
            state_spec = StateSpec()
            if trainable:
                state_spec = states[of_group].held_as(plan.formats, name, dtype, math.prod(shapes[name]))
            spec_fields = _SpecFields(dtype, trainable, name in persistent, packed, name in in_fp8, state_spec)
            members = flat.setdefault(spec_fields, [])
            if experts is not None and name in experts:
                layer, num_experts, number = experts[name]
                key = (spec_fields, name if number is None else layer, num_experts, of_group)
                members = of_experts.setdefault(key, {}).setdefault(number, [])
            members.append((name, shapes[name], of_group))
        apart: list[FlatParamSpec] = []
        for (spec_fields, _, num_experts, _), by_number in of_experts.items():
            divided = divided_spec(by_number, num_experts, plan, **spec_fields._asdict())
            if divided is not None:
                apart.append(divided)
            else:
                flat[spec_fields] += [each for some in by_number.values() for each in some]
        trained = sum(
            math.prod(shape) for spec_fields, some in flat.items() if spec_fields.trainable for _, shape, _ in some
        )
        trained += sum(param.layout.numel for param in apart if param.trainable)
        by_device = split.assign(trained)
        params = [replace(param, given_to_device=by_device) for param in apart]
        for spec_fields, members in ((spec_fields, members) for spec_fields, members in flat.items() if members):
            layout = Layout.of(members, plan.num_shards, spec_fields.dtype.itemsize)
            params.append(FlatParamSpec(layout, **spec_fields._asdict(), given_to_device=by_device))
        if params:
            specs.append(UnitSpec(found, params))
    return specs


def _of_rank(param: FlatParamSpec, group: Group) -> FlatParamSpec:
    """Return a flat parameter with the part of the experts that this rank computes."""
    return replace(param, expert_part=group.shard // param.span) if param.span is not None else param


def build_units(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    plan: Plan,
    group: Group,
    ledger: Ledger,
    device: torch.device,
    memory: OffloadMemory | None,
    elsewhere: Collection[int] = (),
    in_fp8: Mapping[str, Fp8Linear] | None = None,
) -> list[Unit]:
    """Flatten a model and broadcast rank 0's values, unit by unit, so that at most one unit is in memory twice."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    on_meta = {name for name, parameter in parameters.items() if parameter.is_meta and device.type != "meta"}
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        members = [[parameters[member.name] for member in param.layout.members] for param in spec.params]
        # Sharded parameters have the same values on every rank already.
        in_sync = [all(handle_of(parameter) is not None for parameter in some) for some in members]
        with unsharded(parameter for some in members for parameter in some):
            params = [
                FlatParam(param, some, plan=plan, rank=group.shard, device=device, memory=memory, in_fp8=in_fp8)
                for param, some in zip(spec.params, members, strict=True)
            ]
        detach(parameter for param in params for parameter in param.parameters)
        path = spec.found.module
        unit = Unit(path, modules[path], params, index=index, reduces_at_end=spec.found.has_tied)
        unit.is_block = spec.found.is_block
        _initialise(modules, on_meta & {name for param in params for name, _ in param.named_parameters()}, units)
        for param, is_in_sync in zip(params, in_sync, strict=True):
            if not is_in_sync:
                broadcast_from(group, 0, param.full, ledger)
            param.update_shard()
        unit.reshard()
        units.append(unit)
    for unit in units:
        inside = {id(module) for module in unit.module.modules()} - {id(unit.module)}
        unit.encloses = any(id(other.module) in inside for other in units)
    follow_weights(model)
    _take_first_ranks_values(model, units, plan.precision, group, ledger, device, elsewhere)
    return units


def _buffer_dtype(module: nn.Module, path: str, dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """Return the dtype of a buffer. `data_types.buffer_dtype` applies to every floating-point buffer.

    Without it, buffers of torch's own layers (running statistics of batch norms, the vectors of spectral and orthogonal
    norms) are cast with the parameters, as in `module.to(dtype)`. Buffers of other modules are not, because many need
    their precision (rotary frequencies, position tables). Buffers whose name matches `data_types.keep_in_fp32_modules`
    are fp32 if parameters have fewer bits.
    """
    if not is_plain_float(dtype):
        return dtype
    if precision.compute is not None and any(fnmatchcase(path, f"*{pattern}*") for pattern in precision.fp32_buffers):
        return torch.float32
    # The hook of `spectral_norm` stores weight_u and weight_v next to weight_orig, on any module.
    name = path.rpartition(".")[2]
    of_hook = f"{name.rpartition('_')[0]}_orig" in module._parameters
    home = type(module).__module__
    of_layer = home.startswith("torch.nn.") and home not in (nn.Module.__module__, nn.Sequential.__module__)
    follows = isinstance(module, _NormBase) or of_layer or of_hook
    return precision.buffers or (precision.compute if follows and precision.compute is not None else dtype)


def _fits_in_flat(parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter is dense and of a dtype that every backend can gather.

    Others stay unsharded in their module: tensor subclasses with tensors inside (torchao's quantized weights), 8-bit
    floats, sparse, complex and boolean parameters.
    """
    numbers = is_plain_float(parameter.dtype) or parameter.dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)
    return numbers and parameter.layout is torch.strided and not _has_own_format(plain_class(parameter))


def _has_own_format(kind: type[nn.Parameter]) -> bool:
    return kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def _check_trainable(name: str, parameter: nn.Parameter) -> None:
    """Raise if a parameter cannot be trained as plain numbers in a flat tensor."""
    kind = plain_class(parameter)
    if parameter.is_complex():
        raise ValueError(
            f"Parameter {name} is complex ({parameter.dtype}), but flat shards are real. Store it as a real "
            "parameter of shape (..., 2) and use torch.view_as_complex(weight) in the forward, or freeze it."
        )
    if parameter.layout is not torch.strided:
        raise ValueError(
            f"Parameter {name} has the layout {parameter.layout}, but only dense parameters can be sharded. Make it "
            "dense, or freeze it."
        )
    disabled = torch._C._disabled_torch_function_impl
    if _has_own_format(kind) or getattr(kind, "__torch_function__", disabled) is not disabled:
        raise ValueError(
            f"Parameter {name} is a {kind.__module__}.{kind.__qualname__}, which overrides torch functions and cannot "
            "be trained as plain numbers. Freeze it, leave it out of the optimizer, or make it an nn.Parameter."
        )


def _check_modules(model: nn.Module) -> None:
    """Raise if a module does not accept hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"Module {name or '(root)'} is a torch.jit ScriptModule, which does not accept hooks, so its "
                "parameters cannot be unsharded or reduced. Pass the Python module, and compile it with torch.compile "
                "or engine.compile()."
            )


def check_apart(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if parameters share memory. Each would get separate memory, and they would diverge."""
    ranges = []
    for name, parameter in parameters.items():
        has_memory = parameter.layout is torch.strided and parameter.numel() and not parameter.is_meta
        if has_memory and handle_of(parameter) is None:
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
                    f"Parameters {name} and {other} share memory but are two Parameter objects, so each would be "
                    "trained separately. Tie the Parameter (b.weight = a.weight), or clone it."
                )


def _span(parameter: nn.Parameter) -> int:
    """Return the number of elements from the first to the last, including gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))


def _overlap(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Return whether two parameters share a byte. Columns of one matrix are interleaved and share nothing."""
    if all(parameter.numel() == _span(parameter) for parameter in (one, other)):
        return True  # no gaps, and their ranges overlap
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
    """Initialise parameters that were built on the meta device with the `reset_parameters` of their module."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in sorted(on_meta))
    for path in owners:
        reset = getattr(modules[path], "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"Parameters of {path or 'the root module'} ({type(modules[path]).__name__}) are on the meta device "
                "and the class has no reset_parameters. Define one, or build the module on a real device."
            )
        own = {id(parameter) for parameter in modules[path].parameters(recurse=False)}
        sharded = [param for unit in earlier for param in unit.sharded_params]
        shared = {name for param in sharded for name, parameter in param.named_parameters() if id(parameter) in own}
        if shared:
            raise ValueError(
                f"{path} is on the meta device and shares {', '.join(sorted(shared))}, which are already sharded, with "
                "another module, so reset_parameters cannot initialise them. Build it on a real device."
            )
        reset()


def _take_first_ranks_values(
    model: nn.Module,
    units: Sequence[Unit],
    precision: Precision,
    group: Group,
    ledger: Ledger,
    device: torch.device,
    elsewhere: Collection[int],
) -> None:
    """Broadcast rank 0's values of buffers, parameters without a flat parameter, and scales of packed parameters."""
    with torch.no_grad():
        flattened = {id(parameter) for unit in units for param in unit.params for parameter in param.parameters}
        flattened |= set(elsewhere)
        loose = [parameter for parameter in model.parameters() if id(parameter) not in flattened]
        for home, module in model.named_modules():
            for name, buffer in module.named_buffers(prefix=home, recurse=False):
                if buffer.is_meta and device.type != "meta":
                    raise ValueError(
                        f"Buffer {name} is on the meta device and has no values. Build buffers on a real device."
                    )
                buffer.data = buffer.data.to(_buffer_dtype(module, name, buffer.dtype, precision))
        scales = [tensor for module in model.modules() for tensor in scales_of(module).values()]
        for tensor in [*loose, *model.buffers(), *scales]:
            tensor.data = tensor.data.to(device)
            broadcast_from(group, 0, tensor.data, ledger)
