"""The loss of a language model in tiles of tokens, so that the logits of all tokens never exist at one time."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.runtime.chunked_call import ChunkedCall
from onefold.runtime.torch_internals import outside_compiler, reads_no_values

# The fp32 logits of a tile, and the fewest tokens of one. Fewer would slow down the matrix product of the head.
_TILE_BYTES, _MIN_TOKENS = 256 << 20, 1024


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
    return -(-num_tokens // max(_MIN_TOKENS, _TILE_BYTES // (4 * vocabulary)))


class _LastHidden(Tensor):
    """The input of a head in place of its logits, which are not computed. Only the tiled loss may use it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not reads_no_values(func):
            raise RuntimeError(
                "The logits were not computed, because the model computes its loss in tiles in training mode. Use its "
                "loss alone, or remove onefold.use_tiled_loss if its forward changes the logits (soft caps, scales)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def use_tiled_loss(model: nn.Module, num_tiles: int | None = None) -> None:
    """Make a causal language model of transformers compute its loss by `tiled_cross_entropy`.

    This applies to calls with `labels` in training mode. They return a loss and no logits. All other calls, such as an
    evaluation, are not changed. Call this before `initialize`, and before adapters are added.
    """
    causal: Any = model
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if head is None or not hasattr(causal, "loss_function"):
        raise ValueError(
            f"use_tiled_loss: a {type(model).__name__} has no output embeddings with a loss function of transformers. "
            "Call onefold.tiled_cross_entropy in its forward."
        )
    name = getattr(causal.loss_function, "__name__", type(causal.loss_function).__name__)
    if name != "ForCausalLMLoss":
        raise ValueError(
            f"use_tiled_loss: the loss function of this {type(model).__name__} is {name}, but only the ForCausalLMLoss "
            "of transformers can be computed in tiles. Call onefold.tiled_cross_entropy in its forward."
        )
    _TiledModel(causal, head, num_tiles)


class _TiledModel:
    """The loss of one model in tiles. Copies of the model have a copy of it, because it is bound to the model."""

    def __init__(self, model: Any, head: nn.Module, num_tiles: int | None) -> None:
        self._head, self._num_tiles = head, num_tiles
        self._compute_logits, self._compute_loss = head.forward, model.loss_function
        # Whether a call is under way that returns a loss and no logits.
        self._is_active = False
        head.forward, model.loss_function = self.forward, self.loss  # type: ignore[method-assign]
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, always_call=True)

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Decide before a forward of the model."""
        self._is_active = model.training and torch.is_grad_enabled() and kwargs.get("labels") is not None

    def after(self, *_: Any) -> None:
        """End the forward of the model."""
        self._is_active = False

    def forward(self, hidden: Tensor) -> Any:
        """Return the hidden states in place of logits, or the logits."""
        return hidden.as_subclass(_LastHidden) if self._is_active else self._compute_logits(hidden)

    def loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, as the function of transformers does."""
        if not isinstance(logits, _LastHidden):
            return self._compute_loss(logits, labels, *args, **kwargs)
        self._is_active = False  # the head computes logits in the tiles
        ignored, num_items = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        with torch._C.DisableTorchFunctionSubclass():
            hidden = logits.as_subclass(Tensor)
        reduction: Literal["mean", "sum"] = "mean" if num_items is None else "sum"
        total = tiled_cross_entropy(
            hidden, self._head, targets.to(hidden.device), self._num_tiles, ignore_index=ignored, reduction=reduction
        )
        return total if num_items is None else total / num_items
