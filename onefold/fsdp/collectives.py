"""Quantized collectives for PyTorch's FSDP2: `module.set_custom_all_gather(QuantizedAllGather())`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from onefold.comm.codec import BLOCK, Codec
from onefold.comm.collective import AllGatherOp, Ledger, Reduction
from onefold.comm.exchange import Exchange
from onefold.comm.mesh import DATA_AXIS, Group
from onefold.comm.nodes import Nodes
from onefold.comm.quantized import Quantized, Wires
from onefold.plan.layout import round_up


class _Quantized:
    """A collective for each process group, and their common ledger."""

    def __init__(self, wires: Wires, node_size: int | None) -> None:
        self._wires, self._node_size = wires, node_size
        self.ledger = Ledger()
        self._collective = cache(self._make)

    def _make(self, group: dist.ProcessGroup, device: torch.device) -> Quantized:
        num_ranks = dist.get_world_size(group)
        size = self._node_size or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        ours = Group(DATA_AXIS, group, group, Nodes.of_size(size if num_ranks % size == 0 else num_ranks, num_ranks))
        return Quantized(Exchange(ours, self.ledger, device), self._wires, device)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far."""
        return sum(row.bytes for row in self.ledger.rows())

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer for FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)


class QuantizedAllGather(_Quantized, AllGather):
    """An all-gather that sends parameters as 8-bit integers."""

    def __init__(self, *, bits: int = 8, node_size: int | None = None) -> None:
        super().__init__(Wires(parameters=Codec(bits)), node_size)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        collective = self._collective(group, output_tensor.device)
        size, numel = collective.group.size, input_tensor.numel()
        if not input_tensor.is_floating_point():  # FSDP2 passes parameters of several dtypes as bytes
            collective.start_gather([AllGatherOp(output_tensor.view(-1), input_tensor.view(-1))]).finish()
            return None
        line = output_tensor.new_zeros(size, round_up(numel, BLOCK))
        line[collective.group.rank, :numel].copy_(input_tensor.view(-1))
        collective.start_gather([AllGatherOp(line.view(-1), lossy=True)]).finish()
        output_tensor.view(size, numel).copy_(line[:, :numel])
        return None


class QuantizedReduceScatter(_Quantized, ReduceScatter):
    """A reduce-scatter that sends 8-bit integers inside a node and 4-bit integers across nodes. Sums are fp32."""

    def __init__(self, *, inside: int = 8, across: int = 4, node_size: int | None = None) -> None:
        super().__init__(Wires(inside=Codec(inside), across=Codec(across)), node_size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"QuantizedReduceScatter does not support {op}. Use SUM or AVG (see set_gradient_divide_factor)."
            )
        collective = self._collective(group, output_tensor.device)
        size, numel = collective.group.size, output_tensor.numel()
        line = input_tensor.new_zeros(size, round_up(numel, BLOCK))
        line[:, :numel].copy_(input_tensor.view(size, numel))
        total = torch.empty(line.shape[1], dtype=torch.float32, device=line.device)
        collective.start_reduce_scatter([Reduction(line.view(-1), total, line.dtype, add=False)]).finish()
        if op == dist.ReduceOp.AVG:
            total /= size
        output_tensor.view(-1).copy_(total[:numel])
        return None
