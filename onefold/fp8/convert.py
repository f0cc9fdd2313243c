"""Which linear layers of a model multiply in FP8, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

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
    """The linear layers of a model that multiply in FP8, and why other modules with matrices do not, by name."""

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
        """Warn of layers in training mode that have not multiplied in FP8."""
        unused = [
            name
            for name, layer in self.layers.items()
            if layer.training and not (layer.fp8.num_products or layer.fp8.is_compiled)
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


def convert_layers(
    model: nn.Module,
    plan: Fp8Plan | None,
    device: torch.device,
    shape_of: Callable[[torch.Tensor], torch.Size] = lambda parameter: parameter.shape,
) -> Fp8Layers:
    """Make the linear layers of a model multiply in FP8, as far as the plan and their shapes allow.

    `shape_of` returns the unsharded shape of a parameter.
    """
    found = Fp8Layers()
    if plan is None:
        return found
    _check_device(device, plan)
    linear = _linear_layers(model)
    for pattern in plan.skip:
        if not any(_is_skipped(name, [pattern]) for name in linear):
            example = next(iter(linear), "")
            raise ConfigError(f"fp8.skip: {pattern!r} matches no linear layer. Use a name such as {example!r}.")
    heads = _heads(model)
    for name, layer in linear.items():
        reason = _reason_against(name, layer, model, heads, plan)
        if reason is not None:
            found.reasons[name] = reason
            continue
        layer.fp8 = Fp8State(name, layer.weight, plan.by_row, plan.emulate)  # type: ignore[assignment]
        layer.__class__ = Fp8Linear
        found.layers[name] = layer  # type: ignore[assignment]
    for name, module in model.named_modules():
        shapes = [shape_of(parameter) for parameter in module.parameters(recurse=False)]
        has_matrix = any(sum(size > 1 for size in shape) > 1 for shape in shapes)
        if has_matrix and not isinstance(module, nn.Linear | nn.Embedding):
            found.reasons[name] = f"a {type(module).__name__}"
    if not found.layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in [*found.reasons.items()][:3])
        raise ConfigError(
            f"fp8.enabled: no layer of the model can multiply in FP8 ({reasons or 'it has no nn.Linear'}). Set "
            "fp8.enabled to false."
        )
    logger.info("FP8: %s", found.describe())
    return found


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _reason_against(
    name: str, layer: nn.Linear, model: nn.Module, heads: Sequence[nn.Module], plan: Fp8Plan
) -> str | None:
    path, _, own_name = name.rpartition(".")
    if _is_skipped(name, plan.skip):
        return "fp8.skip"
    if isinstance(layer, Fp8Linear):
        return "in FP8 by another engine"
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}"
    if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
        return f"{layer.in_features} x {layer.out_features} is no multiple of {ALIGNMENT}"
    if any(head is layer for head in heads):
        return "an output head"
    if own_name in _ROUTERS and any(child == "experts" for child, _ in model.get_submodule(path).named_children()):
        return "a router of experts"
    if "forward" in vars(layer):
        return "its forward is replaced"
    if getattr(layer, "parametrizations", None) or not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "its weight is computed"
    return None


def _is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the name of a layer or of a module around it."""
    parts = name.split(".")
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return any(fnmatchcase(path, pattern) for path in paths for pattern in patterns)


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the layers that compute logits: they share an embedding, or are the only one of the vocabulary's size."""
    modules = list(model.modules())
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    tables = {id(embedding.weight) for embedding in embeddings}
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=0)
    of_vocabulary = [layer for layer in linear if layer.out_features == vocabulary]
    heads = [module.get_output_embeddings() for module in modules if hasattr(module, "get_output_embeddings")]  # type: ignore[operator]
    heads += [layer for layer in linear if id(layer.weight) in tables]
    return heads + (of_vocabulary if len(of_vocabulary) == 1 else [])


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
