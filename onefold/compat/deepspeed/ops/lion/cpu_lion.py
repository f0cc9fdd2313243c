"""`DeepSpeedCPULion`: Lion, elementwise, on whatever device its parameters are."""

from __future__ import annotations

from typing import Any

import torch

from onefold.compat.deepspeed.ops.of_engine import OrOfEngine
from onefold.optim.rules import LionRule, Tile


class DeepSpeedCPULion(torch.optim.Optimizer, metaclass=OrOfEngine):
    """Lion with DeepSpeed's arguments. `engine.step()` steps it on flat shards, unit by unit."""

    onefold_rule = "lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPULion: fp32_optimizer_states is not supported. Set onefold.state_dtype.")
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("exp_avg", torch.zeros_like(parameter, memory_format=torch.preserve_format))
                LionRule().apply(Tile(parameter, parameter.grad, state), group, state["step"])
        return loss
