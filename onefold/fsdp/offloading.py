"""Check a model and an optimizer, and offload the optimizer's states."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onefold.fsdp.offloaded_optimizer import OffloadedOptimizer
from onefold.optim.chosen import NOT_ELEMENTWISE, RULES
from onefold.optim.matrix_rules import MatrixRule
from onefold.optim.rules import Rule
from onefold.plan.state_formats import StateFormats

_TORCH_CLASSES = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ratio: float | Literal["auto"] = "auto",
    states: Literal["fp32", "int8"] = "fp32",
    *,
    device_memory: float | None = None,
    non_blocking: bool = False,
) -> OffloadedOptimizer:
    """Store the optimizer states of an FSDP2 model in host memory, and return the optimizer that steps them.

    Call it after `fully_shard`, with torch's Adam, AdamW, SGD or Adagrad, or a class that names an elementwise rule of
    onefold (`onefold_rule = "lion"`). Use the returned optimizer in place of the given one, whose methods are forwarded
    to it. States that the given optimizer already has are kept.

    Args:
        model: A model that `fully_shard` was applied to.
        optimizer: The optimizer of its parameters.
        ratio: The fraction of the states in host memory: 1.0 for all, 0.0 for none. "auto" offloads as much as must be,
            chosen in the first step from the device memory that the first backward needed.
        states: The format of the moments: "fp32", or "int8" with a quarter of the bytes. Master weights are fp32.
        device_memory: The GB (1e9 bytes) of device memory that "auto" may fill. By default 90% of the device's memory.
        non_blocking: Return from `step` before the parameters are updated. The next forward of each FSDP2 module waits
            for its parameters. Code that reads parameters in between must call `synchronize` first.
    """
    rule_name, rule = _rule_of(optimizer)
    _check_options(ratio, states, device_memory)
    _check_model(model, optimizer)
    for group in optimizer.param_groups:
        if rule_name in ("adam", "adamw"):
            group.setdefault("decoupled_weight_decay", rule_name == "adamw")
        if group.get("differentiable"):
            raise ValueError("onefold.fsdp.offload does not support differentiable=True. Leave it out.")
    return OffloadedOptimizer(
        model, optimizer, rule_name, rule, ratio, StateFormats(states=states), device_memory, non_blocking=non_blocking
    )


def _rule_of(optimizer: Any) -> tuple[str, Rule]:
    """Return the update rule that computes the optimizer's step, and its name."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"onefold.fsdp.offload needs a torch optimizer, not {type(optimizer).__name__}.")
    if isinstance(optimizer, OffloadedOptimizer) or getattr(optimizer, "offloaded_by", None) is not None:
        raise ValueError("the states of this optimizer are offloaded already. Call onefold.fsdp.offload once.")
    kind = type(optimizer)
    # Subclasses may override the step, so they do not inherit the rule of torch's class.
    name = _TORCH_CLASSES.get(kind) or vars(kind).get("onefold_rule")
    rule = RULES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or rule is None or isinstance(rule, MatrixRule):
        reason = NOT_ELEMENTWISE.get(kind.__name__.lower())
        known = ", ".join(key for key, each in RULES.items() if not isinstance(each, MatrixRule))
        raise TypeError(
            f"onefold.fsdp.offload does not support the optimizer {kind.__name__}"
            f"{f', which {reason}' if reason else ''}. Use torch.optim.Adam, AdamW, SGD or Adagrad, or a class whose "
            f"onefold_rule is one of {known}."
        )
    return name, rule


def _check_options(ratio: Any, states: Any, device_memory: Any) -> None:
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if ratio != "auto" and not (is_number and 0 <= ratio <= 1):
        raise ValueError(f'ratio = {ratio!r} is out of range. Use a number from 0 to 1, or "auto".')
    if states not in ("fp32", "int8"):
        raise ValueError(f'states = {states!r} is not known. Use "fp32" or "int8".')
    if device_memory is None:
        return
    if ratio != "auto":
        raise ValueError(f'device_memory has no effect with ratio = {ratio!r}. Use ratio="auto", or leave it out.')
    if not (isinstance(device_memory, int | float) and device_memory > 0):
        raise ValueError(f"device_memory = {device_memory!r} is out of range. Use a positive number of GB.")


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer has parameters of an FSDP2 model that are stored on the device."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 module. Apply torch.distributed.fsdp.fully_shard to it first."
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    devices = set()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is None:
                raise ValueError(
                    f"optimizer.param_groups[{number}] has a parameter of shape {tuple(parameter.shape)} that is not "
                    "one of the model. Create the optimizer after fully_shard, which replaces the parameters."
                )
            _check_parameter(name, parameter)
            devices.add(parameter.device)
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise ValueError(f"the parameters of the optimizer are on {found}. Store all of them on one device.")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise ValueError(f"parameter {name} is on the meta device. Materialize the model first (to_empty).")
    if not parameter.is_floating_point():
        raise ValueError(f"parameter {name} is {parameter.dtype}. Only floating-point parameters can be trained.")
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        raise ValueError(
            f"parameter {name} is on {parameter.device.type}, but its mesh is on {parameter.device_mesh.device_type}: "
            "FSDP2's CPUOffloadPolicy is active. Call fully_shard without an offload_policy."
        )
