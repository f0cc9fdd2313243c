"""Which linear layers of a model multiply in FP8, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from onefold.errors import ConfigError
from onefold.fp8.linear import Fp8Linear, Fp8State
from onefold.fp8.scaled_tensor import ALIGNMENT
from onefold.log import logger
from onefold.plan import Fp8Plan

_ROUTERS = ("gate", "router")


@dataclass
class Fp8Layers:
    """The linear layers of a model that multiply in FP8, and the reasons why others do not, by name."""

    layers: dict[str, Fp8Linear] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def of_weights(self, model: nn.Module) -> dict[str, Fp8Linear]:
        """Return the layers by the name of their weight, without weights that other modules share."""
        owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
        return {
            f"{name}.weight".removeprefix("."): layer
            for name, layer in self.layers.items()
            if owners[id(layer.weight)] == 1
        }

    @property
    def num_products(self) -> int:
        """The number of FP8 products so far, without those in compiled graphs."""
        return sum(layer.fp8.num_products for layer in self.layers.values())

    def describe(self) -> str:
        """Describe which layers multiply in FP8, and why others do not, or return an empty string."""
        if not self.layers:
            return ""
        first = next(iter(self.layers.values())).fp8
        kind = "rowwise" if first.by_row else "tensorwise"
        text = f"{len(self.layers)} linear layers, {kind}{', emulated in fp32' if first.emulate else ''}"
        names: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            names.setdefault(reason, []).append(name)
        others = (f"{_some(names_of)} ({reason})" for reason, names_of in names.items())
        return f"{text}; not {', '.join(others)}" if names else text

    def warn_of_unused(self) -> None:
        """Warn of layers that have not multiplied in FP8 although their weights are trained."""
        unused = [
            name
            for name, layer in self.layers.items()
            if layer.training and layer.weight.requires_grad and not (layer.fp8.num_products or layer.fp8.is_compiled)
        ]
        if unused:
            logger.warning(
                "fp8: %s did not multiply in FP8 in the first step. Either the model did not use them, or it reads "
                "their weights instead of calling them. If so, add them to fp8.skip.",
                _some(unused),
            )

    def close(self) -> None:
        """Give the layers their own class again."""
        for layer in self.layers.values():
            vars(layer).pop("fp8", None)
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def convert_layers(model: nn.Module, plan: Fp8Plan | None, device: torch.device) -> Fp8Layers:
    """Make the linear layers of a model multiply in FP8, as far as the plan and their shapes allow."""
    found = Fp8Layers()
    if plan is None:
        return found
    _check_device(device, plan)
    names = {module: name for name, module in model.named_modules()}
    for pattern in plan.skip:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ConfigError(f"fp8.skip: {pattern!r} matches no module. Use a name such as {_example(model)!r}.")
    for name, layer, parent in _linear_layers(model):
        reason = _reason_against(name, layer, parent, model, plan)
        if reason is not None:
            found.reasons[name] = reason
            continue
        layer.fp8 = Fp8State(name, plan.by_row, plan.emulate)  # type: ignore[assignment]
        layer.__class__ = Fp8Linear
        found.layers[name] = layer  # type: ignore[assignment]
    if not found.layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in [*found.reasons.items()][:3])
        raise ConfigError(
            f"fp8.enabled: no layer of the model can multiply in FP8 ({reasons or 'it has no nn.Linear'}). Set "
            "fp8.enabled to false."
        )
    logger.info("FP8: %s", found.describe())
    return found


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
    """Yield the name, the layer and its parent for each plain linear layer."""
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield (f"{path}.{name}" if path else name), child, parent
    if type(model) is nn.Linear:
        yield "", model, model


def _reason_against(name: str, layer: nn.Linear, parent: nn.Module, model: nn.Module, plan: Fp8Plan) -> str | None:
    if any(fnmatchcase(name, pattern) for pattern in plan.skip):
        return "fp8.skip"
    if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
        return f"{layer.in_features} x {layer.out_features} is no multiple of {ALIGNMENT}"
    if _is_head(layer, model):
        return "an output head"
    if name.rpartition(".")[2] in _ROUTERS and any(child == "experts" for child, _ in parent.named_children()):
        return "a router of experts"
    if "forward" in vars(layer):
        return "its forward is replaced"
    if getattr(layer, "parametrizations", None) or not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "its weight is computed"
    return None


def _is_head(layer: nn.Linear, model: nn.Module) -> bool:
    """Return whether a layer computes logits: it shares an embedding, or is the only one of the vocabulary's size."""
    heads = [module.get_output_embeddings() for module in model.modules() if hasattr(module, "get_output_embeddings")]  # type: ignore[operator]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if layer in heads or any(embedding.weight is layer.weight for embedding in embeddings):
        return True
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=0)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each.out_features == vocabulary]
    return layers == [layer]


def _check_device(device: torch.device, plan: Fp8Plan) -> None:
    if plan.emulate or device.type == "meta":
        return
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        if plan.by_row and torch.cuda.get_device_capability(device) < (9, 0):
            raise ConfigError(
                f'fp8.recipe = "rowwise": {torch.cuda.get_device_name(device)} multiplies in FP8 with one scale for '
                'each tensor only. Set it to "tensorwise".'
            )
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type} device"
    raise ConfigError(
        f"fp8.enabled: {name} has no FP8 matrix products. Set fp8.enabled to false, or fp8.emulate to true, which "
        "multiplies in fp32 and is slow."
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _example(model: nn.Module) -> Any:
    return next((name for name, _, _ in _linear_layers(model)), "")
