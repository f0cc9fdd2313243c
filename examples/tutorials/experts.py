"""A mixture of experts: send tokens to experts instead of gathering experts, and compare bytes and losses.

    onefold launch --nproc 2 experts.py     # two ranks on CPUs; without --nproc one rank per GPU

docs/tutorials/experts.md explains the results.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import onefold

STEPS, WIDTH, HIDDEN, NUM_EXPERTS, CHOSEN, VOCABULARY = 2, 64, 256, 8, 2, 64
TOKENS = (256, 512, 1024, 2048)
OPERATIONS = {"parameters": "gather", "gradients": "reduce-scatter", "tokens": "tokens"}
COLORS = {1: "#2f6fc1", 2: "#e08a2e"}


class Experts(nn.Module):
    """Expert MLPs with their weights stacked. `onefold.experts` lets each rank compute a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, k = torch.where(index == expert)
            hidden = nn.functional.gelu(tokens[row] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, row, hidden * weights[row, k, None])
        return output


class Layer(nn.Module):
    """A router that chooses two experts for each token, and the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = onefold.experts(Experts())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN)
        return x + self.experts(tokens, index, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Result:
    """Measurements of one run on rank 0."""

    size: int
    tokens: int
    loss: float
    sent: dict[str, int]
    """Bytes that the rank sent in the last step, by kind."""


def train(size: int, tokens: int) -> Result | None:
    """Train two steps with `expert_parallel_size` on tokens that are followed by a fixed other one."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": tokens,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            # So that even these small experts are stored in shards and gathered layer by layer.
            "stage3_param_persistence_threshold": 20_000,
            "stage3_max_live_parameters": 100_000,
            "stage3_max_reuse_distance": 0,
        },
        "onefold": {"expert_parallel_size": size},
        "log_level": "warning",
    }
    engine, _, _, _ = onefold.initialize(model=Mixture(), config=config)
    batches = torch.Generator().manual_seed(engine.global_rank)  # each rank has its own batches
    with engine:
        for _ in range(STEPS):
            before = engine.ledger.copy()
            x = torch.randint(VOCABULARY, (tokens,), generator=batches).to(engine.device)
            loss = nn.functional.cross_entropy(engine(x), (x * 7 + 3) % VOCABULARY)
            engine.backward(loss)
            engine.step()
        is_first = engine.global_rank == 0
    if not is_first:
        return None
    traffic = engine.ledger.since(before)
    sent = {name: traffic.bytes(operation) for name, operation in OPERATIONS.items()}
    return Result(size, tokens, loss.item(), sent)


def print_table(results: list[Result]) -> None:
    print("expert parallel size  tokens" + "".join(f"{kind:>12}" for kind in OPERATIONS) + "       total  last loss")
    for each in results:
        cells = "".join(f"{size / 1e6:>12.2f}" for size in (*each.sent.values(), sum(each.sent.values())))
        print(f"{each.size:>20}{each.tokens:>8}{cells}  {each.loss:.5f}")
    print("MB that rank 0 sent in the last step, by what it sent")


def draw(results: list[Result], path: Path) -> None:
    """Draw the bytes of a step by the tokens of a rank, with and without expert parallelism."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for size, label in ((1, "all experts on each rank"), (2, "half of the experts on each rank")):
        totals = [sum(each.sent.values()) / 1e6 for each in results if each.size == size]
        axes.plot(TOKENS, totals, "o-", label=label, color=COLORS[size])
    axes.set_xlabel("tokens of a rank")
    axes.set_ylabel("MB sent per rank and step")
    axes.set_xticks(TOKENS)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/experts"))
    out = parser.parse_args().out
    found = [train(size, tokens) for size in (1, 2) for tokens in TOKENS]
    results = [result for result in found if result is not None]
    if results:
        out.mkdir(parents=True, exist_ok=True)
        print_table(results)
        draw(results, out / "experts.png")
        print(f"picture: {out}/experts.png")


if __name__ == "__main__":
    main()
