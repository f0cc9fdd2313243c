"""Merging of PEFT's LoRA adapters into weights, one tensor at a time, without changing the model.

The merged tensors have the names that PEFT's `merge_and_unload` gives them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from onefold.runtime import ParamHandle, handles_of

# Classes of `peft.tuners.lora.layer` whose merge is W + get_delta_weight(adapter).
_MERGEABLE = {"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d"}


class MergedAdapters:
    """The tensors of a model by their merged names, and the adapters of each tensor."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._layers: dict[int, list[tuple[Any, str]]] = {}
        # A model can have PEFT's layers only if PEFT is imported.
        if "peft" in sys.modules:
            for path, module in modules.items():
                self._find(path, module)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            merged = _merged_name(name, modules) if "peft" in sys.modules else name
            if merged is not None and self.tensors.setdefault(merged, tensor) is not tensor:
                raise ValueError(f"merge_adapters: two tensors would be called {merged}; one of them is {name}")

    def _find(self, path: str, layer: Any) -> None:
        """Check one module, and record the parameters that its adapters change."""
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import other
        from peft.utils.other import ModulesToSaveWrapper

        kind = f"{path} is a {type(layer).__module__}.{type(layer).__name__}"
        wrapper = getattr(other, "AuxiliaryTrainingWrapper", ModulesToSaveWrapper)  # earlier releases lack the former
        if isinstance(layer, wrapper) and not isinstance(layer, ModulesToSaveWrapper):
            raise _unsupported(kind)
        if isinstance(layer, PeftModel) and getattr(layer, "prompt_encoder", None):
            raise _unsupported(f"{path or 'the model'} has a prompt encoder")
        if not isinstance(layer, BaseTunerLayer):
            return
        known = isinstance(layer, LoraLayer) and type(layer).__module__ == "peft.tuners.lora.layer"
        if not known or type(layer).__name__ not in _MERGEABLE:
            raise _unsupported(kind)
        variants: Mapping[str, Any] = getattr(layer, "lora_variant", {})
        for adapter in _adapters(layer):
            if adapter in variants:
                raise _unsupported(f"{path} has a {type(variants[adapter]).__name__}")
        base: Any = layer.get_base_layer()
        self._layers.setdefault(id(base.weight), []).append((layer, "weight"))
        if any(getattr(layer, "lora_bias", {}).get(adapter) for adapter in _adapters(layer)):
            if getattr(base, "bias", None) is None:
                raise ValueError(f"merge_adapters: {path} has lora_bias=True, but its base layer has no bias")
            self._layers.setdefault(id(base.bias), []).append((layer, "bias"))

    def handles(self, tensors: Iterable[torch.Tensor]) -> list[ParamHandle]:
        """Return the handles of tensors and of the adapters that are merged into them, in one order on all ranks."""
        own = list(tensors)
        layers = [layer for tensor in own for layer, _ in self._layers.get(id(tensor), ())]
        return handles_of([*own, *(parameter for layer in layers for parameter in layer.parameters())])

    @torch.no_grad()
    def merge(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its adapters merged, as PEFT computes it: a copy, or the tensor if it has none."""
        value = tensor.detach()
        changes = [(*each, adapter) for each in self._layers.get(id(tensor), ()) for adapter in _adapters(each[0])]
        if changes:
            value = value.clone()
        for layer, part, adapter in changes:
            if part == "weight":
                value += layer.get_delta_weight(adapter)
            elif layer.lora_bias[adapter]:
                value += layer.lora_B[adapter].bias * layer.scaling[adapter]
        return value


def _adapters(layer: Any) -> list[str]:
    """Return the adapters that `merge_and_unload` would merge into a layer."""
    active = [name for name in layer.active_adapters if name not in layer.merged_adapters]
    return [name for name in active if name in layer.lora_A or name in layer.lora_embedding_A]


def _merged_name(name: str, modules: Mapping[str, Any]) -> str | None:
    """Return the name of a tensor after `merge_and_unload`, or None if the tensor does not exist then."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    path, kept, parts = "", [], name.split(".")
    skip = 0
    for index, part in enumerate(parts):
        module = modules[path]
        path = f"{path}.{part}" if path else part
        if skip:
            skip -= 1
        elif (isinstance(module, PeftModel) and part == "base_model") or (
            isinstance(module, BaseTuner) and part == "model"
        ):
            continue
        elif isinstance(module, BaseTunerLayer):
            if part != "base_layer":
                return None
        elif isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters
            used = "original_module" if not any(each in module.modules_to_save for each in active) else ""
            if part != (used or "modules_to_save") or (not used and parts[index + 1] not in active):
                return None
            skip = 0 if used else 1
        else:
            kept.append(part)
    return ".".join(kept)


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"merge_adapters: {what}, which cannot be merged. LoRA on linear, embedding and convolution layers can. "
        "Pass merge_adapters=False to stream the adapters separately."
    )
