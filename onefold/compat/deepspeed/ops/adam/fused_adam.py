"""`FusedAdam`: Adam or AdamW by torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.ops.of_engine import OrOfEngine


class FusedAdam(torch.optim.Adam, metaclass=OrOfEngine):
    """torch's Adam with DeepSpeed's arguments. `engine.step()` steps it on flat shards, unit by unit."""

    onefold_rule = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction=False is not supported. Leave it out.")
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        self.adam_w_mode = int(adam_w_mode)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )


def multi_tensor_applier(
    op: Any, noop_flag_buffer: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    """Call an operator of apex's form on lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)
