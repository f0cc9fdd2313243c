"""What the ranks that divide experts send each other: how many tokens each expert gets, and the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onefold.comm import Agreement, AllGatherOp, Group, Ledger, PeerExchange, make_collective

# What ranks wait for. Different names let the hang detector compare ranks.
ROUTING, TOKENS = "the routing of tokens to experts", "the tokens of experts"


class ExpertRanks:
    """The ranks that together have all experts of a layer."""

    def __init__(self, group: Group, ledger: Ledger, device: torch.device) -> None:
        self.group, self.size, self.rank = group, group.size, group.rank
        self._agreement = Agreement(group, ledger)
        self._collective = make_collective("native" if group.uses_nccl else "exchange", group, ledger, device)

    def gather_routing(self, mine: Tensor) -> list[list[int]]:
        """Return a vector of numbers of every rank, in rank order."""
        output = mine.new_empty(self.size * mine.numel())
        with self._agreement.guard.waiting_for(ROUTING):
            self._collective.start_gather([AllGatherOp(output, mine)]).finish()
        rows: list[list[int]] = output.view(self.size, -1).tolist()
        return rows

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on. Return the received rows."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        outgoing, incoming = rows.contiguous().split(list(sent)), arrived.split(list(received))
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [
            PeerExchange(peer, outgoing[peer], incoming[peer])
            for distance in range(1, self.size)
            for peer in [(self.rank + distance) % self.size]
        ]
        with self._agreement.guard.waiting_for(TOKENS):
            self._collective.start_peer_exchange(peers, "tokens").finish()
        return arrived


class ExchangeTokens(torch.autograd.Function):
    """Sends rows to other ranks. Its backward returns their gradients.

    `anchor` requires a gradient. It makes every rank run the backward, if the rows of only some ranks require one.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: ExpertRanks, rows: Tensor, sent: Sequence[int], received: Sequence[int], anchor: Tensor | None
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchange(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.ranks.exchange(gradient, ctx.received, ctx.sent), None, None, None
