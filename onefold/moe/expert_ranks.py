"""Exchanges between the ranks that divide experts: the number of tokens of each expert, and the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onefold.comm import Agreement, AllGatherOp, Group, Ledger, PeerExchange, Pending, make_collective

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

    def start_exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> TokensInFlight:
        """Start to send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on."""
        rows, arriving = rows.contiguous(), rows.new_empty(sum(received), *rows.shape[1:])
        outgoing, incoming = rows.split(list(sent)), arriving.split(list(received))
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [
            PeerExchange(peer, outgoing[peer], incoming[peer])
            for distance in range(1, self.size)
            for peer in [(self.rank + distance) % self.size]
        ]
        with self._agreement.guard.waiting_for(TOKENS):
            return TokensInFlight(arriving, rows, self._collective.start_peer_exchange(peers, "tokens"))

    def finish_exchange(self, tokens: TokensInFlight) -> None:
        """Wait until the rows in `tokens.arriving` may be used."""
        with self._agreement.guard.waiting_for(TOKENS):
            tokens.pending.finish()


@dataclass
class TokensInFlight:
    """Rows that ranks send each other. It holds both buffers until the exchange is finished."""

    arriving: Tensor
    outgoing: Tensor
    pending: Pending


def exchange_tokens(
    ranks: ExpertRanks,
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    anchor: Tensor | None = None,
    overlapped: Callable[[], None] | None = None,
) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on. Return the received rows.

    `overlapped` runs while the exchange is in flight. Autograd exchanges the gradients of the rows in the other
    direction, and runs the backward of `overlapped` while that exchange is in flight. `anchor` requires a gradient. It
    makes every rank run the backward, if the rows of only some ranks require one.
    """
    exchange = _Exchange(ranks, sent, received)
    arriving: Tensor = _Send.apply(exchange, rows, anchor)  # type: ignore[no-untyped-call]
    # Without gradients of rows, `_Receive` saves no tensor, so that a checkpoint could end its recomputation in here.
    if overlapped is not None and (arriving.requires_grad or not torch.is_grad_enabled()):
        try:
            overlapped()
        except BaseException:
            exchange.finish()  # The other ranks take part in it.
            raise
    arrived: Tensor = _Receive.apply(exchange, arriving)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange:
    """The exchange of rows in forward, and of their gradients in backward."""

    def __init__(self, ranks: ExpertRanks, sent: Sequence[int], received: Sequence[int]) -> None:
        self._ranks, self._sent, self._received = ranks, sent, received
        self._in_flight: TokensInFlight | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Start to send rows. Return the buffer for those that arrive."""
        self._in_flight = self._ranks.start_exchange(rows, self._sent, self._received)
        return self._in_flight.arriving

    def start_back(self, gradients: Tensor) -> None:
        """Start to send the gradients of the rows back."""
        self._in_flight = self._ranks.start_exchange(gradients, self._received, self._sent)

    def finish(self) -> Tensor:
        """Wait for the exchange that was started, and return what has arrived."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None
        self._ranks.finish_exchange(in_flight)
        return in_flight.arriving


class _Send(torch.autograd.Function):
    """Starts to send rows. Its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, rows: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sent_back: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.finish(), None


class _Receive(torch.autograd.Function):
    """Waits for rows. Its backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, arriving: Tensor) -> Tensor:
        ctx.exchange = exchange
        # Without a saved tensor, a checkpoint would neither run again up to here nor before this backward.
        ctx.save_for_backward(arriving.new_empty(0))
        exchange.finish()
        ctx.mark_dirty(arriving)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # Runs a checkpoint again, which exchanges tokens, before gradients are exchanged.
        ctx.exchange.start_back(gradients)
        return None, gradients
