"""Attention of transformers models under sequence parallelism, through their own attention and mask interfaces.

A model gets an attention function of its own, registered as `ulysses_sdpa`, and a mask function that makes no mask,
because a mask of this rank's tokens would be wrong. Documents, padding and sliding windows are taken from position_ids,
attention_mask and the arguments of the attention function instead ([Note: exchange of heads] in `heads.py`).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.sequence.attention import AttentionOptions
from onefold.sequence.dispatch import Divided, current
from onefold.sequence.heads import key_head_repeats

_PREFIX = "ulysses_"
# The sequence parallelism of each module of a model under it.
_parallel_of: weakref.WeakKeyDictionary[nn.Module, Divided] = weakref.WeakKeyDictionary()
# Kinds of layers whose attention sees only its own tokens and those before them in the sequence.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments of attention functions that would have to be divided by heads.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model is a causal language model of transformers, whose loss is that of the next token."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    kinds = [module.loss_type or "ForCausalLM" for module in outermost_models(model) if hasattr(module, "loss_type")]
    return losses is not None and any(losses.LOSS_MAPPING.get(kind) is losses.ForCausalLMLoss for kind in kinds)


def prepare(model: nn.Module, parallel: Divided) -> list[Any]:
    """Replace the attention of the transformers models in a model. Return handles that undo this."""
    handles: list[Any] = []
    for module in outermost_models(model):
        _check(module, parallel.size)
        handles.append(_Replaced(module))
        handles.append(module.register_forward_pre_hook(_Inputs(parallel), with_kwargs=True))
        for each in module.modules():
            _parallel_of[each] = parallel
    return handles


def outermost_models(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost transformers models in a model."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    if isinstance(model, library.PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from outermost_models(child)


def _check(model: Any, size: int) -> None:
    """Raise if a model has layers that sequence parallelism would compute wrongly."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"sequence_parallel_size = {size}: {name} has an encoder and a decoder. Use 1.")
    others = {*(getattr(config, "layer_types", None) or ())} - _LAYER_TYPES
    if others:
        raise ConfigError(
            f"sequence_parallel_size = {size}: {name} has layers of the types {', '.join(sorted(others))}, which pass "
            "a state along the sequence or see blocks of it, and are not divided. Use 1, or a model with full or "
            "sliding attention."
        )
    if not model._can_set_attn_implementation():
        raise ConfigError(
            f"sequence_parallel_size = {size}: {name} does not use the attention interface of transformers. Use 1."
        )
    heads = getattr(config, "num_attention_heads", None)
    if heads:
        try:
            key_head_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None


class _Inputs:
    """A pre-hook that reads positions and padding of a forward."""

    def __init__(self, parallel: Divided) -> None:
        self._parallel = weakref.ref(parallel)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        parallel = self._parallel()
        if parallel is None or not parallel.is_active:
            return
        given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ValueError(
                "sequence parallelism: attention_mask must be a mask of padding (batch x tokens). Pass position_ids "
                "that restart in each sample for packed samples; other masks are not supported."
            )
        if positions is None:
            raise ValueError(
                f"sequence parallelism: {type(model).__name__} was called without position_ids, so each rank would "
                "number its tokens from 0. Pass the part of the batch that engine.sequence_parallel.split returns, or "
                "call it inside engine.sequence_parallel.whole_sequences() for whole sequences."
            )
        parallel.add_layout(positions, mask)


class _Replaced:
    """The attention implementation of a model under sequence parallelism. `remove` restores the previous one."""

    def __init__(self, model: Any) -> None:
        self._model, self._before = weakref.ref(model), model.config._attn_implementation
        core = self._before.removeprefix(_PREFIX) if self._before else "sdpa"
        model.set_attn_implementation(register(core if core != "eager" else "sdpa"))

    def remove(self) -> None:
        model: Any = self._model()
        if model is not None:
            model.set_attn_implementation(self._before)


def register(core: str) -> str:
    """Register the attention of whole sequences by SDPA, and by `core` for models whose inputs are not divided."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = _PREFIX + core
    AttentionInterface.register(name, attention_function(AttentionInterface()[core]))
    AttentionMaskInterface.register(name, mask_function(AttentionMaskInterface()[core]))
    return name


def attention_function(core: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function of transformers for models under sequence parallelism, `core` for others."""

    def ulysses_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        parallel = _parallel_of.get(module)
        if parallel is None or not parallel.is_active:
            return core(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
        unsupported += ["attention_mask"] if attention_mask is not None else []
        if unsupported:
            raise ValueError(
                f"sequence parallelism: {type(module).__name__} passes {', '.join(unsupported)} to its attention, "
                "which is not supported. Set sequence_parallel_size to 1."
            )
        is_causal = options.get("is_causal")
        chosen = AttentionOptions(
            bool(is_causal if is_causal is not None else getattr(module, "is_causal", True)),
            options.get("dropout") or 0.0,
            options.get("scaling"),
            options.get("sliding_window"),
        )
        output = parallel.attention(query, key, value, chosen, parallel.layout(options.get("position_ids")))
        return output.transpose(1, 2).contiguous(), None

    return ulysses_attention


def mask_function(core: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function of transformers that makes no mask under sequence parallelism, `core` for others."""

    def no_mask(*args: Any, **kwargs: Any) -> Any:
        return None if current() is not None else core(*args, **kwargs)

    return no_mask
