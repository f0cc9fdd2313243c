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

[Note: the path of a token]
A router has chosen k experts for each token. A rank sorts the k copies of its tokens by expert, sends the number of
tokens of each expert, and then the tokens. The layer computes the tokens that have arrived, with a weight of 1, and
sends the results back. The rank of the token multiplies them by the weights of the router, and adds the k results. In
backward, gradients take the same path. A rank whose experts get no token computes one row of zeros, so that its
gradients are ready when those of other ranks are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onefold.comm import Group, Ledger, expert_group
from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.expert_ranks import ExchangeTokens, ExpertRanks
from onefold.runtime.expert_parts import part_attached
from onefold.runtime.torch_internals import outside_compiler

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        self._layer, self._number, self._ranks = layer, number, ranks
        self._num_own = layer.num_experts // ranks.size
        self._was_set_on_module = "forward" in layer.module.__dict__
        self._forward: Callable[..., Tensor] = layer.module.forward
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
    def __call__(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        index, weights = (*routing, *named.values())
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = index.reshape(-1, index.shape[-1]), weights.reshape(-1, index.shape[-1])
        order = index.flatten().argsort(stable=True)
        sent, received, experts = self._route(tokens, index)
        copies = tokens[order // index.shape[1]]
        arrived: Tensor = ExchangeTokens.apply(self._ranks, copies, sent, received, None)  # type: ignore[no-untyped-call]
        computed = self._compute(arrived, experts, weights.dtype)
        trains = tokens.requires_grad or any(each.requires_grad for each in self._layer.module.parameters())
        anchor = tokens.new_zeros((), requires_grad=True) if trains and torch.is_grad_enabled() else None
        returned: Tensor = ExchangeTokens.apply(self._ranks, computed, received, sent, anchor)  # type: ignore[no-untyped-call]
        results = returned[order.argsort()].view(*index.shape, tokens.shape[1])
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype).view(hidden_states.shape)

    def _route(self, tokens: Tensor, index: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return the numbers of rows sent to and received from each rank, and the own expert of each received row."""
        if tokens.is_meta:  # a dry run assumes that every expert gets as many tokens
            even = [len(tokens) * index.shape[1] // self._ranks.size] * self._ranks.size
            even[0] += len(tokens) * index.shape[1] - sum(even)
            return even, even, index.new_zeros(sum(even))
        counts = torch.bincount(index.flatten(), minlength=self._layer.num_experts + 1)
        has_gradient = int(torch.is_grad_enabled()) + int(tokens.requires_grad)
        header = [self._number, tokens.shape[1], index.shape[1], _DTYPES.index(tokens.dtype), has_gradient]
        rows = self._ranks.gather_routing(torch.cat([counts.new_tensor(header), counts]))
        self._check([row[: len(header)] for row in rows])
        if any(row[-1] for row in rows):
            raise ValueError(
                f"expert parallelism: {self._layer.name} was called with expert {self._layer.num_experts}, which does "
                "not exist, for tokens without an expert. Set onefold.expert_parallel_size to 1."
            )
        by_rank = [[row[len(header) :][at : at + self._num_own] for at in self._starts] for row in rows]
        own = self._ranks.rank
        arriving = [parts[own] for parts in by_rank]
        experts = torch.arange(self._num_own).repeat(len(arriving)).repeat_interleave(torch.tensor(arriving).flatten())
        return [sum(part) for part in by_rank[own]], [sum(part) for part in arriving], experts.to(tokens.device)

    @property
    def _starts(self) -> range:
        """The first expert of each rank."""
        return range(0, self._layer.num_experts, self._num_own)

    def _check(self, headers: list[list[int]]) -> None:
        """Raise if ranks route different kinds of tokens, before they send them."""
        if any(header != headers[0] for header in headers):
            shown = "; ".join(
                f"rank {self._ranks.group.global_rank(rank)}: expert layer {number}, {width} features, {k} experts for "
                f"each, {_DTYPES[dtype]}, {('no gradients', 'no gradients of tokens', 'gradients')[has_gradient]}"
                for rank, (number, width, k, dtype, has_gradient) in enumerate(headers)
            )
            raise ValueError(
                f"expert parallelism: the ranks call different layers, or with different tokens; this rank calls "
                f"{self._layer.name}, layer {self._number} ({shown}). Run the same layers on all ranks, in the same "
                "mode."
            )

    def _compute(self, tokens: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply this rank's experts to the received tokens."""
        num_tokens = len(tokens)
        if not num_tokens:
            tokens, experts = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), experts.new_zeros(1)
        with self._own_experts():
            output = self._forward(tokens, experts.unsqueeze(1), tokens.new_ones(len(tokens), 1, dtype=dtype))
        if output.shape != tokens.shape:
            raise ValueError(
                f"expert parallelism: {self._layer.name} returned a tensor of shape {tuple(output.shape)} for tokens "
                f"of shape {tuple(tokens.shape)}. Return one row for each token."
            )
        return output[:num_tokens]

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Give the module the number of this rank's experts, and their part of parameters that have all experts."""
        layer, module = self._layer, self._layer.module
        found = {name: parameter for name in layer.stacked if (parameter := module._parameters[name]) is not None}
        setattr(module, layer.count, self._num_own)
        try:
            with part_attached(found.values()):
                for name, parameter in found.items():
                    if len(parameter) not in (layer.num_experts, self._num_own):
                        raise RuntimeError(
                            f"expert parallelism: {layer.name}.{name} has {len(parameter)} experts here, because "
                            "another engine divides it in other parts. Use one expert_parallel_size for both."
                        )
                    first = self._ranks.rank * self._num_own if len(parameter) == layer.num_experts else 0
                    # A view, because autograd would save the Parameter itself, whose values are hidden in backward.
                    module._parameters[name] = parameter.narrow(0, first, self._num_own)  # type: ignore[assignment]
                yield
        finally:
            module._parameters.update(found)
            setattr(module, layer.count, layer.num_experts)


def _same(forward: Any) -> Any:
    return forward
