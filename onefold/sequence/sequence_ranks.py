"""What the ranks of a sequence send each other: heads, losses, positions, and the batches that one of them loads."""

from __future__ import annotations

import torch
from torch import Tensor

from onefold.comm import Agreement, AllGatherOp, Group, Ledger, PeerExchange, broadcast_from, make_collective

# What ranks wait for. Different names let the hang detector compare ranks.
SHAPES, LAYOUT = "the shapes of the parts of a sequence", "the positions of a sequence"
ATTENTION, LOSS, BATCH = "the attention of a sequence", "the mean loss of a sequence", "the next batch of a sequence"


class SequenceRanks:
    """The neighbouring ranks that compute parts of the same sequences. `group` is None for a single rank."""

    def __init__(self, group: Group | None, ledger: Ledger, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = (group.size, group.rank) if group is not None else (1, 0)
        self._ledger = ledger
        if group is not None:
            self._agreement = Agreement(group, ledger)
            self._collective = make_collective("native" if group.uses_nccl else "exchange", group, ledger, device)

    def synchronize(self, row: list[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in rank order."""
        if self.group is None:
            return [row]
        return [other[: len(row)] for other in self._agreement.synchronize(SHAPES, row)]

    def exchange(self, outgoing: Tensor) -> Tensor:
        """Send row r of a matrix to rank r, and return the rows received from each rank."""
        incoming = torch.empty_like(outgoing)
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [PeerExchange(rank, outgoing[rank], incoming[rank]) for rank in range(self.size) if rank != self.rank]
        with self._agreement.guard.waiting_for(ATTENTION):
            self._collective.start_peer_exchange(peers, "attention").finish()
        return incoming

    def gather(self, what: str, values: Tensor) -> Tensor:
        """Return the vectors of all ranks, as rows. `what` names the wait."""
        if self.group is None:
            return values.reshape(1, -1)
        output = values.new_empty(self.size * values.numel())
        with self._agreement.guard.waiting_for(what):
            self._collective.start_gather([AllGatherOp(output, values.reshape(-1))]).finish()
        return output.view(self.size, -1)

    def gather_tokens(self, part: Tensor | None) -> Tensor | None:
        """Return the numbers of all tokens, from those of this rank's tokens (batch x tokens)."""
        if part is None:
            return None
        rows = self.gather(LAYOUT, part.long())
        return rows.view(self.size, *part.shape).movedim(0, 1).flatten(1, 2)

    def exchange_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        if self.group is None:
            return [text]
        return [self._agreement.broadcast_text(BATCH, text, rank) for rank in range(self.size)]

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a tensor with the values of one rank."""
        if self.group is not None:
            with self._agreement.guard.waiting_for(BATCH):
                broadcast_from(self.group, rank, tensor, self._ledger)
        return tensor
