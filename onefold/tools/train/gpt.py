"""A small GPT, the model of the built-in trainer, the tests and the benchmarks.

It does not depend on onefold: it is trained like any torch module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The default vocabulary is the 256 values of a byte."""

    num_layers: int
    num_heads: int
    dim: int
    sequence_length: int
    vocab_size: int = 256
    tied: bool = False
    """Whether the head shares the weight of the token embedding."""

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.num_heads} heads")


PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(num_layers=2, num_heads=4, dim=192, sequence_length=64),  # 1.0M: tests
    "small": GPTConfig(num_layers=4, num_heads=5, dim=160, sequence_length=128),  # 1.3M: the default job
    "25m": GPTConfig(num_layers=8, num_heads=8, dim=512, sequence_length=256),
    "120m": GPTConfig(num_layers=14, num_heads=13, dim=832, sequence_length=256),
    "1.3b": GPTConfig(num_layers=24, num_heads=16, dim=2048, sequence_length=1024, vocab_size=50304, tied=True),
}


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class MLP(nn.Module):
    """Two linear layers with a hidden size of four times the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.out = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(functional.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer: attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Embeddings, blocks, final norm and head. `forward` returns the loss if targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.sequence_length, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialize as GPT-2: normal with 0.02, residual projections scaled down by depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                into_residual = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.num_layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        # The loss is computed in fp32, because a sum over the vocabulary is inaccurate in bf16.
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, num_tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue `prompt` (batch, length), drawing on the CPU so that all ranks agree. Temperature 0 is greedy."""
        tokens = prompt
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.config.sequence_length :])[:, -1].float().cpu()
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                probabilities = torch.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(probabilities, num_samples=1, generator=generator)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
        return tokens

    def num_parameters(self) -> int:
        """Return the number of parameters, with tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
