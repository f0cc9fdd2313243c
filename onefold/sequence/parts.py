"""The parts of a batch: labels are shifted, positions are numbered, then every sequence is divided among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def split_batch(batch: Any, size: int, rank: int, *, shifts_labels: bool) -> Any:
    """Return one rank's part of a batch, along dimension 1.

    A mapping with `input_ids` or `inputs_embeds` gets `position_ids` of the whole sequence unless it has them. With
    `shifts_labels`, `shift_labels` has the label of the next token at each token, as causal models need it, and
    `labels` is the same tensor: transformers computes a loss if it gets `labels`, and uses `shift_labels` for it.
    In a tuple or list, tensors are divided as they are, if they have as many tokens as the first one.
    """
    if isinstance(batch, Tensor):
        return split_tensor("the batch", batch, size, rank)
    if isinstance(batch, tuple | list):
        length = next((value.shape[1] for value in batch if _has_tokens(value)), None)
        parts = [
            split_tensor("the batch", value, size, rank) if _has_tokens(value) and value.shape[1] == length else value
            for value in batch
        ]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if not isinstance(batch, Mapping):
        raise TypeError(f"sequence parallelism: cannot divide a batch of type {type(batch).__name__}. Use a dict.")
    values: dict[str, Any] = dict(batch)
    inputs = next((values[name] for name in ("input_ids", "inputs_embeds") if values.get(name) is not None), None)
    if inputs is None:
        inputs = next((value for value in values.values() if _has_tokens(value)), None)
        if inputs is None:
            raise ValueError("sequence parallelism: the batch has no tensor with two dimensions, batch and tokens.")
    else:
        _add_positions(values, inputs)
    if (labels := values.get("labels")) is not None and shifts_labels and values.get("shift_labels") is None:
        values["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    length = inputs.shape[1]
    for name, value in values.items():
        if _has_tokens(value) and value.shape[1] == length:
            if name == "attention_mask" and value.dim() > 2:
                raise ValueError(
                    f"sequence parallelism: attention_mask has the shape {tuple(value.shape)}, but only masks of "
                    "padding (batch x tokens) can be divided. Pass position_ids that restart in each sample instead."
                )
            values[name] = split_tensor(name, value, size, rank)
    if shifts_labels and "shift_labels" in values:
        values["labels"] = values["shift_labels"]
    return values


def split_tensor(name: str, tensor: Tensor, size: int, rank: int) -> Tensor:
    """Return one rank's part of a tensor, along dimension 1."""
    length = tensor.shape[1]
    if length % size:
        raise ValueError(
            f"sequence parallelism: {name} has {length} tokens, which {size} ranks cannot share equally. Pad sequences "
            f"to a multiple of {size}, for example with pad_to_multiple_of in the collator."
        )
    part = length // size
    return tensor.narrow(1, rank * part, part).contiguous()


def _has_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2


def _add_positions(values: dict[str, Any], inputs: Tensor) -> None:
    """Add the positions in the whole sequences, or expand those that are given for all rows."""
    positions = values.get("position_ids")
    if positions is None:
        positions = torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0)
    elif positions.dim() != 2:
        raise ValueError(
            f"sequence parallelism: position_ids has the shape {tuple(positions.shape)}, but only positions of the "
            "shape batch x tokens are supported."
        )
    values["position_ids"] = positions.expand(inputs.shape[0], -1)
