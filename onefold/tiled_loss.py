"""The loss of a language model in tiles of tokens, so that the logits of all tokens never exist at one time."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from onefold.runtime.chunked_call import ChunkedCall
from onefold.runtime.torch_internals import outside_compiler

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
