"""Attention of transformers models under sequence parallelism, through their own attention and mask interfaces.

A model gets an attention function of its own, registered as `ulysses_sdpa`, and a mask function that returns a
`SequenceMask`, because a tensor would cover this rank's tokens only. The attention gets this object as its mask: causal
or not, the window, and where samples and padding are in the whole sequences ([Note: exchange of heads] in `heads.py`).
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.sequence.attention import AttentionOptions, SequenceMask
from onefold.sequence.dispatch import Divided, current, model_of
from onefold.sequence.heads import key_head_repeats

_PREFIX = "ulysses_"
# Kinds of layers whose attention sees only its own tokens and those before them in the sequence.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments of attention functions that would have to be divided by heads.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
# Models whose loss is not one of tokens: it needs a certain token, or logits of all of them.
_LOSS_OF_SEQUENCES = re.compile("For(SequenceClassification|QuestionAnswering|MultipleChoice|NextSentencePrediction)")
# Functions of transformers that compute positions from padding_idx on, unlike those that are passed.
_OTHER_POSITIONS = "create_position_ids_from_input_ids"
# The functions of transformers that combine to masks which attention computes from a `SequenceMask`.
_CAUSAL, _BIDIRECTIONAL = "causal_mask_function", "bidirectional_mask_function"
_WINDOWS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_PACKED = "packed_sequence_mask_function"


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
        # Scripts also call the base model, for hidden states.
        handles.append(module.base_model.register_forward_pre_hook(_Inputs(parallel), with_kwargs=True))
        for rotary in filter(_depends_on_length, module.modules()):
            table = _RotaryTable(parallel)
            handles.append(rotary.register_forward_pre_hook(table.add_position, with_kwargs=True))
            handles.append(rotary.register_forward_hook(table.drop_position))
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
    if loss := _LOSS_OF_SEQUENCES.search(name):
        raise ConfigError(
            f"sequence_parallel_size = {size}: {name} computes a loss {loss.group()} from whole sequences. Use 1, or a "
            "model whose loss is that of tokens."
        )
    if any(hasattr(each, _OTHER_POSITIONS) or _OTHER_POSITIONS in _globals_of(each) for each in model.modules()):
        raise ConfigError(
            f"sequence_parallel_size = {size}: {name} does not number positions from 0 ({_OTHER_POSITIONS}). Use 1."
        )
    if getattr(config, "trigram_input", False):
        raise ConfigError(f"sequence_parallel_size = {size}: {name} embeds each token with its neighbours. Use 1.")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(
            f"sequence_parallel_size = {size}: the forward of {name} takes no position_ids, so each rank would number "
            "its tokens from 0. Use 1."
        )
    heads = getattr(config, "num_attention_heads", None)
    if heads:
        try:
            key_head_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _globals_of(module: nn.Module) -> dict[str, Any]:
    """Return the names in the Python module that defines the class of a module."""
    return vars(sys.modules.get(type(module).__module__, object))  # type: ignore[return-value]


class _Inputs:
    """A pre-hook that reads positions and padding of a forward."""

    def __init__(self, parallel: Divided) -> None:
        self._parallel = weakref.ref(parallel)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        parallel = self._parallel()
        if parallel is not None:
            parallel.record_activity()
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
        parallel.read_layout(positions, mask)


def _depends_on_length(module: nn.Module) -> bool:
    """Return whether a module makes a rotary table whose frequencies depend on the largest position."""
    kinds = getattr(module, "rope_type", None)
    each = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in each)


class _RotaryTable:
    """Hooks of a rotary table that pass the largest position of the whole sequences as one more token."""

    def __init__(self, parallel: Divided) -> None:
        self._parallel = weakref.ref(parallel)

    def add_position(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Add the position, as the second argument of the tables of transformers."""
        parallel = self._parallel()
        if parallel is None or not parallel.is_active:
            return None
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        positions = given.arguments["position_ids"]
        last = parallel.last_position.to(positions).expand(*positions.shape[:-1], 1)
        given.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
        return given.args, given.kwargs

    def drop_position(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Drop the row of the added position from a table, or from the tables of sines and cosines."""
        parallel = self._parallel()
        if parallel is None or not parallel.is_active:
            return None
        return output[..., :-1, :] if isinstance(output, Tensor) else tuple(table[..., :-1, :] for table in output)


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
        parallel = model_of(module)
        if parallel is None:
            return core(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        mask = attention_mask if isinstance(attention_mask, SequenceMask) else None
        unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
        unsupported += ["attention_mask"] if mask is not attention_mask else []
        if unsupported:
            raise ValueError(
                f"sequence parallelism: {type(module).__name__} passes {', '.join(unsupported)} to its attention, "
                "which is not supported. Set sequence_parallel_size to 1."
            )
        is_causal = options.get("is_causal")
        is_causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        if mask is not None and mask.is_causal != is_causal:
            kinds = "causal attention" if is_causal else "attention that is not causal"
            raise ValueError(
                f"sequence parallelism: {type(module).__name__} computes {kinds} with another mask, which is not "
                "supported. Set sequence_parallel_size to 1."
            )
        window = mask.window if mask is not None else options.get("sliding_window")
        chosen = AttentionOptions(is_causal, options.get("dropout") or 0.0, options.get("scaling"), window)
        return parallel.attention(query, key, value, chosen, mask).transpose(1, 2).contiguous(), None

    return ulysses_attention


def mask_function(core: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function of transformers for models under sequence parallelism, `core` for others."""

    def sequence_mask(*args: Any, **kwargs: Any) -> Any:
        parallel = current()
        if parallel is None:
            return core(*args, **kwargs)
        parts = {part.__qualname__.partition(".")[0]: part for part in _parts(kwargs["mask_function"])}
        others = parts.keys() - {_CAUSAL, _BIDIRECTIONAL, *_WINDOWS, _PACKED}
        if others:
            raise ValueError(
                f"sequence parallelism: the model makes a mask by {', '.join(sorted(others))}, which is not supported. "
                "Set sequence_parallel_size to 1."
            )
        if parallel.is_packed and not _separates_samples(sys._getframe(1)):
            raise ValueError(
                "sequence parallelism: position_ids restart, as for packed samples, but the attention of the model "
                "does not separate samples, or not with a cache. Pass use_cache=False, or do not pack samples."
            )
        windows = [_nonlocal(parts[name], "sliding_window") for name in _WINDOWS if name in parts]
        return parallel.mask(
            kwargs["batch_size"],
            is_causal=_CAUSAL in parts,
            window=windows[0] if windows else None,
            hides_padding=kwargs.get("attention_mask") is not None,
        )

    return sequence_mask


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the mask functions whose intersection a mask function of transformers is."""
    if not function.__qualname__.startswith("and_masks."):
        yield function
        return
    for part in _nonlocal(function, "mask_functions"):
        yield from _parts(part)


def _nonlocal(function: Callable[..., Any], name: str) -> Any:
    return inspect.getclosurevars(function).nonlocals[name]


def _separates_samples(frame: FrameType | None) -> bool:
    """Return whether the function of transformers that makes a mask got what it needs to separate packed samples."""
    while frame is not None and not frame.f_code.co_name.startswith("create_"):
        frame = frame.f_back
    given = frame.f_locals if frame is not None else {}
    return given.get("position_ids") is not None and given.get("past_key_values") is None
