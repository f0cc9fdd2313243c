"""Count the tokens of the micro-steps of a step, and their FLOPs, for reports of the throughput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onefold.engine.train_state import TrainState
from onefold.optim.norm import HostCopy
from onefold.report.model_flops import ModelFlops


class TokenCounter:
    """The tokens of this rank since the last step. Counting does not wait for the device."""

    def __init__(self, state: TrainState) -> None:
        self._state, self._flops = state, ModelFlops.of(state.model)
        # The ranks of a sequence have equal parts of its rows.
        self._parts = state.group.size // state.window.batch.world
        # Of each forward: tokens, and the length of the rows on this rank.
        self._seen: list[tuple[int | torch.Tensor, int]] = []
        self._given: list[tuple[int | torch.Tensor, int]] = []

    def see(self, kwargs: Mapping[str, Any]) -> None:
        """Count the `input_ids` of a training forward, without those that `attention_mask` excludes."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not torch.is_grad_enabled():
            return
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            self._seen.append(((mask != 0).sum(), ids.shape[1]))
        else:
            self._seen.append((ids.numel(), ids.shape[1]))

    def add(self, tokens: int, row_length: int) -> None:
        """Count tokens that the caller names. Those of the step's forwards are then not counted."""
        self._given.append((tokens, row_length))

    def take(self) -> tuple[HostCopy, HostCopy | None] | None:
        """Return the tokens since the last step and their FLOPs, or None if there are none. Start again at 0."""
        counted = self._given or self._seen
        self._given, self._seen = [], []
        if not counted:
            return None
        device = self._state.device
        number = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each, _ in counted])
        if self._flops is None:
            return HostCopy(number.sum()), None
        each = [self._flops.per_token(length * self._parts) for _, length in counted]
        return HostCopy(number.sum()), HostCopy((number * torch.tensor(each, dtype=number.dtype, device=device)).sum())
