"""`SharedExperts`: the expert of a block that computes every token, while an exchange of tokens is in flight.

[Note: shared experts compute early]
A block such as that of DeepSeek-V3 adds the results of its routed experts and of one shared expert:

    hidden = self.experts(hidden.view(-1, width), index, weights).view(*shape) + self.shared_experts(hidden)

With divided experts, `experts` sends the tokens to other ranks, computes `shared_experts` with the input of the block,
and then waits for the tokens of other ranks. The block's own call of `shared_experts` gets that output. Autograd runs
later operations first, so in backward the gradients of tokens are exchanged while the backward of the shared expert
runs.

The early output is used if the block passes its input, unchanged, under the same grad mode and autocast. Otherwise the
shared expert computes again, and later calls of the block compute no early output. A checkpoint must save the same
tensors whenever it runs the block again, so that in a checkpoint the block keeps computing an early output.

A block that calls its shared expert before its routed experts, such as that of Qwen2-MoE, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.replaced_forward import TracedForward
from onefold.runtime.torch_internals import inside_checkpoint

_NAMES = ("shared_experts", "shared_expert")


class SharedExperts:
    """The shared expert of a block. The routed experts of the block call `compute_early`."""

    def __init__(self, block: nn.Module, module: nn.Module) -> None:
        self._module, self._original = module, module.forward
        self._input: Tensor | None = None
        """The input of the block while it runs, until its shared expert is called."""
        self._output: Tensor | None = None
        """The output that was computed early, until the block asks for it."""
        self._conditions: tuple[Any, ...] = ()
        """The conditions under which `_output` was computed."""
        self._is_unused = False
        """Whether the block did not ask for an output that was computed early."""
        self.forwards = [TracedForward(block, self._run_block), TracedForward(module, self._run_shared)]

    def compute_early(self, tokens: Tensor) -> None:
        """Compute the output for the input of the block, if these are its tokens and it has no output yet."""
        given = self._input
        if given is None or self._is_unused or self._output is not None or _has_hooks(self._module):
            return
        # Inference tensors have no version, which shows a change of their values.
        if given.data_ptr() == tokens.data_ptr() and given.numel() == tokens.numel() and not given.is_inference():
            self._conditions = _conditions_of(given)
            self._output = self._original(given)

    def _run_block(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            first = next(iter((*args, *kwargs.values())), None)
            self._input = first if isinstance(first, Tensor) else None
            try:
                result = forward(*args, **kwargs)
                # A checkpoint that runs the block again may end it by an exception before the shared expert is called.
                self._is_unused |= self._output is not None and not inside_checkpoint()
                return result
            finally:
                self._input = self._output = None

        return compute

    def _run_shared(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            given, output = self._input, self._output
            is_same_call = given is not None and len(args) == 1 and args[0] is given and not kwargs
            if output is not None and is_same_call and self._conditions == _conditions_of(args[0]):
                self._output = None
                return output
            self._input = None  # The block calls its shared expert first, with other tokens, or under other conditions.
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


def _conditions_of(tokens: Tensor) -> tuple[Any, ...]:
    """Return the version of a tensor, and the modes that an output depends on."""
    kind = tokens.device.type
    autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return tokens._version, torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if autocasts else None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its forward: hooks of the program, or of a unit."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    )
