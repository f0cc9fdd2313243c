"""LoRA on stacked experts and other parameters of modules, as PEFT adapts them (`target_parameters`).

PEFT registers a parametrization of the parameter in each forward, which computes the adapted value and writes the
parameter to itself. Here, the adapted value takes the place of the parameter while its module computes. If experts are
divided, a rank adapts its own experts only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.moe.replaced_forward import ReplacedForward

# The class by which PEFT adapts a parameter, and the package that it is in.
_ADAPTER, _PACKAGE = "ParamWrapper", "peft."
# Two factors whose product is added to a parameter, and the factor of the product.
Factors = tuple[Tensor, Tensor, float]
# The factors of each stacked parameter of a divided layer, or None while none are active.
Active = dict[str, Factors | None]


def adapt_experts(model: nn.Module, divided: Mapping[nn.Module, Active]) -> list[ReplacedForward]:
    """Replace the forwards of adapters of parameters.

    `divided` has the layers whose experts are divided. Each gets the factors of its adapted stacked parameters while it
    computes.
    """
    return [
        ReplacedForward(module, partial(_AdaptedForward, name, module, divided))
        for name, module in model.named_modules()
        if type(module).__name__ == _ADAPTER and type(module).__module__.startswith(_PACKAGE)
    ]


def adapted(parameter: Tensor, factors: Factors) -> Tensor:
    """Return a parameter with the product of two factors added."""
    first, second, factor = factors
    with torch.autocast(parameter.device.type, enabled=False):
        return torch.baddbmm(parameter, first, second, alpha=factor)


class _AdaptedForward:
    """The forward of an adapter."""

    def __init__(
        self, name: str, wrapper: Any, divided: Mapping[nn.Module, Active], forward: Callable[..., Any]
    ) -> None:
        self._name, self._wrapper, self._divided, self._forward = name, wrapper, divided, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if wrapper.disable_adapters or wrapper.merged or kwargs.get("adapter_names") is not None or not adapters:
            return self._forward(*args, **kwargs)
        module, name = wrapper.get_base_layer(), wrapper.parameter_name
        parameter = module._parameters[name]
        if parameter.dtype.itemsize == 1:  # PEFT adds in a wider dtype
            return self._forward(*args, **kwargs)
        active = self._divided.get(module)
        if active is not None and name in active:
            self._check_divided(name, adapters)
            active[name] = wrapper.get_delta_factors(adapters[0])
            try:
                return wrapper.base_layer(*args, **kwargs)
            finally:
                active[name] = None
        if len(adapters) == 1 and wrapper.num_experts > 1:
            value = adapted(parameter, wrapper.get_delta_factors(adapters[0]))
        else:
            value = parameter + sum(wrapper.get_delta_weight(adapter) for adapter in adapters)
        module._parameters[name] = value
        try:
            return wrapper.base_layer(*args, **kwargs)
        finally:
            module._parameters[name] = parameter

    def _check_divided(self, name: str, adapters: list[str]) -> None:
        """Raise if the adapters of a stacked parameter of divided experts cannot be divided."""
        if len(adapters) > 1:
            raise NotImplementedError(
                f"{self._name} adapts divided experts by {len(adapters)} adapters: {', '.join(adapters)}. Activate one."
            )
        if self._wrapper.num_experts == 1:
            raise NotImplementedError(
                f"{self._name} adapts {name}, which has one vector for each divided expert. Leave it out of "
                "target_parameters, or set onefold.expert_parallel_size to 1."
            )
