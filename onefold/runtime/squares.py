"""Square sums of gradients, taken wherever a gradient is when it is complete: the norm is made of them."""

from __future__ import annotations

import torch

from onefold.plan.layout import SHARD_ALIGNMENT


def square_sum(shard: torch.Tensor) -> torch.Tensor:
    """The fp64 sum of squares of aligned blocks' fp32 norms: torch's fp32 norm of a long vector loses 0.3% on CPU."""
    dtype = torch.promote_types(shard.dtype, torch.float32)
    blocks: torch.Tensor = torch.linalg.vector_norm(shard.view(-1, SHARD_ALIGNMENT), dim=1, dtype=dtype)
    return blocks.double().square().sum()
