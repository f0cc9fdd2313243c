"""Attention over whole sequences, with documents, padding and sliding windows, by torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree

# The function of torch, which `dispatch.py` replaces while an engine with sequence parallelism is open.
sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
# Queries of one call if there is a sliding window, unless the window is longer.
_MIN_BLOCK = 1024


@dataclass(frozen=True)
class SequenceLayout:
    """What attention must know of the whole sequences: their documents and padding."""

    documents: tuple[tuple[int, ...], ...] | None = None
    """The first token of each document in each row, and the end of the row. None: each row is one document."""
    lengths: tuple[int, ...] | None = None
    """The number of tokens before the padding of each row. None if there is no padding, or if it is elsewhere."""
    is_real: Tensor | None = None
    """(batch, tokens): False for padding. None if there is none."""

    @staticmethod
    def of(position_ids: Tensor | None, attention_mask: Tensor | None) -> SequenceLayout:
        """Return the layout of whole sequences. Documents begin where positions do not continue."""
        if attention_mask is not None:
            is_real = attention_mask.bool()
            if bool(is_real.all()):
                return SequenceLayout()
            is_on_the_right = not bool((~is_real[:, :-1] & is_real[:, 1:]).any())
            lengths = tuple(is_real.sum(1).tolist()) if is_on_the_right else None
            return SequenceLayout(lengths=lengths, is_real=is_real)
        if position_ids is None:
            return SequenceLayout()
        breaks = position_ids.diff(dim=1) != 1
        if not bool(breaks.any()):
            return SequenceLayout()
        length = position_ids.shape[1]
        rows = [(0, *(row.nonzero().view(-1) + 1).tolist(), length) for row in breaks.cpu()]
        return SequenceLayout(documents=tuple(rows))

    def of_rows(self, rows: Tensor) -> SequenceLayout:
        """Return the layout of some rows, such as those of a chunk of the batch."""
        if self.documents is None and self.is_real is None:
            return self
        chosen = rows.tolist()
        return SequenceLayout(
            documents=tuple(self.documents[row] for row in chosen) if self.documents is not None else None,
            lengths=tuple(self.lengths[row] for row in chosen) if self.lengths is not None else None,
            is_real=self.is_real[chosen] if self.is_real is not None else None,
        )


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """A mask of whole sequences, which models pass to their attention in place of a tensor.

    It is a node of torch's pytrees with the tensor `rows`, so that chunks of a batch get those of their rows.
    """

    layout: SequenceLayout
    is_causal: bool
    window: int | None
    rows: Tensor
    """The rows of the layout that the batch consists of."""


_pytree.register_pytree_node(
    SequenceMask, lambda mask: ([mask.rows], mask), lambda rows, mask: replace(mask, rows=next(iter(rows)))
)


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
    if options.window is not None and options.window < query.shape[2] and not options.is_causal:
        raise ValueError("sequence parallelism: sliding windows are supported for causal attention only.")
    if layout.is_real is not None and not options.is_causal:
        return _call(query, key, value, options, layout.is_real[:, None, None, :])
    if layout.is_real is not None and layout.lengths is None:
        raise ValueError(
            "sequence parallelism: attention_mask has padding before tokens. Pad on the right "
            '(tokenizer.padding_side = "right"), or pack samples and pass position_ids without attention_mask.'
        )
    if layout.lengths is not None:
        return _by_row(_attend_to_padded, layout.lengths, query, key, value, options)
    if layout.documents is not None:
        return _by_row(_attend_to_documents, layout.documents, query, key, value, options)
    return _attend_to_document(query, key, value, options)


def _by_row(
    attend_to: Callable[..., Tensor], rows: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> Tensor:
    """Call a function with the layout of each row, or once if all rows have the same one."""
    if len(set(rows)) == 1:
        return attend_to(rows[0], query, key, value, *options)
    per_row = zip(rows, query.split(1), key.split(1), value.split(1), strict=True)
    return torch.cat([attend_to(row, *tensors, *options) for row, *tensors in per_row])


def _attend_to_documents(
    starts: Sequence[int], query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    inside = [slice(start, stop) for start, stop in pairwise(starts)]
    found = [_attend_to_document(query[:, :, at], key[:, :, at], value[:, :, at], options) for at in inside]
    return torch.cat(found, dim=2)


def _attend_to_padded(num_tokens: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Return the attention of the tokens of a row, and of the padding after them, which sees the tokens too."""
    length = query.shape[2]
    first, mask = 0, None
    if not num_tokens:  # padding that sees nothing, as a mask without a key
        stop, mask = 1, query.new_zeros(length, 1, dtype=torch.bool)
    elif options.window is not None:
        first, stop = max(0, num_tokens - options.window + 1), num_tokens
        mask = _positions(num_tokens, length, query) - _positions(first, stop, query).T < options.window
    else:
        stop = num_tokens
    unmasked = replace(options, is_causal=False)
    padding = _call(query[:, :, num_tokens:], key[:, :, first:stop], value[:, :, first:stop], unmasked, mask)
    if not num_tokens:
        return padding
    tokens = query[:, :, :num_tokens], key[:, :, :num_tokens], value[:, :, :num_tokens]
    return torch.cat([_attend_to_document(*tokens, options), padding], dim=2)


def _positions(start: int, stop: int, like: Tensor) -> Tensor:
    """Return the positions from `start` to `stop` as a column."""
    return torch.arange(start, stop, device=like.device)[:, None]


def _attend_to_document(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    length, window = query.shape[2], options.window
    if window is None or window >= length:
        return _call(query, key, value, options)
    # A block of queries sees the keys of the block and of one window before it.
    size, found, masks = max(window, _MIN_BLOCK), [], {}
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        shape = stop - start, start - first
        if shape not in masks:
            behind = _positions(start, stop, query) - _positions(first, stop, query).T
            masks[shape] = (behind >= 0) & (behind < window)
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
