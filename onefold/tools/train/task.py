"""Tasks of `onefold train`: the built-in GPT on bytes, or a model of transformers on its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from onefold.engine import Engine
from onefold.tools.train.data import Batch, load_corpus
from onefold.tools.train.gpt import GPT, PRESETS
from onefold.tools.train.options import TrainOptions


class Task(Protocol):
    """A model and its data, behind the interface that the training loop uses."""

    name: str
    """The name of the model in the summary."""
    data: str
    """The name of the data in the summary."""
    unit: str
    """The unit of a sequence: bytes or tokens."""
    sequence_length: int

    @property
    def num_rows(self) -> int | None:
        """Rows per epoch; None for text, which is sampled at random."""
        ...

    def describe_data(self) -> str: ...

    def build(self, config: dict[str, Any], *, sharded: bool) -> nn.Module:
        """Build the model. `sharded`: no rank may hold all of it, not even temporarily."""
        ...

    @property
    def row_formats(self) -> dict[str, int]:
        """Rows of each format for training; empty for the built-in GPT."""
        ...

    def train_batch(self, first: int, batch_size: int) -> Batch:
        """Return a micro-batch, the same in every run. `first` is the number of its first sequence in the run."""
        ...

    def held_out_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield micro-batches with the numbers of their rows, as many on every rank. A number may be 0."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Generate text. All ranks take part, and return the same."""
        ...

    def save_weights(self, engine: Engine, folder: Path) -> str:
        """Write unsharded weights below this folder, on all ranks. Return where they are, and how to load them."""
        ...


def choose_task(options: TrainOptions) -> Task:
    """Return the task of these options. Raises for mistakes in the model's files and in the data."""
    if options.model is None:
        return GPTTask(options)
    from onefold.tools.train.huggingface import HuggingFaceTask

    return HuggingFaceTask(options)


class GPTTask:
    """The built-in GPT, whose tokens are bytes."""

    unit = "byte"
    num_rows = None
    row_formats: ClassVar[dict[str, int]] = {}

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._config = PRESETS[options.preset]
        self.sequence_length = self._config.sequence_length
        self._corpus = load_corpus(options.data, self.sequence_length)
        self.name, self.data = f"GPT {options.preset}", self._corpus.name

    def describe_data(self) -> str:
        corpus = self._corpus
        return f"{corpus.num_bytes / 1e6:,.1f} MB of {corpus.name}, {corpus.num_held_out:,} bytes held out"

    def build(self, config: dict[str, Any], *, sharded: bool) -> nn.Module:
        import onefold

        with onefold.zero.Init(config_dict_or_path=config, enabled=sharded):
            return GPT(self._config)

    def train_batch(self, first: int, batch_size: int) -> Batch:
        return self._corpus.train_batch(self._options.seed, first, batch_size)

    def held_out_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Batch, int]]:
        return self._corpus.held_out_batches(rank, world_size, batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def sample(self, model: nn.Module, device: torch.device) -> str:
        assert isinstance(model, GPT)
        prompt = torch.tensor([list(self._options.prompt.encode() or b"\n")], device=device)
        generator = torch.Generator().manual_seed(self._options.seed)
        tokens = model.generate(prompt, self._options.sample_length, temperature=0.7, generator=generator)
        # The vocabulary may be larger than the 256 values of a byte.
        return bytes(min(token, 255) for token in tokens[0].tolist()).decode(errors="replace")

    def save_weights(self, engine: Engine, folder: Path) -> str:
        engine.save_16bit_model(str(folder / "model"))
        file = folder / "model" / "model.safetensors"
        return f"the trained weights are in {file}; load them with\n  safetensors.torch.load_file({str(file)!r})"
