"""Calls of torch's attention function by models under sequence parallelism.

[Note: which attention is divided]
Attention functions of transformers get the module that calls them. Other models call
`torch.nn.functional.scaled_dot_product_attention`, which does not say who calls. It is replaced while an engine with
sequence parallelism is open, also where modules have imported it by name. The replacement divides the calls of the
model whose forward runs. In other calls, such as those of a backward that recomputes a part of a forward, the caller
is the innermost module on the Python stack: it belongs to a model under sequence parallelism, or to another one, whose
attention is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F

from onefold.runtime.torch_internals import inside_backward, outside_compiler
from onefold.sequence import attention
from onefold.sequence.attention import AttentionOptions, SequenceMask


class Divided(Protocol):
    """A model under sequence parallelism, as its attention calls it. `SequenceParallel` implements it."""

    @property
    def size(self) -> int: ...

    @property
    def is_active(self) -> bool: ...

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: SequenceMask | None
    ) -> Tensor: ...

    def record_activity(self) -> None: ...

    def read_layout(self, position_ids: Tensor, attention_mask: Tensor | None) -> None: ...

    def mask(self, batch: int, *, is_causal: bool, window: int | None, hides_padding: bool) -> SequenceMask: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def last_position(self) -> Tensor: ...


# All models under sequence parallelism, those of each module, and those whose forward runs, innermost last.
_open: WeakSet[Any] = WeakSet()
_model_of: WeakKeyDictionary[nn.Module, Divided] = WeakKeyDictionary()
_in_forward: list[Divided] = []
_is_inside = False
# The names of Python modules that have imported torch's function, and its name there.
_importers: list[tuple[dict[str, Any], str]] = []
# Whether torch may compute nn.MultiheadAttention in evaluation by a kernel that does not call its attention function.
_allows_fast_path = True
_CALL_OF_MODULE, _FILE_OF_BACKWARD = nn.Module._call_impl.__code__, graph.__file__


def add(divided: Divided, model: nn.Module) -> None:
    """Divide the attention of a model from now on."""
    global _allows_fast_path
    sizes = {other.size for other in _open}
    if sizes - {divided.size}:
        raise RuntimeError(
            f"an engine with sequence_parallel_size = {sizes.pop()} is open, so another one cannot have "
            f"{divided.size}. Close the first one (engine.close()), or use one size."
        )
    if not _open:
        _allows_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
    _open.add(divided)
    for module in model.modules():
        _model_of[module] = divided
        _replace_in(getattr(type(module).forward, "__globals__", {}))
    for name, imported in list(sys.modules.items()):
        if name == F.__name__ or name.partition(".")[0] not in ("torch", "onefold"):
            _replace_in(getattr(imported, "__dict__", {}))


def _replace_in(names: dict[str, Any]) -> None:
    """Replace torch's function in the names of a Python module."""
    for name in [name for name, value in list(names.items()) if value is attention.sdpa]:
        names[name] = _dispatch
        _importers.append((names, name))


def remove(divided: Divided) -> None:
    """Leave the attention of a model undivided from now on."""
    if divided in _open:
        _open.discard(divided)
        if not _open:
            torch.backends.mha.set_fastpath_enabled(_allows_fast_path)
    end_forward(divided)
    for module in [module for module, owner in _model_of.items() if owner is divided]:
        del _model_of[module]
    if not _open:
        for names, each in _importers:
            if names.get(each) is _dispatch:
                names[each] = attention.sdpa
        _importers.clear()


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


def model_of(module: nn.Module) -> Divided | None:
    """Return the model that a module belongs to, if its inputs are parts of sequences."""
    found = _model_of.get(module)
    return found if found is not None and found.is_active else None


def current() -> Divided | None:
    """Return the model that computes now, if its inputs are parts of sequences. See [Note: which attention is divided].

    Only attention functions and those that make masks may call this.
    """
    found = _in_forward[-1] if _in_forward else _on_stack() if _open else None
    return found if found is not None and found.is_active else None


@outside_compiler
def _on_stack() -> Divided | None:
    """Return the model under sequence parallelism that the innermost module on the Python stack belongs to."""
    frame: FrameType | None = sys._getframe(2)
    is_caller = True
    while frame is not None and frame.f_code.co_filename != _FILE_OF_BACKWARD:
        # Locals of other frames are not read, because a frame keeps what was read alive.
        if frame.f_code is _CALL_OF_MODULE or (is_caller and frame.f_code.co_varnames[:1] == ("self",)):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return _model_of.get(module)
        is_caller &= frame.f_code.co_filename == __file__
        frame = frame.f_back
    if inside_backward():
        raise RuntimeError(
            "sequence parallelism: a backward recomputes scaled_dot_product_attention, but not in a module, so it is "
            "not known to which model the call belongs. Recompute (checkpoint) a module that calls it."
        )
    return None


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
    return divided.attention(query, key, value, AttentionOptions(is_causal, dropout_p, scale), None)
