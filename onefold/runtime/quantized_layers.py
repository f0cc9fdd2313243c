"""Tensors that bitsandbytes' layers store next to their weight: scales, and references to the weight's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def follow_weights(model: nn.Module) -> None:
    """Make layers of a flattened model read their present weights.

    bitsandbytes is not imported: its layers are recognised by their attributes.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        if hasattr(weight, "SCB") and hasattr(module, "init_8bit_state"):
            _follow_int8(module)
        elif hasattr(weight, "quant_state"):
            # On some CPUs an evaluation would replace weights by others of another shape.
            vars(module)["support_avx512bf16_for_cpu"] = False


# Names as in bitsandbytes' files, except for the last one, and the attribute path from the quantization state.
# Scales may be quantized themselves.
_OF_4_BITS = {
    "weight.absmax": "absmax",
    "weight.quant_map": "code",
    "weight.nested_absmax": "state2.absmax",
    "weight.nested_quant_map": "state2.code",
    "weight.nested_offset": "offset",
}


def scales_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that are needed to decode a layer's packed weight, by name."""
    weight: Any = module._parameters.get("weight")
    found: dict[str, Any]
    if hasattr(weight, "SCB"):
        found = {"SCB": _at(module, "state.SCB") if weight.SCB is None else weight.SCB}
    elif getattr(weight, "quant_state", None) is not None:
        found = {name: _at(weight.quant_state, path) for name, path in _OF_4_BITS.items()}
    else:
        return {}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _at(state: Any, path: str) -> Any:
    for name in path.split("."):
        state = getattr(state, name, None)
    return state


def _follow_int8(module: Any) -> None:
    """Make `state.CB` of a `Linear8bitLt` read the present weight, because it is a reference taken only once."""
    if module.weight.CB is not None:
        module.init_8bit_state()
    module.state.__dict__.pop("CB", None)
    module.state.followed = module.weight
    module.state.__class__ = _following(type(module.state))


def _following(state: Any) -> Any:
    """Return a subclass of the state's class whose `CB` is the weight's present values."""
    if hasattr(state, "_onefold_follows"):
        return state
    return type(state.__name__, (state,), {"CB": property(_values, _set_values), "_onefold_follows": True})


def _values(self: Any) -> torch.Tensor | None:
    values: torch.Tensor = self.followed.detach()
    return values if values.numel() else None


def _set_values(self: Any, values: torch.Tensor | None) -> None:
    if values is not None:
        self.followed.data = values
