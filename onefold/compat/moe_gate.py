"""The gate of DeepSpeed's `MoE`: top-1 and top-2 gating within a capacity, as in GShard.

[Note: gating within a capacity]
Each rank routes its own T tokens to all E experts, whose capacity on this rank is T / E * k * factor, rounded up. The
probabilities of a token are the softmax of its logits, in fp32. Its first expert has the largest probability. Its
second expert (k = 2) has the largest logit of the others, to which Gumbel noise is added with
`top2_2nd_expert_sampling`. An expert takes first choices before second choices. Within these it takes tokens in order,
or at random with `use_rts` (k = 1). Others are dropped: they get nothing from this expert. The weight of an expert is
its probability (k = 1), or divided by the sum of those that were not dropped (k = 2). The loss that balances experts is
E times the sum over experts of the mean probability and the share of first choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

JITTER = 1e-2


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as (tokens, k)."""

    index: Tensor
    weights: Tensor
    kept: Tensor
    """False for what was dropped."""
    loss: Tensor
    """The loss that balances experts."""
    counts: Tensor
    """The number of choices of each expert, with those that were dropped."""


class TopKGate(nn.Module):
    """Chooses one or two experts for each token. See [Note: gating within a capacity].

    The arguments are those of DeepSpeed. A call returns a `Routing` instead of one-hot tensors.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"MoE: k = {k}, but a token has one or two experts. Use k = 1 or k = 2.")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.num_experts, self.k, self.min_capacity = num_experts, k, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def capacity(self, num_tokens: int) -> int:
        """Return the number of tokens of this rank that an expert takes."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # DeepSpeed computes in fp32: other roundings would drop other tokens.
        share = num_tokens / self.num_experts * torch.tensor(factor * self.k, dtype=torch.float32, device="cpu")
        return max(math.ceil(share), self.min_capacity)

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        noise = self.noisy_gate_policy if self.training else None
        inputs = tokens.float()
        if noise == "Jitter":
            inputs = inputs * torch.empty_like(inputs).uniform_(1 - JITTER, 1 + JITTER)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(inputs, self.wg.weight.float())
        gates = logits.softmax(1)
        samples = noise == "RSample" and self.k == 1
        first = (_with_gumbel_noise(logits) if samples else gates).argmax(1)
        choices = [F.one_hot(first, self.num_experts)]
        if self.k == 2:
            scores = _with_gumbel_noise(logits) if self.top2_2nd_expert_sampling else logits
            second = scores.masked_fill(choices[0].bool(), -math.inf).argmax(1)
            choices.append(F.one_hot(second, self.num_experts))
        elif used_token is not None:
            choices[0] = choices[0] * used_token.reshape(-1, 1).to(choices[0].dtype)
        loss = (gates.mean(0) * choices[0].float().mean(0)).sum() * self.num_experts
        kept = self._within_capacity(choices)
        probabilities = torch.stack([(gates * each).sum(1) for each in kept], 1)
        if self.k == 2:
            total = probabilities.sum(1, keepdim=True)
            probabilities = probabilities / total.clamp(min=torch.finfo(total.dtype).eps)
        index = torch.stack([each.argmax(1) for each in choices], 1)
        is_kept = torch.stack([each.any(1) for each in kept], 1)
        return Routing(index, probabilities, is_kept, loss, torch.stack(choices).sum((0, 1)))

    def _within_capacity(self, choices: list[Tensor]) -> list[Tensor]:
        """Return the first, and second, choices that experts take, as one-hot rows."""
        if not self.drop_tokens:
            return choices
        capacity, kept = self.capacity(len(choices[0])), []
        before = torch.zeros_like(choices[0][0])
        for chosen in choices:
            # The place of each token among those of its expert.
            if self.use_rts and self.k == 1:
                order = (chosen * torch.rand(chosen.shape, device=chosen.device)).argsort(0, descending=True)
                place = torch.empty_like(order).scatter_(
                    0, order, torch.arange(len(order), device=order.device).unsqueeze(1).expand_as(order)
                )
            else:
                place = chosen.cumsum(0) - 1 + before
            kept.append(chosen * (place < capacity))
            before = before + chosen.sum(0)
        return kept


def _with_gumbel_noise(logits: Tensor) -> Tensor:
    return logits - torch.empty_like(logits).exponential_().log()
