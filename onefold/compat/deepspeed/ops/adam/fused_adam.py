"""`FusedAdam`: Adam or AdamW by torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
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
            raise ValueError("FusedAdam: bias_correction=False is not offered; torch's kernels correct")
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )
