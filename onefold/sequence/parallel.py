"""`SequenceParallel`: the ranks that share sequences, their attention, their parts of a batch and their loss.

[Note: gradients under sequence parallelism]
All S ranks of a sequence compute the same loss: the mean over the tokens of all of them (`mean_loss`). Each runs its
own backward, so the gradient that reaches a rank's parameters, through the exchanges of heads and through the mean, is
S times its share of the gradient of that loss. The engine averages over all ranks, the S of a sequence included, which
removes the factor. Hugging Face's Trainer does the same with an all-gather of losses, whose backward sums over ranks.
A loss that is the mean over the rank's own tokens gives the same gradient if all ranks have equally many labels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from onefold.comm import Group, Ledger, sequence_group
from onefold.errors import ConfigError
from onefold.runtime.torch_internals import inside_backward, outside_compiler
from onefold.sequence import dispatch, transformers_models
from onefold.sequence.attention import AttentionOptions, SequenceLayout, SequenceMask, attend
from onefold.sequence.heads import gather_heads, scatter_heads
from onefold.sequence.parts import IGNORED, split_batch
from onefold.sequence.sequence_loader import SequenceLoader
from onefold.sequence.sequence_ranks import LOSS, SequenceRanks

# Layers that combine tokens, or compute statistics over them, in addition to convolutions.
_TOKEN_LAYERS = (nn.RNNBase, nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d)


class SequenceParallel:
    """The ranks that compute parts of the same sequences, as `engine.sequence_parallel`.

    With a size of 1 everything works in the same way, without communication, so that one script serves all sizes.
    """

    def __init__(self, model: nn.Module, group: Group | None, ledger: Ledger, device: torch.device) -> None:
        self.ranks = SequenceRanks(group, ledger, device)
        self.size, self.rank = self.ranks.size, self.ranks.rank
        self.in_evaluation = True
        """Whether models in evaluation mode get parts of sequences too."""
        self.shifts_labels = transformers_models.shifts_labels(model)
        """Whether the model computes the loss of the next token, so that `split` shifts labels."""
        self._model = weakref.ref(model)
        self._whole = False
        self._is_closed = False
        self._num_attentions = 0
        # Whether all ranks have compared the shapes of their inputs in this forward.
        self._has_compared = False
        # Whether inputs were parts in the latest forward with gradients, which a backward may compute again.
        self._was_active = True
        self._layout = SequenceLayout()
        self.last_position = torch.zeros((), dtype=torch.long)
        """The largest position in the sequences of this forward."""
        self._handles: list[Any] = []
        if group is None:
            return
        check_layers(model, self.size)
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward, prepend=True),
            model.register_forward_hook(self._end_forward, always_call=True),
            *(
                module.register_forward_pre_hook(self._check_weights, with_kwargs=True)
                for module in model.modules()
                if isinstance(module, nn.MultiheadAttention)
            ),
            *transformers_models.prepare(model, self),
        ]
        dispatch.add(self, model)

    def close(self) -> None:
        """Restore the attention of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_closed = [], True
        dispatch.remove(self)

    # -- what scripts use ---------------------------------------------------------------------------------------

    def split(self, batch: Any) -> Any:
        """Return this rank's part of a batch that all ranks of the sequence have. See `split_batch`."""
        return split_batch(batch, self.size, self.rank, shifts_labels=self.shifts_labels)

    def loader(self, batches: Iterable[Any]) -> SequenceLoader:
        """Return a loader of this rank's parts of batches, from a loader that yields other batches on every rank."""
        return SequenceLoader(batches, self.ranks, shifts_labels=self.shifts_labels)

    def mean_loss(self, loss: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
        """Return the mean over the tokens of all ranks, from the mean over this rank's tokens.

        `labels` are those of this rank's tokens. Tokens with the label `ignore_index` do not count, and a rank may have
        no others. All ranks get the same value, and must run its backward.
        """
        if self.size == 1:
            return loss
        count = (labels != ignore_index).sum()
        return _MeanLoss.apply(loss, count, self)  # type: ignore[no-any-return, no-untyped-call]

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Compute whole sequences on every rank in this context, for `generate` or an evaluation of undivided batches.

        Ranks may then have different batches.
        """
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    # -- attention ----------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether inputs of the model are parts of sequences now, or were in the forward that a backward recomputes."""
        if self._is_closed or self.size == 1:
            return False
        if inside_backward():
            return self._was_active
        if self._whole:
            return False
        model = self._model()
        return self.in_evaluation or model is None or model.training

    @outside_compiler
    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: SequenceMask | None
    ) -> Tensor:
        """Return the attention of this rank's tokens to whole sequences. See [Note: exchange of heads]."""
        if query.dim() != 4 or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"sequence parallelism: attention of {tuple(query.shape)} queries to {tuple(key.shape)} keys is not "
                "supported: both must be batch x heads x tokens x dim with the same tokens. Call models that use a "
                "cache (generate) inside engine.sequence_parallel.whole_sequences()."
            )
        self._num_attentions += 1
        if not self._has_compared:
            self._compare([query.shape[0], query.shape[2], query.shape[1], key.shape[1]])
        query, key, value = scatter_heads(self.ranks.exchange, self.size, query, key, value)
        layout = mask.layout.of_rows(mask.rows) if mask is not None else SequenceLayout()
        with dispatch.undivided():
            output = attend(query, key, value, options, layout)
        return gather_heads(self.ranks.exchange, self.size, output)

    def record_activity(self) -> None:
        """Record whether inputs of a forward that begins are parts, for a backward that computes it again."""
        if torch.is_grad_enabled() and not inside_backward():
            self._was_active = self.is_active

    def read_layout(self, position_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Find out where samples and padding are in the sequences of a forward, from this rank's part of them."""
        self._compare([*position_ids.shape, attention_mask is not None])
        positions, mask = self.ranks.gather_tokens(position_ids), self.ranks.gather_tokens(attention_mask)
        assert positions is not None
        self.last_position = positions.max()
        self._layout = SequenceLayout.of(positions, mask) if self.ranks.device.type != "meta" else SequenceLayout()

    @property
    def is_packed(self) -> bool:
        """Whether sequences of this forward consist of several samples."""
        return self._layout.documents is not None

    def mask(self, batch: int, *, is_causal: bool, window: int | None, hides_padding: bool) -> SequenceMask:
        """Return the mask of the sequences of this forward."""
        layout = self._layout if hides_padding or self.is_packed else SequenceLayout()
        return SequenceMask(layout, is_causal, window, torch.arange(batch, device="cpu"))

    def _begin_forward(self, *_: Any) -> None:
        dispatch.begin_forward(self)
        self._num_attentions, self._has_compared = 0, False
        self.record_activity()

    def _end_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        dispatch.end_forward(self)
        if self.is_active and not self._num_attentions and output is not None:
            raise RuntimeError(
                f"sequence parallelism: the forward of {type(model).__name__} called neither torch's "
                "scaled_dot_product_attention nor an attention function of transformers, so its tokens saw only this "
                "rank's part of the sequence. Use torch.nn.functional.scaled_dot_product_attention."
            )

    def _check_weights(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise for attention weights, which torch does not compute by its attention function."""
        if self.is_active and (args[4] if len(args) > 4 else kwargs.get("need_weights", True)):
            raise ValueError(
                "sequence parallelism: nn.MultiheadAttention was called for its weights, which cover this rank's part "
                "of the sequence only. Pass need_weights=False."
            )

    def _compare(self, row: list[int]) -> None:
        """Raise if the parts of a sequence differ in shape, before the ranks send them."""
        rows = self.ranks.synchronize(row)
        self._has_compared = True
        if any(other != rows[0] for other in rows):
            group = self.ranks.group
            assert group is not None
            shown = "; ".join(f"rank {group.global_rank(rank)}: {tuple(other)}" for rank, other in enumerate(rows))
            raise ValueError(
                f"sequence parallelism: the ranks of a sequence have inputs of different shapes ({shown}). Give all of "
                "them the same batch, divided by engine.sequence_parallel.split."
            )


def check_layers(model: nn.Module, size: int) -> None:
    """Raise if a model has layers other than attention that combine tokens, or statistics of them."""
    for name, module in model.named_modules():
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if convolves or isinstance(module, _TOKEN_LAYERS):
            raise ConfigError(
                f"sequence_parallel_size = {size}: {name} is a {type(module).__name__}, which would see the tokens of "
                "one rank only. Use 1, or a model in which only attention combines tokens."
            )


def make_sequence_parallel(
    model: nn.Module, size: int, group: Group, ledger: Ledger, device: torch.device
) -> SequenceParallel:
    """Return the sequence parallelism of an engine on the ranks of `group`. All ranks call this together."""
    return SequenceParallel(model, sequence_group(size, group) if size > 1 else None, ledger, device)


class _MeanLoss(torch.autograd.Function):
    """The mean over the tokens of all ranks. See [Note: gradients under sequence parallelism]."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor, parallel: SequenceParallel) -> Tensor:
        mean = torch.where(count > 0, loss, 0.0).double()
        sums = parallel.ranks.gather(LOSS, torch.stack([mean * count, count.double()])).sum(0)
        total = sums[1].clamp(min=1)
        ctx.factor = (parallel.size * count / total).to(loss.dtype)
        return (sums[0] / total).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient * ctx.factor, None, None
