"""Mixtures of experts in a ModuleList, and DeepSpeed's layer of experts, for tests of expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onefold.compat.moe_layer import MoE

VOCABULARY, WIDTH, HIDDEN, NUM_EXPERTS = 37, 16, 48, 4


class Expert(nn.Module):
    """A gated MLP with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(rows)) * self.up(rows))


class BiasedExpert(Expert):
    """An expert that returns its bias separately, as layers of Megatron do."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(rows), None


class ListedBlock(nn.Module):
    """A block as in older models of transformers: it loops over the experts that have tokens."""

    def __init__(self, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.shared_expert = Expert()
        self.num_shared_calls = 0
        self.shared_expert.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_shared_calls += 1

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = hidden.shape
        hidden = hidden.reshape(-1, WIDTH)
        if self.training and self.jitter:
            hidden = hidden * torch.empty_like(hidden).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.gate(hidden)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            token, k = torch.where(chosen == number)
            found = self.experts[number](hidden[token]) * weights[token, k, None]
            output.index_add_(0, token, found.to(output.dtype))
        return (output + self.shared_expert(hidden)).view(shape), logits


class MoEBlock(nn.Module):
    """DeepSpeed's layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        defaults = {"num_experts": NUM_EXPERTS, "k": 2, "use_rts": False, "top2_2nd_expert_sampling": False}
        expert = BiasedExpert() if arguments.pop("returns_bias", False) else Expert()
        self.moe = MoE(WIDTH, expert, **{**defaults, **arguments})
        for expert in self.moe.deepspeed_moe.experts.deepspeed_experts[1:]:  # otherwise all are alike
            for parameter in expert.parameters():
                nn.init.uniform_(parameter, -0.3, 0.3)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, loss, _ = self.moe(hidden)
        return output, loss


class Mixture(nn.Module):
    """Two blocks with experts. The loss includes what the blocks return next to their output."""

    def __init__(self, kind: str, **changes: Any) -> None:
        super().__init__()
        self.rank = 0
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        make = (lambda: ListedBlock(changes.get("jitter", 0.0))) if kind == "listed" else lambda: MoEBlock(**changes)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(input_ids), torch.zeros((), device=input_ids.device)
        for block in self.blocks:
            y, loss = block(x)
            x, balance = x + y, balance + loss.square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance
