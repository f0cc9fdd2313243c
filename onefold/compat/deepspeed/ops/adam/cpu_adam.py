"""`DeepSpeedCPUAdam`: Adam or AdamW by torch's own kernels, on whatever device its parameters are."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.ops.of_engine import OrOfEngine


class DeepSpeedCPUAdam(torch.optim.Adam, metaclass=OrOfEngine):
    """torch's Adam with DeepSpeed's arguments. `engine.step()` steps it on flat shards, unit by unit."""

    optimizer_id = 0
    onefold_rule = "adam"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError(f"{type(self).__name__}: bias_correction=False is not supported. Leave it out.")
        if not fp32_optimizer_states:
            raise ValueError(f"{type(self).__name__}: fp32_optimizer_states is not supported. Set onefold.state_dtype.")
        self.adam_w_mode = adamw_mode
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        for group in self.param_groups:  # groups of another optimizer bring their own options
            group["decoupled_weight_decay"] = adamw_mode
