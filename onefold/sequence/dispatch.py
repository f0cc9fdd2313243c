"""Calls of torch's attention function by models under sequence parallelism.

[Note: which attention is divided]
Attention functions of transformers get the module that calls them, which belongs to a model. Other models call
`torch.nn.functional.scaled_dot_product_attention`, which does not say who calls. It is replaced while an engine with
sequence parallelism is open. The replacement divides the calls of the model whose forward runs, and the calls in a
backward, where a forward is recomputed, possibly on another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from onefold.sequence import attention
from onefold.sequence.attention import AttentionOptions, SequenceLayout


class Divided(Protocol):
    """A model under sequence parallelism, as its attention calls it. `SequenceParallel` implements it."""

    @property
    def size(self) -> int: ...

    @property
    def is_active(self) -> bool: ...

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, layout: SequenceLayout
    ) -> Tensor: ...

    def add_layout(self, position_ids: Tensor | None, attention_mask: Tensor | None) -> None: ...

    def layout(self, position_ids: Tensor | None) -> SequenceLayout: ...


# All models under sequence parallelism, and those whose forward runs, innermost last.
_open: WeakSet[Any] = WeakSet()
_in_forward: list[Divided] = []
_is_inside = False


def add(divided: Divided) -> None:
    """Divide the attention of a model from now on."""
    sizes = {other.size for other in _open}
    if sizes - {divided.size}:
        raise RuntimeError(
            f"an engine with sequence_parallel_size = {sizes.pop()} is open, so another one cannot have "
            f"{divided.size}. Close the first one (engine.close()), or use one size."
        )
    _open.add(divided)
    F.scaled_dot_product_attention = _dispatch


def remove(divided: Divided) -> None:
    """Stop to divide the attention of a model."""
    _open.discard(divided)
    end_forward(divided)
    if not _open:
        F.scaled_dot_product_attention = attention.sdpa


def begin_forward(divided: Divided) -> None:
    """Begin a forward of a model."""
    _in_forward.append(divided)


def end_forward(divided: Divided) -> None:
    """End the innermost forward of a model."""
    if divided in _in_forward:
        _in_forward.remove(divided)


@contextmanager
def replaced(function: Callable[..., Tensor]) -> Iterator[None]:
    """Call `function` in place of torch's in this context, for divided attention too."""
    before = F.scaled_dot_product_attention, attention.sdpa
    attention.sdpa = function
    if not _open:
        F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention, attention.sdpa = before


def current() -> Divided | None:
    """Return the model that computes now, if its inputs are parts of sequences. See [Note: which attention is divided].

    In a backward it is any model under sequence parallelism, because they share one group of ranks.
    """
    found = _in_forward[-1] if _in_forward else None
    if found is None and torch._C._current_graph_task_id() != -1:
        found = next((divided for divided in _open if divided.is_active), None)
    return found if found is not None and found.is_active else None


@contextmanager
def undivided() -> Iterator[None]:
    """Call torch's function unchanged in this context."""
    global _is_inside
    before, _is_inside = _is_inside, True
    try:
        yield
    finally:
        _is_inside = before


def _dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace torch's function. `enable_gqa` follows from the numbers of heads."""
    divided = None if _is_inside else current()
    if divided is None:
        return attention.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        raise ValueError(
            "sequence parallelism: scaled_dot_product_attention got an attn_mask, which covers this rank's part of the "
            "sequence only. Pass is_causal=True instead, or no mask."
        )
    return divided.attention(query, key, value, AttentionOptions(is_causal, dropout_p, scale), SequenceLayout())
