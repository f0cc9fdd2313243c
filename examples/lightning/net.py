"""Model and data of the scripts in this folder: a small transformer, and rows of numbers. Nothing is downloaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM_WORDS, LENGTH = 32, 16


class Net(nn.Module):
    """A transformer that predicts the next number of a row, and returns the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen, wanted = rows[:, :-1], rows[:, 1:]
        hidden = self.words(seen) + self.places(torch.arange(seen.shape[1], device=rows.device))
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1], rows.device, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), wanted.flatten())


def rows(count: int, seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return rows that start at a random number and increase by 1 to 3 per element."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(NUM_WORDS, (count, 1), generator=random)
    step = torch.randint(1, 4, (count, 1), generator=random)
    return TensorDataset((first + step * torch.arange(LENGTH + 1)) % NUM_WORDS)


def loaders(batch: int, num_steps: int, num_ranks: int) -> tuple[DataLoader[torch.Tensor], DataLoader[torch.Tensor]]:
    """Return data loaders for training, with `num_steps` batches per rank, and for validation."""
    train, valid = rows(batch * num_steps * num_ranks, seed=1), rows(2 * batch * num_ranks, seed=2)
    return DataLoader(train, batch_size=batch), DataLoader(valid, batch_size=batch)
