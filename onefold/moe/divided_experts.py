"""`ExpertParallel`: the expert layers of a model, divided over ranks.

[Note: experts of a rank]
With n = `expert_parallel_size`, the W ranks are n blocks of W / n neighbours. The ranks of block i compute with part i
of the experts of each layer: experts i * E / n to (i + 1) * E / n. One rank of each block together have all experts.
These ranks exchange tokens (`expert_group`).

           block 0: experts 0 1        block 1: experts 2 3
            rank 0      rank 1          rank 2      rank 3
              ^           ^               ^           ^
              +-----------|--- tokens ----+           |
                          +------- tokens ------------+

Stacked experts are one flat parameter, sharded over all ranks in every stage but 0, so that masters, states and
checkpoints are those of a run without expert parallelism. Its shards are in the order of the experts, so the shards of
block i are part i. A forward all-gathers part i inside block i, and the gradient of part i is reduced there. It is the
sum over the tokens of all ranks, like the gradient of any other parameter, so the same factor averages it, and the norm
counts each shard once. Experts that have no whole shards, such as small biases, are not divided: they are all-gathered
like other parameters, and a rank computes with its part of them.

Experts in a ModuleList are one flat parameter too, in which each part is padded to whole shards. The Parameters of
experts of other ranks are placeholders while part i is gathered.

[Note: the path of a token]
A router has chosen k experts for each token. A rank sorts the k copies of its tokens by expert, sends the number of
tokens of each expert, and then the tokens. The layer computes the tokens that have arrived, with a weight of 1, and
sends the results back. The rank of the token multiplies them by the weights of the router, and adds the k results. In
backward, gradients take the same path. A rank whose experts get no token computes one row of zeros, so that its
gradients are ready when those of other ranks are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onefold.comm import Group, Ledger, expert_group
from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.expert_ranks import ExpertRanks
from onefold.moe.listed_experts import ListedExperts
from onefold.moe.stacked_experts import StackedExperts
from onefold.moe.token_exchange import TokenExchange
from onefold.runtime.torch_internals import outside_compiler


class ExpertParallel:
    """The ranks that divide the experts of a model, as `engine.expert_parallel`."""

    def __init__(
        self, layers: Sequence[ExpertLayer], group: Group | None, ledger: Ledger, device: torch.device
    ) -> None:
        self.size, self.rank = (group.size, group.rank) if group is not None else (1, 0)
        self._forwards: list[_DividedForward] = []
        if group is not None:
            ranks = ExpertRanks(group, ledger, device)
            self._forwards = [_DividedForward(layer, number, ranks) for number, layer in enumerate(layers)]

    def describe(self) -> str:
        """Describe the layers and the parts of their experts, or return an empty string if nothing is divided."""
        numbers = sorted({forward.num_experts for forward in self._forwards})
        if not numbers:
            return ""
        shown = " or ".join(map(str, numbers))
        return f"{len(self._forwards)} layers of {shown} experts in {self.size} parts, of which this rank computes one"

    def close(self) -> None:
        """Restore the forwards of the layers."""
        while self._forwards:
            self._forwards.pop().restore()


def make_expert_parallel(
    layers: Sequence[ExpertLayer], size: int, group: Group, ledger: Ledger, device: torch.device
) -> ExpertParallel:
    """Return the expert parallelism of an engine on the ranks of `group`. All ranks call this together."""
    return ExpertParallel(layers, expert_group(size, group) if size > 1 else None, ledger, device)


class _DividedForward:
    """The forward of an expert layer, whose tokens are computed by other ranks. See [Note: the path of a token]."""

    def __init__(self, layer: ExpertLayer, number: int, ranks: ExpertRanks) -> None:
        self._layer = layer
        self._was_set_on_module = "forward" in layer.module.__dict__
        self._forward: Callable[..., Any] = layer.module.forward
        compute = ListedExperts if layer.is_list else StackedExperts
        self._compute = compute(layer, TokenExchange(layer, number, ranks), self._forward)
        functools.update_wrapper(self, self._forward, updated=())
        layer.module.forward = self  # type: ignore[method-assign]

    @property
    def num_experts(self) -> int:
        return self._layer.num_experts

    def restore(self) -> None:
        """Restore the original forward of the module, unless the program has replaced this one."""
        if self._layer.module.__dict__.get("forward") is self:
            if self._was_set_on_module:
                self._layer.module.forward = self._forward  # type: ignore[method-assign]
            else:
                del self._layer.module.forward

    def __reduce__(self) -> Any:
        """Copy and pickle as the original forward, because no engine manages the copy of a model."""
        return _same, (self._forward,)

    @outside_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


def _same(forward: Any) -> Any:
    return forward
