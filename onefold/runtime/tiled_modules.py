"""Modules that compute in tiles of tokens: MLPs, whose hidden layers would be the largest activations of a block.

A tile is a call in chunks ([Note: a call in chunks] in `chunked_call.py`) over the tokens of all samples. Hooks of the
module run once for all tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from onefold.config import ConfigError
from onefold.log import logger
from onefold.plan import UnitCut
from onefold.plan.cut import named_blocks
from onefold.runtime.batch_chunks import ROWS_OF_CHUNK, find_lost_gradient, relative_difference, rounding_of
from onefold.runtime.chunked_call import ChunkedCall, RandomState, cut_sizes
from onefold.runtime.torch_internals import outside_compiler, tensors_in

_KEY = "onefold.tiled_mlp"
_OTHERWISE = f"Name other modules in {_KEY}_modules, or leave out tiled_mlp."
# Layers that round to FP8 with a scale for all tokens of a tile, and the difference that this explains (3 bits).
_FP8_CLASSES, _FP8_ROUNDING = ("Fp8", "Float8"), 0.25
# The names of the layers of MLPs, of which a module must have one set.
_LAYERS = (
    {"up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"fc1", "fc2"}, {"c_fc", "c_proj"}, {"w1", "w2"},
    {"fc_in", "fc_out"}, {"dense_h_to_4h", "dense_4h_to_h"}, {"wi", "wo"}, {"wi_0", "wo"}, {"lin1", "lin2"},
)  # fmt: skip
_OTHER_LAYERS = {"gate_proj", "w3", "wi_1"}
# Classes whose outputs for a token depend on other tokens.
_MIXING = (_BatchNorm, _InstanceNorm, _ConvNd, nn.GroupNorm, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def find_tiled_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules that match `names`, or of the MLPs of a model without experts.

    Raise if there are none, or if one contains a layer that mixes tokens.
    """
    if names:
        found = sorted(named_blocks(model, names, f"{_KEY}_modules"))
    else:
        mlps = [path for path, module in model.named_modules() if _is_mlp(module)]
        found = [path for path in mlps if not any(f"{path}.".startswith(f"{each}.") for each in _mixtures(model))]
    if not found:
        raise ConfigError(
            f"{_KEY}: no MLP is found in a {type(model).__name__} by the names of its layers (up_proj and down_proj, "
            f"fc1 and fc2, ...){' outside of experts' if _mixtures(model) else ''}. Name the modules that compute each "
            f"token separately in {_KEY}_modules, or leave out tiled_mlp."
        )
    for path in found:
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            if isinstance(module, _MIXING) or _has_experts(name, module):
                raise ConfigError(
                    f"{_KEY}: {name} is a {type(module).__name__}, whose output for a token depends on other tokens, "
                    f"so {path} cannot be computed in tiles. {_OTHERWISE}"
                )
    return found


def check_tiled_modules(model: nn.Module, names: Sequence[str], cuts: Iterable[UnitCut]) -> None:
    """Raise if a module cannot be computed in tiles, or would be gathered once per tile."""
    left_out = [] if names else _mixtures(model)
    if left_out:
        logger.info("%s: experts are computed whole, in %s", _KEY, ", ".join(left_out))
    blocks = {found.module: set(found.parameters) for found in cuts}
    for path in find_tiled_modules(model, names):
        inner = next((block for block in blocks if block.startswith(f"{path}.")), None)
        own = {id(parameter) for parameter in model.get_submodule(path).parameters()}
        of_root = blocks.get("", set()) if len(blocks) > 1 else set()
        if inner is None and any(id(p) in own for name, p in model.named_parameters() if name in of_root):
            inner = "a part of the root unit"
        if inner is not None:
            raise ConfigError(
                f"{_KEY}: {path} contains {inner}, which would be gathered for each tile. Name {path}, or the block "
                "around it, in onefold.units."
            )


def _mixtures(model: nn.Module) -> list[str]:
    """Return the paths of the outermost mixtures of experts."""
    found: list[str] = []
    for path, module in model.named_modules():
        if _has_experts(path, module) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def _has_experts(path: str, module: nn.Module) -> bool:
    return "experts" in module._modules or path.rpartition(".")[2] == "experts"


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module is made of the layers of an MLP, and otherwise of norms and layers without parameters."""
    children = module._modules
    layers = next((names for names in _LAYERS if names <= children.keys()), None)
    if layers is None or any(True for _ in module.parameters(recurse=False)):
        return False
    others = (child for name, child in children.items() if name not in layers | _OTHER_LAYERS)
    return all(child is None or "Norm" in type(child).__name__ or not list(child.parameters()) for child in others)


class TiledModules:
    """The modules of one engine that compute in tiles. `num_tiles` is None for a number that depends on the tokens."""

    def __init__(self, model: nn.Module, names: Sequence[str], num_tiles: int | None) -> None:
        paths = find_tiled_modules(model, names)
        self._forwards = [TiledForward(path, model.get_submodule(path), num_tiles) for path in paths]

    def remove(self) -> None:
        """Restore the forwards of the modules."""
        while self._forwards:
            self._forwards.pop().remove()


class TiledForward:
    """The forward of a module that computes tokens in tiles. It refers to the module, but not to the engine."""

    def __init__(self, name: str, module: nn.Module, num_tiles: int | None) -> None:
        self._name, self._module, self._num_tiles = name, module, num_tiles
        self._set_on_module = module.__dict__.get("forward")
        self._function: Callable[..., Any] = module.forward
        self._parameters = list(module.parameters())
        self._is_compared = self._is_inspected = False
        functools.update_wrapper(self, self._function, updated=())
        module.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the forward of the module."""
        self._module.__dict__.pop("forward", None)
        if self._set_on_module is not None:
            self._module.__dict__["forward"] = self._set_on_module

    def __reduce__(self) -> Any:
        """Copy and pickle as the original forward, because no engine manages the copy of a model."""
        return _same, (self._function,)

    @outside_compiler
    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(True for value in (args, kwargs) for _ in tensors_in(value)):
            raise RuntimeError(
                f"{_KEY}: {self._name} is called with more than one tensor, and which of them have a row for each "
                f"token is unknown. {_OTHERWISE}"
            )
        tokens = hidden.reshape(-1, hidden.shape[-1])
        num_tiles = self._num_tiles if self._num_tiles is not None else -(-len(tokens) // ROWS_OF_CHUNK)
        # A reentrant checkpoint computes its first forward without gradients.
        trains = torch.is_grad_enabled() or self._module.training
        if not trains or (num_tiles <= 1 and self._num_tiles is None):
            return self._function(hidden, *args, **kwargs)

        # The graph holds this function, so it must not refer to the input.
        ones = (1,) * (hidden.dim() - 2)

        def of_tile(tile: Tensor) -> Tensor:
            part = tile.view(*ones, *tile.shape)
            found = self._function(part, *args, **kwargs)
            if not isinstance(found, Tensor) or found.shape[:-1] != part.shape[:-1]:
                what = f"of shape {list(found.shape)}" if isinstance(found, Tensor) else f"({type(found).__name__})"
                raise RuntimeError(
                    f"{_KEY}: {self._name} returns an output {what} for an input of shape {list(part.shape)}, but must "
                    f"return one row for each token. {_OTHERWISE}"
                )
            return found.reshape(len(tile), found.shape[-1])

        if not self._is_compared and not hidden.is_meta:
            self._is_compared = True
            self._compare(of_tile, tokens.detach(), cut_sizes(len(tokens), num_tiles))
        call = ChunkedCall(self._name, of_tile, (tokens,), {}, otherwise="leave out onefold.tiled_mlp")
        inspect = None if self._is_inspected else self._inspect
        output: Tensor = call.run(num_tiles, [tokens], self._parameters, inspect, is_recomputed=True)
        return output.view(*hidden.shape[:-1], output.shape[-1])

    @torch.no_grad()
    def _compare(self, of_tile: Callable[[Tensor], Tensor], tokens: Tensor, sizes: list[int]) -> None:
        """Raise if the last tile computed alone differs from its part of the last two, without dropout."""
        flags, before = [(inner, inner.training) for inner in self._module.modules()], RandomState([tokens])
        last, pair = sizes[-1], sum(sizes[-2:])
        try:
            for inner, _ in flags:
                inner.training = False
            alone, together = of_tile(tokens[-last:]), of_tile(tokens[-pair:])[-last:]
        finally:
            for inner, training in flags:
                inner.training = training
            before.restore()
        difference, allowed = relative_difference(alone, together), rounding_of([tokens, *self._parameters])
        if any(type(inner).__name__.startswith(_FP8_CLASSES) for inner in self._module.modules()):
            allowed = _FP8_ROUNDING
        if not difference <= allowed:
            raise RuntimeError(
                f"{_KEY}: {self._name} mixes tokens: the last {last} tokens differ from their part of the last {pair} "
                f"by {difference:.2g} (relative), but rounding explains {allowed:.2g}. {_OTHERWISE}"
            )

    def _inspect(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Raise if a recomputed tile loses the gradient of a tensor."""
        self._is_inspected = True
        problem = find_lost_gradient(self._name, self._module, outputs, targets)
        if problem:
            raise RuntimeError(f"{_KEY}: {problem}, or leave out tiled_mlp.")


def _same(value: Any) -> Any:
    return value
