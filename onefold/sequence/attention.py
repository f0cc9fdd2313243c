"""Attention over whole sequences, with documents, padding and sliding windows, by torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# The function of torch, which `dispatch.py` replaces while an engine with sequence parallelism is open.
sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
# Queries of one call if there is a sliding window, unless the window is longer.
_MIN_BLOCK = 1024


@dataclass(frozen=True)
class SequenceLayout:
    """What attention must know of the whole sequences: their documents and padding."""

    documents: tuple[tuple[int, ...], ...] | None = None
    """The first token of each document in each row, and the end of the row. None: each row is one document."""
    is_real: Tensor | None = None
    """(batch, tokens): False for padding. None if there is none."""
    is_right_padded: bool = True
    """Whether padding follows the tokens of each row, so that causal attention of tokens does not see it."""

    @staticmethod
    def of(position_ids: Tensor | None, attention_mask: Tensor | None) -> SequenceLayout:
        """Return the layout of whole sequences. Documents begin where positions do not continue."""
        if attention_mask is not None:
            is_real = attention_mask.bool()
            if bool(is_real.all()):
                return SequenceLayout()
            return SequenceLayout(is_real=is_real, is_right_padded=not bool((~is_real[:, :-1] & is_real[:, 1:]).any()))
        if position_ids is None:
            return SequenceLayout()
        breaks = position_ids.diff(dim=1) != 1
        if not bool(breaks.any()):
            return SequenceLayout()
        length = position_ids.shape[1]
        rows = [(0, *(row.nonzero().view(-1) + 1).tolist(), length) for row in breaks.cpu()]
        return SequenceLayout(documents=tuple(rows))


@dataclass(frozen=True)
class AttentionOptions:
    """The arguments of one attention."""

    is_causal: bool
    dropout: float = 0.0
    scale: float | None = None
    window: int | None = None
    """The number of latest tokens that a query attends to, itself included."""


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, layout: SequenceLayout) -> Tensor:
    """Return the attention of whole sequences. Shapes: (batch, heads, tokens, dim)."""
    if layout.is_real is not None and not options.is_causal:
        return _call(query, key, value, options, layout.is_real[:, None, None, :])
    if not layout.is_right_padded:
        raise ValueError(
            "sequence parallelism: attention_mask has padding before tokens. Pad on the right "
            '(tokenizer.padding_side = "right"), or pack samples and pass position_ids without attention_mask.'
        )
    if layout.documents is None:
        return _attend_to_document(query, key, value, options)
    rows = layout.documents if len(set(layout.documents)) > 1 else layout.documents[:1]
    per_row = zip(rows, *(_rows(tensor, len(rows)) for tensor in (query, key, value)), strict=True)
    return torch.cat([_attend_to_documents(starts, q, k, v, options) for starts, q, k, v in per_row])


def _rows(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.split(1) if count > 1 else [tensor]


def _attend_to_documents(
    starts: Sequence[int], query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    inside = [slice(start, stop) for start, stop in pairwise(starts)]
    found = [_attend_to_document(query[:, :, at], key[:, :, at], value[:, :, at], options) for at in inside]
    return torch.cat(found, dim=2)


def _attend_to_document(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    length, window = query.shape[2], options.window
    if window is None or window >= length:
        return _call(query, key, value, options)
    if not options.is_causal:
        raise ValueError("sequence parallelism: sliding windows are supported for causal attention only.")
    # A block of queries sees the keys of the block and of one window before it.
    size, found, masks = max(window, _MIN_BLOCK), [], {}
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        shape = stop - start, start - first
        if shape not in masks:
            ahead = (
                torch.arange(first, stop, device=query.device) - torch.arange(start, stop, device=query.device)[:, None]
            )
            masks[shape] = (ahead <= 0) & (ahead > -window)
        block = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
        found.append(_call(*block, options, masks[shape]))
    return torch.cat(found, dim=2)


def _call(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor | None = None) -> Tensor:
    more: dict[str, Any] = {}
    if query.shape[1] != key.shape[1] and mask is None:
        more["enable_gqa"] = True
    elif query.shape[1] != key.shape[1]:  # with a mask, fused kernels take no grouped heads
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return sdpa(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=options.is_causal and mask is None,
        scale=options.scale,
        **more,
    )
