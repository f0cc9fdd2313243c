"""onefold's activation checkpointing under DeepSpeed's names."""

from onefold.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)

non_reentrant_checkpoint = checkpoint

__all__ = [
    "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "partition_activations_in_checkpoint",
    "reset", "set_num_layers",
]  # fmt: skip
