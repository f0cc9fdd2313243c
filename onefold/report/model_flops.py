"""The FLOPs of training a transformer on a token, for the model FLOPs utilization (MFU).

[Note: FLOPs of a token]
As in the PaLM paper: 6 FLOPs for each parameter of a matrix product, 2 in forward and 4 in backward, and 12 x head
size x heads x positions for the attention of each layer. A frozen parameter has 4, because it has no weight gradient.
Embedding tables are looked up, so only a tied head counts; of experts, only those that a token uses. Recomputation does
not count. Positions are those of a row, or of a shorter window. Neither the causal mask nor packing is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from onefold.moe import expert_layers, expert_parameters, experts_per_token
from onefold.runtime import unsharded_shape

_FULL, _WINDOWS = "full_attention", {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Sections of the configs of models that compute on more than tokens.
_OTHER_INPUTS = ("vision_config", "audio_config", "encoder")
# Attributes of configs that list the types of layers in other terms than `layer_types`: RecurrentGemma's, GPT-Neo's.
_OTHER_LAYERS = ("block_types", "_block_types", "layers_block_type", "attention_layers", "attention_types")


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of a model, for each token."""

    of_parameters: float
    attention: tuple[tuple[float, int | None], ...]
    """Of each layer: FLOPs per position, and the positions of its window, if it has one."""

    @staticmethod
    def of(model: nn.Module) -> ModelFlops | None:
        """Return the FLOPs of a causal transformer whose config describes its layers. None for other models."""
        config = getattr(model, "config", None)
        attention = _attention(config) if config is not None else None
        of_parameters = _of_parameters(model) if attention is not None else None
        return None if attention is None or of_parameters is None else ModelFlops(of_parameters, attention)

    def per_token(self, length: int) -> float:
        """Return the FLOPs of a token in a row of this length."""
        return self.of_parameters + sum(
            flops * (length if window is None else min(window, length)) for flops, window in self.attention
        )


def _attention(config: Any) -> tuple[tuple[float, int | None], ...] | None:
    """Return the attention of each layer, from a config of transformers or of the GPT of `onefold train`."""
    if getattr(config, "is_encoder_decoder", False) or any(hasattr(config, name) for name in _OTHER_INPUTS):
        return None
    layers, heads = (
        _number(config, *names) for names in (("num_hidden_layers", "num_layers"), ("num_attention_heads", "num_heads"))
    )
    hidden = _number(config, "hidden_size", "dim")
    if layers is None or heads is None or hidden is None:
        return None
    queries = _number(config, "head_dim") or hidden // heads
    values = queries
    if nope := _number(config, "qk_nope_head_dim"):  # multi-head latent attention
        queries, values = nope + (_number(config, "qk_rope_head_dim") or 0), _number(config, "v_head_dim") or values
    flops = 6.0 * heads * (queries + values)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and any(getattr(config, name, None) for name in _OTHER_LAYERS):
        return None
    if kinds is None:
        uses_window = getattr(config, "use_sliding_window", True)
        window = _number(config, "sliding_window") if uses_window else None
        return ((flops, window),) * layers
    if any(kind != _FULL and kind not in _WINDOWS for kind in kinds):
        return None
    return tuple((flops, _number(config, _WINDOWS[kind]) if kind in _WINDOWS else None) for kind in kinds)


def _number(config: Any, *names: str) -> int | None:
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)


def _of_parameters(model: nn.Module) -> float | None:
    """Return the FLOPs of matrix products with parameters, or None if the experts of a token are not found."""
    layers = {layer.name: layer for layer in expert_layers(model)}
    of_experts = {name: expert.layer for name, expert in expert_parameters(model, list(layers.values())).items()}
    # An adapter of peft on stacked experts has a part for each of them, in modules around the layer.
    adapted = {name.partition(".base_layer")[0]: name for name in layers if name.endswith(".base_layer")}
    total = 0.0
    for name, parameter, size in _multiplied(model):
        adapter_of = adapted.get(name.partition(".base_layer")[0].partition(".lora_")[0]) if ".lora_" in name else None
        if layer_name := of_experts.get(name, adapter_of):
            layer = layers[layer_name]
            used = experts_per_token(model, layer)
            if used is None:
                return None
            size *= used / layer.num_experts
        total += size * (6 if parameter.requires_grad else 4)
    return total


def _multiplied(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Yield the name, the Parameter and the elements of each parameter, except for tables that are only looked up."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            size = float(unsharded_shape(parameter).numel())
            if (
                not parameter.requires_grad and name == "weight"
            ):  # several elements may be packed into one, as in 4 bits
                size = max(size, float(getattr(module, "in_features", 0) * getattr(module, "out_features", 0)))
            yield f"{prefix}.{name}" if prefix else name, parameter, size
