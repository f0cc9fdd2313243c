"""`FusedLion`: Lion, elementwise."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion


class FusedLion(DeepSpeedCPULion):
    """Lion with the arguments of DeepSpeed's fused one."""

    onefold_rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
