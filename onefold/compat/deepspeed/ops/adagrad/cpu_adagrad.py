"""`DeepSpeedCPUAdagrad`: Adagrad by torch's own kernels."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.ops.of_engine import OrOfEngine


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=OrOfEngine):
    """torch's Adagrad with DeepSpeed's arguments."""

    onefold_rule = "adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad and 16-bit states are not supported. Leave them out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
