"""The parameters of a mixture of experts: all of them, and those that are used for a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onefold.moe.expert_layers import ExpertLayer, expert_layers, expert_parameters
from onefold.runtime import unsharded_shape

# Attributes with the number of experts of a token: of a layer, its router and the block around them, or of a config.
_PER_TOKEN = ("top_k", "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "k")


@dataclass(frozen=True)
class ParameterCounts:
    """The numbers of parameters of a model."""

    total: int
    of_experts: int
    active: int | None
    """The number that is used for a token; None if the number of experts of a token is not found."""


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of a model, with those of experts."""
    return _count(model, expert_layers(model))


def _count(model: nn.Module, layers: Sequence[ExpertLayer]) -> ParameterCounts:
    sizes = {name: unsharded_shape(each).numel() for name, each in model.named_parameters()}
    of_layer: dict[str, int] = {layer.name: 0 for layer in layers}
    for name, expert in expert_parameters(model, layers).items():
        of_layer[expert.layer] += sizes.get(name, 0)
    total, active = sum(sizes.values()), sum(sizes.values())
    for layer in layers:
        per_token = experts_per_token(model, layer)
        if per_token is None:
            return ParameterCounts(total, sum(of_layer.values()), None)
        active -= of_layer[layer.name] * (layer.num_experts - per_token) // layer.num_experts
    return ParameterCounts(total, sum(of_layer.values()), active)


def experts_per_token(model: nn.Module, layer: ExpertLayer) -> int | None:
    """Return the number of experts that a layer chooses for a token, or None if it is not found."""
    for each in _modules_and_configs(model, layer):
        for name in _PER_TOKEN:
            value = getattr(each, name, None)
            if type(value) is int and 0 < value <= layer.num_experts:
                return value
    return None


def _modules_and_configs(model: nn.Module, layer: ExpertLayer) -> Iterator[Any]:
    """Yield the layer, the blocks around it with their other children, and the config of the model."""
    yield layer.module
    yield from layer.module.children()
    path = layer.name
    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        if isinstance(around, nn.ModuleList):
            break
        yield around
        yield from (child for child in around.children() if child is not layer.module)
    config = getattr(model, "config", None)
    if config is not None:
        yield config
        yield getattr(config, "text_config", None)


def describe_layers(model: nn.Module, layers: Sequence[ExpertLayer]) -> str:
    """Describe the expert layers of a model, or return an empty string if there are none."""
    if not layers:
        return ""
    counts, numbers = _count(model, layers), sorted({layer.num_experts for layer in layers})
    active = f", {counts.active:,} of {counts.total:,} parameters active for a token" if counts.active else ""
    return f"{len(layers)} layers of {' or '.join(map(str, numbers))} experts{active}"
