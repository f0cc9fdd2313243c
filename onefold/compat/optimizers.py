"""DeepSpeed's optimizer classes over torch's kernels and onefold's rules.

`engine.step()` steps an instance on flat shards, unit by unit. By itself an instance steps its parameters, on the
device that they are on.
"""

from __future__ import annotations

from typing import Any

import torch

from onefold.optim.rules import LionRule, Tile


class OrOfEngine(type):
    """The metaclass of these optimizers: `isinstance` also accepts an engine's optimizer that stands for the class.

    An engine's optimizer stands for the class that DeepSpeed would have chosen for the same config.
    """

    def __instancecheck__(cls, found: Any) -> bool:
        stands_for = getattr(found, "__dict__", {}).get("stands_for")
        return super().__instancecheck__(found) or (stands_for is not None and issubclass(stands_for, cls))


class DeepSpeedCPUAdam(torch.optim.Adam, metaclass=OrOfEngine):
    """torch's Adam or AdamW with the arguments of DeepSpeed's CPU optimizer."""

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
        _check_adam(self, bias_correction, fp32_optimizer_states)
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


class FusedAdam(torch.optim.Adam, metaclass=OrOfEngine):
    """torch's Adam or AdamW with the arguments of DeepSpeed's fused optimizer."""

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
        _check_adam(self, bias_correction)
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        self.adam_w_mode = int(adam_w_mode)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )


def _check_adam(optimizer: torch.optim.Adam, bias_correction: bool, fp32_optimizer_states: bool = True) -> None:
    name = type(optimizer).__name__
    if not bias_correction:
        raise ValueError(f"{name}: bias_correction=False is not supported. Leave it out.")
    if not fp32_optimizer_states:
        raise ValueError(f"{name}: fp32_optimizer_states=False is not supported. Set onefold.state_dtype.")


def multi_tensor_applier(
    op: Any, noop_flag_buffer: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    """Call an operator of apex's form on lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


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


class DeepSpeedCPULion(torch.optim.Optimizer, metaclass=OrOfEngine):
    """Lion with the arguments of DeepSpeed's CPU optimizer."""

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
            raise ValueError("DeepSpeedCPULion: fp32_optimizer_states=False is not supported. Set onefold.state_dtype.")
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


class FusedLion(DeepSpeedCPULion):
    """Lion with the arguments of DeepSpeed's fused optimizer."""

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
