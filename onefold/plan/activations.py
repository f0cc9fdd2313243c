"""Decisions about activations: what is computed in chunks and tiles, and where inputs of checkpoints are stored."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.config import Config, ConfigError


@dataclass(frozen=True)
class Activations:
    """The decisions that limit activations and logits for a given batch."""

    batch_chunks: int | None = 0
    """The number of chunks in which blocks compute a batch. None chooses it by the batch, 0 computes it whole."""
    loss_tiles: int | None = 0
    """The number of tiles of tokens of logits and loss. None chooses it by the vocabulary, 0 computes them whole."""
    mlp_tiles: int | None = 0
    """The number of tiles of tokens in which MLPs compute. None chooses it by the tokens, 0 computes them whole."""
    tiled_modules: tuple[str, ...] = ()
    """Classes, names or name patterns of the modules that compute in these tiles. None are MLPs by structure."""
    host_checkpoints: bool = False
    """The inputs of checkpoints in forwards of the model are stored in host memory."""
    cuda_graphs: str = "off"
    """What is captured in CUDA graphs: "blocks", the "model", or what suits the job ("on")."""


def make_activations(config: Config) -> Activations:
    """Return the decisions of a config."""
    own = config.onefold
    if own.cuda_graphs != "off" and own.batch_chunks != 0:
        raise ConfigError(
            "onefold.cuda_graphs captures the forward of a block, and onefold.batch_chunks calls it once per chunk and "
            "recomputes it. Use one of them."
        )
    on_host = config.activation_checkpointing.cpu_checkpointing
    return Activations(own.batch_chunks, own.tiled_loss, own.tiled_mlp, own.tiled_mlp_modules, on_host, own.cuda_graphs)
