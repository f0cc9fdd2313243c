"""bitsandbytes' layers keep tensors beside their weight: scales, and references of their own to the weight's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def follow_weights(model: nn.Module) -> None:
    """For a model whose parameters were flattened. Nothing is imported: the layers are known by their attributes."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if hasattr(weight, "SCB"):
            _follow_int8(module)
        elif hasattr(weight, "quant_state"):
            # On some CPUs an evaluation would put weights of another shape in their place.
            vars(module)["support_avx512bf16_for_cpu"] = False


def scales_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a layer's packed weight cannot be read without, by names that begin with the weight's."""
    weight = module._parameters.get("weight")
    if hasattr(weight, "SCB"):
        return {f"weight.{name}": tensor for name, tensor in _tensors_of(module.state, "SCB")}
    state = getattr(weight, "quant_state", None)
    # Its own state, `state2`, is that of scales which are quantized themselves.
    return {f"weight.{name}": tensor for name, tensor in _tensors_of(state, "absmax", "code", "offset", "state2")}


def _tensors_of(state: Any, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        value = getattr(state, name, None)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif value is not None:
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in _tensors_of(value, *names))


def _follow_int8(module: Any) -> None:
    """`Linear8bitLt` computes with `state.CB`, taken from its weight once: the same values, held a second time."""
    if module.weight.CB is not None:
        module.init_8bit_state()
    module.state.__dict__.pop("CB", None)
    module.state.followed = module.weight
    module.state.__class__ = _following(type(module.state))


def _following(state: Any) -> Any:
    """The state's class, with the weight's present values as `CB`."""
    if hasattr(state, "_onefold_follows"):
        return state
    return type(state.__name__, (state,), {"CB": property(_values, _set_values), "_onefold_follows": True})


def _values(self: Any) -> torch.Tensor | None:
    values: torch.Tensor = self.followed.detach()
    return values if values.numel() else None


def _set_values(self: Any, values: torch.Tensor | None) -> None:
    if values is not None:
        self.followed.data = values
