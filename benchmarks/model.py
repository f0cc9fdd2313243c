"""A plain GPT and its data, for all systems alike; apart from the package, so that the yardstick stays put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Computes the loss from the last hidden states, the head and the targets, instead of from the logits.
Loss = Callable[[torch.Tensor, nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ModelShape:
    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    max_sequence: int
    num_experts: int = 0
    """With experts, a router sends each token to `experts_per_token` of them, in place of the MLP of a block."""
    expert_width: int = 0
    experts_per_token: int = 4
    grouped: bool = True
    """Whether all experts are computed in one grouped product, instead of one after the other."""

    @property
    def num_parameters(self) -> int:
        """The elements of a GPT of this shape. Building it on the meta device to count them would import 70 MB."""
        return self._count(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """The elements that compute a token: those of its experts, and all others."""
        return self._count(self.experts_per_token)

    def _count(self, num_experts: int) -> int:
        of_mlp = 8 * self.width**2
        if self.num_experts:
            of_mlp = self.width * (2 * num_experts * self.expert_width + self.num_experts)
        of_block = 4 * self.width**2 + of_mlp + 4 * self.width
        embeddings = (2 * self.vocabulary + self.max_sequence) * self.width
        return self.num_layers * of_block + embeddings + 2 * self.width


# Embedding and head are not tied and vocabularies are modest: model states rather than logits fill the memory.
PRESETS = {
    "tiny": ModelShape(num_layers=2, width=64, num_heads=2, vocabulary=256, max_sequence=64),
    "25m": ModelShape(num_layers=8, width=512, num_heads=8, vocabulary=2048, max_sequence=256),
    "27m": ModelShape(num_layers=6, width=512, num_heads=8, vocabulary=8192, max_sequence=256),
    "46m": ModelShape(num_layers=12, width=512, num_heads=8, vocabulary=8192, max_sequence=256),
    "109m": ModelShape(num_layers=12, width=768, num_heads=12, vocabulary=15360, max_sequence=512),
    "120m": ModelShape(num_layers=12, width=768, num_heads=12, vocabulary=20480, max_sequence=256),
    "130m": ModelShape(num_layers=2, width=2048, num_heads=16, vocabulary=7168, max_sequence=256),  # large blocks
    "217m": ModelShape(num_layers=14, width=1024, num_heads=16, vocabulary=19456, max_sequence=1024),
    "390m": ModelShape(num_layers=24, width=1024, num_heads=16, vocabulary=42496, max_sequence=512),
    "1.3b": ModelShape(num_layers=24, width=2048, num_heads=16, vocabulary=32000, max_sequence=1024),
    "3.8b": ModelShape(num_layers=32, width=3072, num_heads=24, vocabulary=32000, max_sequence=1024),
    "6.7b": ModelShape(num_layers=32, width=4096, num_heads=32, vocabulary=32000, max_sequence=2048),
    "15b": ModelShape(num_layers=48, width=5120, num_heads=40, vocabulary=32000, max_sequence=1024),
    "20b": ModelShape(num_layers=44, width=6144, num_heads=48, vocabulary=32000, max_sequence=1024),
    "30b": ModelShape(num_layers=56, width=6656, num_heads=52, vocabulary=32000, max_sequence=1024),
    "38b": ModelShape(num_layers=53, width=7680, num_heads=60, vocabulary=32000, max_sequence=1024),
    # 32 experts in each block, 4 for each token: 0.8B parameters compute a token.
    "moe-tiny": ModelShape(2, 64, 2, 256, 64, num_experts=8, expert_width=32),
    "moe-3b": ModelShape(24, 2048, 16, 32000, 1024, num_experts=32, expert_width=768),
    "moe-3b-loop": ModelShape(24, 2048, 16, 32000, 1024, num_experts=32, expert_width=768, grouped=False),
    # 64 experts in each block, 4 for each token: 6B parameters compute a token.
    "moe-29b": ModelShape(25, 4096, 32, 32000, 1024, num_experts=64, expert_width=2048),
}


class Experts(nn.Module):
    """Expert MLPs in one parameter per layer, called with tokens, the experts of each token and their weights."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_experts, self.grouped = shape.num_experts, shape.grouped
        self.up = nn.Parameter(torch.randn(shape.num_experts, shape.width, shape.expert_width) * 0.02)
        self.down = nn.Parameter(torch.randn(shape.num_experts, shape.expert_width, shape.width) * 0.02)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        device = tokens.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tokens.dtype
        up, down = self.up.to(dtype), self.down.to(dtype)
        order = index.flatten().argsort(stable=True)
        copies = tokens.to(dtype)[order // index.shape[1]]
        counts = torch.bincount(index.flatten(), minlength=self.num_experts)
        if self.grouped and dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            hidden = functional.gelu(functional.grouped_mm(copies, up, offs=ends))
            results = functional.grouped_mm(hidden, down, offs=ends)
        else:
            parts = copies.split(counts.tolist())
            results = torch.cat([functional.gelu(part @ up[e]) @ down[e] for e, part in enumerate(parts)])
        results = results * weights.flatten()[order].unsqueeze(-1).to(dtype)
        output = torch.zeros_like(tokens, dtype=torch.float32)
        return output.index_add(0, order // index.shape[1], results.float()).to(tokens.dtype)


class RoutedExperts(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.experts_per_token = shape.experts_per_token
        self.router = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).float().softmax(-1).topk(self.experts_per_token)
        weights = weights / weights.sum(-1, keepdim=True)
        output: torch.Tensor = self.experts(tokens, index, weights.to(tokens.dtype))
        return output.view(x.shape)


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.routed = RoutedExperts(shape) if shape.num_experts else None
        if not shape.num_experts:
            self.mlp_in = nn.Linear(width, 4 * width, bias=False)
            self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        if self.routed is not None:
            return x + self.routed(self.mlp_norm(x))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, shape: ModelShape, recompute: bool = False, loss: Loss | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.loss = loss
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.max_sequence, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.num_layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if self.loss is not None:
            return self.loss(self.norm(x), self.head, targets)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_batch(
    shape: ModelShape, batch: int, sequence: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting sequences with a random start and stride: endless, the same everywhere, and learnable."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(shape.vocabulary, (batch, 1), generator=generator)
    stride = torch.randint(1, 4, (batch, 1), generator=generator)
    line = (start + stride * torch.arange(sequence + 1)) % shape.vocabulary
    return line[:, :-1].contiguous().to(device), line[:, 1:].contiguous().to(device)
