"""Ten shapes of models, none of them in the examples: what predictions are compared with runs on.

Each is a function without arguments that builds a model whose forward returns its loss, and whose `example_inputs`
gives a batch of so many sequences of so many tokens (images for the vision ones). Plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Tokens(nn.Module):
    """A model whose batch is tokens and targets."""

    vocabulary: int

    def example_inputs(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return tokens, tokens


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class GroupedAttention(nn.Module):
    """Fewer heads of keys and values than of queries, and rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * kv_heads * self.width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query = self._rotate(self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2))
        key, value = self.key_value(x).view(batch, length, 2, self.kv_heads, self.width).permute(2, 0, 3, 1, 4)
        key = self._rotate(key).repeat_interleave(self.heads // self.kv_heads, dim=1)
        value = value.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))  # type: ignore[no-any-return]

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] / 10000 ** (
            torch.arange(half, device=x.device) / half
        )
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two of several gated MLPs for each token, each with room for its even share of the tokens and a quarter more."""

    def __init__(self, dim: int, hidden: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num, bias=False)
        self.gate = nn.Parameter(torch.randn(num, dim, hidden) * 0.02)
        self.up = nn.Parameter(torch.randn(num, dim, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(num, hidden, dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        num = self.router.out_features
        weights, chosen = self.router(flat).float().softmax(-1).topk(2, dim=-1)
        room = flat.shape[0] * 2 * 5 // (4 * num)
        # The tokens that want an expert most, as many as it has room for.
        wants = torch.zeros(flat.shape[0], num, device=x.device).scatter(1, chosen, weights)
        strength, tokens = wants.topk(room, dim=0)
        taken = flat[tokens.T.flatten()].view(num, room, -1)
        hidden = F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up)
        made = torch.bmm(hidden, self.down) * strength.T.unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(flat).index_add(0, tokens.T.flatten(), made.flatten(0, 1)).view_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(dim), GroupedAttention(dim, heads, kv_heads)
        self.norm_mlp, self.mlp = RMSNorm(dim), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class Decoder(Tokens):
    def __init__(
        self, vocabulary: int, dim: int, blocks: list[Block], *, tied: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary, self.recompute = vocabulary, recompute
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Encoder(Tokens):
    """Masked language model out of torch's own layers: post-norm, biases, dropout."""

    def __init__(self, vocabulary: int, dim: int, heads: int, num: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(4096, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True, activation="gelu")
            for _ in range(num)
        )
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Translator(Tokens):
    """An encoder and a decoder that looks at it, with one table for both and for the head."""

    def __init__(self, vocabulary: int, dim: int, heads: int, num: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, dim)
        layer = {"dim_feedforward": 4 * dim, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(dim, heads, **layer) for _ in range(num))  # type: ignore[arg-type]
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(dim, heads, **layer) for _ in range(num))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        source, x = self.embed(tokens), self.embed(targets)
        for layer in self.encoder:
            source = layer(source)
        for layer in self.decoder:
            x = layer(x, source)
        return F.cross_entropy((x @ self.embed.weight.T).float().flatten(0, 1), targets.flatten())


class Vision(nn.Module):
    """Patches of images through pre-norm layers; `length` is the side of an image."""

    def __init__(self, dim: int, heads: int, num: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, (side // 16) ** 2, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, batch_first=True, norm_first=True, activation="gelu")
            for _ in range(num)
        )
        self.head = nn.Linear(dim, 1000)

    def example_inputs(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 3, length, length), torch.zeros(batch, dtype=torch.long)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)).float(), labels)


class Residual(nn.Module):
    """A residual MLP over features: wide products and little else."""

    def __init__(self, dim: int, hidden: int, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            for _ in range(num)
        )
        self.dim = dim

    def example_inputs(self, batch: int, length: int) -> tuple[Tensor]:
        return (torch.zeros(batch, length, self.dim),)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(iter(self.blocks[0][1].parameters())).dtype)  # type: ignore[index, call-overload]
        for block in self.blocks:
            x = x + block(x)
        return x.float().pow(2).mean()


def llama() -> nn.Module:
    return Decoder(32000, 1024, [Block(1024, 16, 4, GatedMLP(1024, 2816)) for _ in range(10)])


def tied() -> nn.Module:
    return Decoder(50304, 768, [Block(768, 12, 12, GatedMLP(768, 2048)) for _ in range(8)], tied=True)


def recomputed() -> nn.Module:
    return Decoder(32000, 768, [Block(768, 12, 4, GatedMLP(768, 2048)) for _ in range(16)], recompute=True)


def deep() -> nn.Module:
    return Decoder(8192, 384, [Block(384, 6, 6, GatedMLP(384, 1024)) for _ in range(40)])


def mixture() -> nn.Module:
    return Decoder(16000, 512, [Block(512, 8, 8, Experts(512, 1408, 8)) for _ in range(6)])


def lora() -> nn.Module:
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for part, name in ((block.attention, "query"), (block.attention, "out"), (block.mlp, "down")):
            setattr(part, name, Adapted(getattr(part, name), 16))
    return model


def bert() -> nn.Module:
    return Encoder(30522, 768, 12, 8)


def translator() -> nn.Module:
    return Translator(32128, 512, 8, 6)


def vision() -> nn.Module:
    return Vision(768, 12, 10, 224)


def residual() -> nn.Module:
    return Residual(2048, 8192, 6)


SHAPES: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (llama, tied, recomputed, deep, mixture, lora, bert, translator, vision, residual)
}
# Length of a sequence, or side of an image, where it is not the usual one.
LENGTHS = {"vision": 224, "residual": 16}
LENGTH = 512
