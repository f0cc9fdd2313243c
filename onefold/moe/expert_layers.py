"""Expert layers: modules whose parameters are stacked experts, and which are called with routed tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from onefold.errors import ConfigError
from onefold.runtime import unsharded_shape

# The attribute by which `experts` marks a module. Its value is the name of the attribute with the number of experts.
_MARK = "_onefold_experts"
# The first arguments of the forward of expert layers in transformers: tokens, and the experts and weights of each.
_ARGUMENTS = [
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
]
_COUNT = "num_experts"
# The class by which PEFT adapts parameters of other modules.
_ADAPTER = "ParamWrapper"


@dataclass(frozen=True)
class ExpertLayer:
    """A module with stacked experts."""

    name: str
    module: nn.Module
    num_experts: int
    count: str
    """The attribute of the module with the number of experts, which its forward reads."""
    stacked: tuple[str, ...]
    """The names, in the module, of the parameters whose first dimension is the expert."""


def experts(module: nn.Module, count: str = _COUNT) -> nn.Module:
    """Mark a module as an expert layer, and return it. `expert_parallel_size` then divides its experts.

    Expert layers of transformers need no mark. The forward of any other is called as `forward(tokens, index, weights)`:
    tokens are rows; `index` and `weights` have the experts of each token and their weights, as (tokens, k). It returns
    the weighted sum of the experts of each token. Parameters with `module.num_experts` (or the attribute that `count`
    names) as their first size are divided. The forward must read the number of experts from this attribute, because a
    rank calls it for its own experts only, which are numbered from 0.
    """
    if not isinstance(getattr(module, count, None), int):
        raise ValueError(
            f"onefold.experts: {type(module).__name__} has no number of experts in its attribute {count!r}. Pass "
            "count=, the name of the attribute."
        )
    setattr(module, _MARK, count)
    return module


def divided_expert_layers(model: nn.Module, size: int) -> list[ExpertLayer]:
    """Return the expert layers of a model, in module order, if they are divided over more than one rank.

    Raise if they cannot be divided over `size` ranks.
    """
    found: list[ExpertLayer] = []
    if size == 1:
        return found
    for name, module in model.named_modules():
        count = getattr(module, _MARK, None) or (_COUNT if _is_called_as_in_transformers(module) else "")
        number = getattr(module, count, None) if count else None
        if isinstance(number, int):
            shapes = {each: unsharded_shape(own) for each, own in module.named_parameters(recurse=False)}
            stacked = tuple(each for each, shape in shapes.items() if shape and shape[0] == number)
            if stacked:
                found.append(ExpertLayer(name, module, number, count, stacked))
            elif hasattr(module, _MARK):
                raise ConfigError(f"onefold.experts: {name} has no parameters of {number} stacked experts of its own.")
    _check(model, found, size)
    return found


def _is_called_as_in_transformers(module: nn.Module) -> bool:
    if not isinstance(getattr(module, _COUNT, None), int):
        return False
    return list(inspect.signature(module.forward).parameters)[:3] in _ARGUMENTS


def _check(model: nn.Module, layers: list[ExpertLayer], size: int) -> None:
    key = f"onefold.expert_parallel_size = {size}"
    if not layers:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no expert layers. Use 1, or mark modules with stacked experts by "
            "onefold.experts(module)."
        )
    for layer in layers:
        if layer.num_experts % size:
            raise ConfigError(f"{key} does not divide the {layer.num_experts} experts of {layer.name}. Use a divisor.")
        others = [*layer.module.named_parameters(), *layer.module.named_buffers()]
        for each, tensor in others:
            shape = unsharded_shape(tensor)
            if each not in layer.stacked and shape and shape[0] == layer.num_experts:
                raise ConfigError(
                    f"{key}: {layer.name}.{each} seems to have an entry for each expert, but only parameters of the "
                    "layer itself are divided. Make it a parameter of the layer, or use 1."
                )
    for name, module in model.named_modules():
        if type(module).__name__ == _ADAPTER and any(layer.name.startswith(f"{name}.") for layer in layers):
            raise ConfigError(
                f"{key}: {name} adapts stacked experts by LoRA, which adds to all of them. Use 1, or leave expert "
                "parameters out of target_parameters."
            )


def expert_parameters(layers: Iterable[ExpertLayer]) -> set[str]:
    """Return the names of the parameters that are stacked experts."""
    return {f"{layer.name}.{name}" if layer.name else name for layer in layers for name in layer.stacked}
