"""`SharedExperts`: the expert of a block that computes every token, while tokens travel to the other experts.

[Note: shared experts compute early]
A block such as that of DeepSeek-V3 adds the results of its routed experts and of one shared expert:

    hidden = self.experts(hidden.view(-1, width), index, weights).view(*shape) + self.shared_experts(hidden)

With divided experts, `experts` sends the tokens to other ranks, computes `shared_experts` with the input of the block,
and then waits for the tokens of other ranks. The block's own call of `shared_experts` gets that output. Autograd runs
later operations first, so in backward the gradients of tokens travel while the backward of the shared expert runs.

A block that calls its shared expert before its routed experts, such as that of Qwen2-MoE, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.replaced_forward import TracedForward

_NAMES = ("shared_experts", "shared_expert")


class SharedExperts:
    """The shared expert of a block. The routed experts of the block call `compute_early`."""

    def __init__(self, block: nn.Module, module: nn.Module) -> None:
        self._module, self._original = module, module.forward
        self._input: Tensor | None = None
        """The input of the block while it runs, until its shared expert is called."""
        self._output: Tensor | None = None
        """The output that was computed early, until the block asks for it."""
        self._is_unused = False
        """Whether the block did not ask for an output that was computed early."""
        self.forwards = [TracedForward(block, self._run_block), TracedForward(module, self._run_shared)]

    def compute_early(self, tokens: Tensor) -> None:
        """Compute the output for the input of the block, if these are its tokens and it has no output yet."""
        given = self._input
        if given is None or self._is_unused or self._output is not None or _has_hooks(self._module):
            return
        if given.data_ptr() == tokens.data_ptr() and given.numel() == tokens.numel():
            self._output = self._original(given)

    def _run_block(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            first = next(iter((*args, *kwargs.values())), None)
            self._input = first if isinstance(first, Tensor) else None
            try:
                return forward(*args, **kwargs)
            finally:
                self._is_unused |= self._output is not None
                self._input = self._output = None

        return compute

    def _run_shared(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if self._output is not None and len(args) == 1 and args[0] is self._input and not kwargs:
                output, self._output = self._output, None
                return output
            self._input = None  # The block calls its shared expert first, or with other tokens.
            return forward(*args, **kwargs)

        return compute


def shared_experts_of(model: nn.Module, layer: ExpertLayer) -> SharedExperts | None:
    """Return the shared expert of the block of an expert layer, or None without one."""
    parent, separator, _ = layer.name.rpartition(".")
    if layer.is_list or not layer.name:
        return None
    block = model.get_submodule(parent) if separator else model
    found = [module for name, module in block.named_children() if name in _NAMES and module is not layer.module]
    return SharedExperts(block, found[0]) if len(found) == 1 else None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its forward: hooks of the program, or of a unit."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    )
