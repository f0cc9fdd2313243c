"""The exchange of tokens of an expert layer, to the ranks of their experts and back ([Note: the path of a token])."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onefold.moe.expert_layers import ExpertLayer
from onefold.moe.expert_ranks import ExpertRanks, exchange_tokens

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Numbers of rows that a rank receives: of each rank, for each of its own experts.
Arriving = list[list[int]]


class TokenExchange:
    """The exchange of tokens of one expert layer."""

    def __init__(self, layer: ExpertLayer, number: int, ranks: ExpertRanks) -> None:
        self._layer, self._number, self._ranks = layer, number, ranks
        self.num_own = layer.num_experts // ranks.size

    @property
    def first_own(self) -> int:
        """The first expert of this rank."""
        return self._ranks.rank * self.num_own

    def compute(
        self,
        rows: Tensor,
        counts: Tensor | Sequence[int],
        num_choices: int,
        trains: bool,
        experts: Callable[[Tensor, Arriving], Tensor],
        overlapped: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the results of the experts for the rows of this rank.

        `rows` are sorted by expert, `counts` has their number for each expert. `experts` computes the rows that arrive
        at this rank, by rank and own expert. `num_choices` is the number of experts of a token. `overlapped` runs
        while the exchange that sends rows to the experts is in flight.
        """
        sent, arriving = self._route(rows, counts, num_choices)
        received = [sum(part) for part in arriving]
        computed = experts(exchange_tokens(self._ranks, rows, sent, received, overlapped=overlapped), arriving)
        anchor = rows.new_zeros((), requires_grad=True) if trains and torch.is_grad_enabled() else None
        return exchange_tokens(self._ranks, computed, received, sent, anchor)

    def _route(self, rows: Tensor, counts: Tensor | Sequence[int], num_choices: int) -> tuple[list[int], Arriving]:
        """Return the numbers of rows sent to each rank, and those received from each rank for each own expert."""
        num_ranks = self._ranks.size
        if rows.is_meta:  # a dry run assumes that every expert gets as many tokens
            each = [len(rows) // self._layer.num_experts] * self._layer.num_experts
            each[0] += len(rows) - sum(each)
            arriving = [each[: self.num_own]] * num_ranks
            return [sum(part) for part in arriving], arriving
        counts = torch.as_tensor(counts, device=rows.device)
        has_gradient = int(torch.is_grad_enabled()) + int(rows.requires_grad)
        header = [self._number, rows.shape[1], num_choices, _DTYPES.index(rows.dtype), has_gradient]
        found = self._ranks.gather_routing(torch.cat([counts.new_tensor(header), counts]))
        self._check([row[: len(header)] for row in found])
        if any(row[-1] for row in found):
            raise ValueError(
                f"expert parallelism: {self._layer.name} was called with expert {self._layer.num_experts}, which does "
                "not exist, for tokens without an expert. Set onefold.expert_parallel_size to 1."
            )
        starts = range(0, self._layer.num_experts, self.num_own)
        by_rank = [[row[len(header) :][at : at + self.num_own] for at in starts] for row in found]
        own = self._ranks.rank
        return [sum(part) for part in by_rank[own]], [parts[own] for parts in by_rank]

    def _check(self, headers: list[list[int]]) -> None:
        """Raise if ranks route different kinds of tokens, before they send them."""
        if any(header != headers[0] for header in headers):
            shown = "; ".join(
                f"rank {self._ranks.group.global_rank(rank)}: expert layer {number}, {width} features, {k} experts for "
                f"each, {_DTYPES[dtype]}, {('no gradients', 'no gradients of tokens', 'gradients')[has_gradient]}"
                for rank, (number, width, k, dtype, has_gradient) in enumerate(headers)
            )
            raise ValueError(
                f"expert parallelism: the ranks call different layers, or with different tokens; this rank calls "
                f"{self._layer.name}, layer {self._number} ({shown}). Run the same layers on all ranks, in the same "
                "mode."
            )
