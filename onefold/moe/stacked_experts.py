"""Expert layers with stacked experts, whose forward is called with routed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onefold.moe.adapted_experts import Active, adapted
from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.shared_experts import SharedExperts
from onefold.moe.token_exchange import Arriving, TokenExchange
from onefold.runtime.expert_parts import part_attached


class StackedExperts:
    """The forward of a layer with stacked experts, which is called for the own experts of each rank."""

    def __init__(
        self,
        layer: ExpertLayer,
        exchange: TokenExchange,
        forward: Callable[..., Tensor],
        adapters: Active,
        shared: SharedExperts | None,
    ) -> None:
        self._layer, self._exchange, self._forward = layer, exchange, forward
        self._adapters, self._shared = adapters, shared

    def __call__(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        index, weights = (*routing, *named.values())
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = index.reshape(-1, index.shape[-1]), weights.reshape(-1, index.shape[-1])
        order = index.flatten().argsort(stable=True)
        counts = () if index.is_meta else torch.bincount(index.flatten(), minlength=self._layer.num_experts + 1)
        trains = (
            tokens.requires_grad
            or any(factors is not None for factors in self._adapters.values())
            or any(each.requires_grad for each in self._layer.module.parameters())
        )

        def compute(arrived: Tensor, arriving: Arriving) -> Tensor:
            return self._compute(arrived, arriving, weights.dtype)

        def compute_shared() -> None:
            if self._shared is not None:
                self._shared.compute_early(tokens)

        copies = tokens[order // index.shape[1]]
        returned = self._exchange.compute(copies, counts, index.shape[1], trains, compute, compute_shared)
        results = returned[order.argsort()].view(*index.shape, tokens.shape[1])
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype).view(hidden_states.shape)

    def _compute(self, tokens: Tensor, arriving: Arriving, dtype: torch.dtype) -> Tensor:
        """Apply this rank's experts to the received tokens."""
        own = torch.arange(self._exchange.num_own).repeat(len(arriving))
        experts = own.repeat_interleave(torch.tensor(arriving).flatten()).to(tokens.device)
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
        layer, module, num_own = self._layer, self._layer.module, self._exchange.num_own
        found = {name: parameter for name in layer.stacked if (parameter := module._parameters[name]) is not None}
        setattr(module, layer.count, num_own)
        try:
            with part_attached(found.values()):
                for name, parameter in found.items():
                    if len(parameter) not in (layer.num_experts, num_own):
                        raise RuntimeError(
                            f"expert parallelism: {layer.name}.{name} has {len(parameter)} experts here, because "
                            "another engine divides it in other parts. Use one expert_parallel_size for both."
                        )
                    first = self._exchange.first_own if len(parameter) == layer.num_experts else 0
                    # A view, because autograd would save the Parameter itself, whose values are hidden in backward.
                    module._parameters[name] = self._adapt(name, parameter.narrow(0, first, num_own))  # type: ignore[assignment]
                yield
        finally:
            module._parameters.update(found)
            setattr(module, layer.count, layer.num_experts)

    def _adapt(self, name: str, own: Tensor) -> Tensor:
        """Return the own experts with their part of the adapter that is active."""
        factors = self._adapters[name]
        if factors is None:
            return own
        first, second = (each.narrow(0, self._exchange.first_own, len(own)) for each in factors[:2])
        return adapted(own, (first, second, factors[2]))
