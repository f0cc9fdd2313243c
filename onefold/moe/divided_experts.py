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
backward, gradients take the same path. The shared expert of a block computes while the first exchange is in flight
([Note: shared experts compute early]). A rank whose experts get no token computes one row of zeros, or no rows with
experts in a list, so that its gradients are ready when those of other ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from onefold.comm import Group, Ledger, expert_group
from onefold.moe.adapted_experts import Active, adapt_experts
from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.expert_ranks import ExpertRanks
from onefold.moe.listed_experts import ListedExperts
from onefold.moe.replaced_forward import ReplacedForward
from onefold.moe.shared_experts import SharedExperts, shared_experts_of
from onefold.moe.stacked_experts import StackedExperts
from onefold.moe.token_exchange import TokenExchange


class ExpertParallel:
    """The ranks that divide the experts of a model, as `engine.expert_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertLayer],
        described: str,
        group: Group | None,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        self.size, self.rank = (group.size, group.rank) if group is not None else (1, 0)
        self._described = described
        self._forwards: list[ReplacedForward] = []
        active: dict[nn.Module, Active] = {}
        if group is not None:
            ranks = ExpertRanks(group, ledger, device)
            for number, layer in enumerate(layers):
                active[layer.module] = dict.fromkeys(layer.stacked)
                shared = shared_experts_of(model, layer)
                self._forwards += shared.forwards if shared is not None else []
                make = _divided(layer, TokenExchange(layer, number, ranks), active[layer.module], shared)
                self._forwards.append(ReplacedForward(layer.module, make))
        self._forwards += adapt_experts(model, active)

    def describe(self) -> str:
        """Describe the expert layers, or return an empty string if there are none."""
        parts = f", in {self.size} parts, of which this rank computes one" if self.size > 1 else ""
        return f"{self._described}{parts}" if self._described else ""

    def close(self) -> None:
        """Restore the forwards of the layers."""
        while self._forwards:
            self._forwards.pop().restore()


def make_expert_parallel(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    described: str,
    size: int,
    group: Group,
    ledger: Ledger,
    device: torch.device,
) -> ExpertParallel:
    """Return the expert parallelism of an engine on the ranks of `group`. All ranks call this together.

    `described` is what `describe_layers` returned before the parameters were sharded.
    """
    return ExpertParallel(model, layers, described, expert_group(size, group) if size > 1 else None, ledger, device)


def _divided(
    layer: ExpertLayer, exchange: TokenExchange, active: Active, shared: SharedExperts | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that makes the forward of a layer whose tokens are computed by other ranks."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        if layer.is_list:
            return ListedExperts(layer, exchange, forward)
        return StackedExperts(layer, exchange, forward, active, shared)

    return make
