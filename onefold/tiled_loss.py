"""The loss of a language model in tiles of tokens, so that the logits of all tokens never exist at one time."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.errors import ConfigError
from onefold.runtime.chunked_call import ChunkedCall
from onefold.runtime.torch_internals import outside_compiler, reads_no_values
from onefold.sequence.transformers_models import outermost_models

# The fp32 logits of a tile, and the fewest tokens of one. Fewer would slow down the matrix product of the head.
TILE_BYTES, MIN_TOKENS = 256 << 20, 1024
# Keys of transformers' configs by which models scale or cap the logits that their heads have computed.
_CHANGE_LOGITS = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier",
)  # fmt: skip


@outside_compiler
def tiled_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    num_tiles: int | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the cross entropy of `head(hidden)` and `targets`, in fp32, one tile of tokens at a time.

    `hidden` has the shape (..., width) and `targets` the shape (...). `head` is the module that computes logits, such
    as `nn.Linear`, or its weight. Pass the module if its parameters may be sharded: it is then gathered once for all
    tiles. By default, the logits of a tile have about 256 MiB. Each tile is recomputed in backward, and the gradients
    of the head add in fp32.
    """
    tokens, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if len(tokens) != len(labels):
        raise ValueError(
            f"tiled_cross_entropy: hidden has {len(tokens)} tokens ({list(hidden.shape)}) and targets have "
            f"{len(labels)} ({list(targets.shape)}). Pass one target per token."
        )
    if num_tiles is None:
        num_tiles = _default_num_tiles(head, len(tokens))
    elif num_tiles < 1:
        raise ValueError(f"tiled_cross_entropy: num_tiles is {num_tiles}. Pass at least 1.")
    compute = head.forward if isinstance(head, nn.Module) else None

    def losses_of(some: Tensor, wanted: Tensor) -> Tensor:
        logits = compute(some) if compute is not None else F.linear(some, head)  # type: ignore[arg-type]
        return F.cross_entropy(logits.float(), wanted, ignore_index=ignore_index, reduction="none")

    def in_tiles(*inputs: Tensor) -> Any:
        parameters = list(head.parameters()) if isinstance(head, nn.Module) else [head]
        return ChunkedCall("tiled_cross_entropy", losses_of, inputs, {}).run(num_tiles, inputs, parameters)

    losses: Tensor = _call_instead(head, in_tiles, tokens, labels)
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum()
    return total / (labels != ignore_index).sum() if reduction == "mean" else total


def _call_instead(head: nn.Module | Tensor, forward: Any, *inputs: Tensor) -> Any:
    """Call a module with another forward, so that its hooks run, which gather its parameters."""
    if not isinstance(head, nn.Module):
        return forward(*inputs)
    before = head.__dict__.get("forward")
    head.forward = forward  # type: ignore[method-assign]
    try:
        return head(*inputs)
    finally:
        del head.__dict__["forward"]
        if before is not None:
            head.__dict__["forward"] = before


def _default_num_tiles(head: nn.Module | Tensor, num_tokens: int) -> int:
    vocabulary = head.shape[0] if isinstance(head, Tensor) else getattr(head, "out_features", None)
    if vocabulary is None:
        raise ValueError(
            f"tiled_cross_entropy: the size of the vocabulary of a {type(head).__name__} is unknown. Pass num_tiles."
        )
    return _tiles_of(num_tokens, vocabulary)


def _tiles_of(num_tokens: int, vocabulary: int) -> int:
    return max(1, -(-num_tokens // max(MIN_TOKENS, TILE_BYTES // (4 * vocabulary))))


class _LastHidden(Tensor):
    """The input of a head in place of its logits, which are not computed. Only the tiled loss may use it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not reads_no_values(func):
            raise RuntimeError(
                "The logits were not computed, because the model computes its loss in tiles in training mode. Use its "
                "loss alone, or remove onefold.use_tiled_loss (onefold.tiled_loss of the config) if its forward "
                "changes the logits (soft caps, scales)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def use_tiled_loss(model: nn.Module, num_tiles: int | None = None) -> None:
    """Make a causal language model of transformers compute its loss by `tiled_cross_entropy`.

    This applies to calls with `labels` in training mode. They return a loss and no logits. All other calls, such as an
    evaluation, are not changed. Call this before `initialize`, and before adapters are added. The key
    `onefold.tiled_loss` of the config does the same while an engine manages the model.
    """
    try:
        _check_model(model)
    except ConfigError as error:
        raise ValueError(f"use_tiled_loss: {error}") from None
    TiledLoss(model, num_tiles, is_required=False)


def check_losses(model: nn.Module) -> None:
    """Raise if the losses of the models of transformers in `model` cannot be computed in tiles."""
    found = list(outermost_models(model))
    if not found:
        raise ConfigError(
            f"onefold.tiled_loss: a {type(model).__name__} contains no model of transformers. Call "
            "onefold.tiled_cross_entropy in its forward, and leave out onefold.tiled_loss."
        )
    for each in found:
        try:
            _check_model(each)
        except ConfigError as error:
            raise ConfigError(f"onefold.tiled_loss: {error}") from None


def tile_losses(model: nn.Module, num_tiles: int | None) -> list[TiledLoss]:
    """Make the models of transformers in `model` compute their losses in tiles, by the key `onefold.tiled_loss`."""
    return [TiledLoss(each, num_tiles, is_required=True) for each in outermost_models(model)]


class TiledLoss:
    """The forward of one model, its head and its loss in tiles. Copies of the model have a copy of it.

    `is_required`: a training call that does not compute its loss in tiles is an error.
    """

    def __init__(self, model: Any, num_tiles: int | None, *, is_required: bool) -> None:
        head = model.get_output_embeddings()
        self._model, self._head, self._num_tiles, self._is_required = model, head, num_tiles, is_required
        self._is_removed = False
        self._call, self._compute_logits, self._compute_loss = model.forward, head.forward, model.loss_function
        # Whether a call is under way that returns a loss and no logits, and whether it has computed the loss.
        self._is_active = self._has_loss = False
        functools.update_wrapper(self, self._call, updated=())
        replaced: list[tuple[nn.Module, str, Any]] = [
            (model, "forward", self), (head, "forward", self.forward), (model, "_loss_function", self.loss)
        ]  # fmt: skip
        self._replaced = [(module, name, module.__dict__.get(name), own) for module, name, own in replaced]
        for module, name, own in replaced:
            module.__dict__[name] = own

    def remove(self) -> None:
        """Restore the model. Functions that others have put around these in the meantime remain."""
        self._is_removed = True
        for module, name, before, own in self._replaced:
            if module.__dict__.get(name) == own:
                del module.__dict__[name]
                module.__dict__.update({name: before} if before is not None else {})

    @outside_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_removed or not (self._model.training and torch.is_grad_enabled()):
            return self._call(*args, **kwargs)
        has_labels = self._has_labels(args, kwargs)
        # Loops of sequence parallelism call the loss function themselves, with these labels.
        is_shifted = kwargs.get("shift_labels") is not None
        if not (has_labels or is_shifted) and self._is_required:
            raise RuntimeError(
                f"onefold.tiled_loss: {type(self._model).__name__} is called in training mode without labels, so it "
                "would compute the logits of all tokens. Pass labels (label smoothing and user-defined losses of "
                "trainers remove them), or leave out onefold.tiled_loss."
            )
        self._is_active, self._has_loss = has_labels or is_shifted, False
        try:
            output = self._call(*args, **kwargs)
        finally:
            self._is_active = False
        if has_labels and not self._has_loss and self._is_required:
            raise RuntimeError(
                f"onefold.tiled_loss: the forward of {type(self._model).__name__} computes its loss in another way "
                "than by its loss function, such as a fused head of TRL or Liger, which has tiles of its own. Leave "
                "out onefold.tiled_loss, or the other head."
            )
        return output

    def _has_labels(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call passes labels, by name or by position."""
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(self._call).bind_partial(*args, **kwargs).arguments.get("labels")
        return labels is not None

    @outside_compiler
    def forward(self, hidden: Tensor) -> Any:
        """Return the hidden states in place of logits, or the logits."""
        return hidden.as_subclass(_LastHidden) if self._is_active else self._compute_logits(hidden)

    @outside_compiler
    def loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, as the function of transformers does."""
        if not isinstance(logits, _LastHidden):
            return self._compute_loss(logits, labels, *args, **kwargs)
        self._is_active, self._has_loss = False, True  # the head computes logits in the tiles
        ignored, num_items = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        with torch._C.DisableTorchFunctionSubclass():
            hidden = logits.as_subclass(Tensor)
        num_tiles = self._num_tiles
        if num_tiles is None:
            num_tiles = _tiles_of(targets.numel(), self._model.config.get_text_config().vocab_size)
        reduction: Literal["mean", "sum"] = "mean" if num_items is None else "sum"
        total = tiled_cross_entropy(
            hidden, self._head, targets.to(hidden.device), num_tiles, ignore_index=ignored, reduction=reduction
        )
        if num_items is None:
            return total
        return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


def _check_model(model: Any) -> None:
    """Raise if the loss of a model cannot be computed in tiles."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind, instead = type(model).__name__, "Call onefold.tiled_cross_entropy in its forward."
    if head is None or not hasattr(model, "loss_function"):
        raise ConfigError(f"a {kind} has no output embeddings with a loss function of transformers. {instead}")
    if isinstance(getattr(model.loss_function, "__self__", None), TiledLoss):
        raise ConfigError(f"the loss of this {kind} is computed in tiles already. Leave out one of the two.")
    name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if name != "ForCausalLMLoss":
        raise ConfigError(
            f"the loss function of this {kind} is {name}, but only the ForCausalLMLoss of transformers can be computed "
            f"in tiles. {instead}"
        )
    config = model.config.get_text_config()
    changes = [key for key in _CHANGE_LOGITS if getattr(config, key, None) not in (None, 1)]
    if changes:
        raise ConfigError(
            f"a {kind} changes its logits by {changes[0]} = {getattr(config, changes[0])} after its head, so they "
            f"cannot be computed in tiles. {instead}"
        )
