"""Sharded parameters: build a model with them, read them and write them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from onefold.compat.config import read_config
from onefold.compat.not_offered import NotOffered
from onefold.compat.parameters import MultipleAllGatherHandles, ZeroParamStatus, install
from onefold.zero import GatheredParameters, register_external_parameter, unregister_external_parameter
from onefold.zero import Init as _Init

__all__ = [
    "DeepSpeedTensorOverride", "GatheredParameters", "Init", "MultipleAllGatherHandles", "ZeroParamStatus",
    "ZeroParamType", "is_zero_param", "partitioned_param_data_shape", "register_external_parameter",
    "unregister_external_parameter",
]  # fmt: skip

install()  # the ds_* attributes of parameters

partitioned_param_data_shape = [0]
"""The shape of a sharded parameter."""


# transformers 5.23 replaces the next function while a model is built, and compares what it wraps with these.
_orig_torch_tensor, _orig_torch_empty, _orig_torch_zeros, _orig_torch_ones = (
    torch.tensor, torch.empty, torch.zeros, torch.ones,
)  # fmt: skip
_orig_torch_full, _orig_torch_arange, _orig_torch_eye, _orig_torch_randn = (
    torch.full, torch.arange, torch.eye, torch.randn,
)  # fmt: skip


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., torch.Tensor]:
    """Return a constructor that casts and places what it makes. `Init` does not call it: it wraps no constructor."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype is not None and made.is_floating_point() else made

    return make


class ZeroParamType(Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class CUDAQuantizer(NotOffered):
    what = "DeepSpeed's quantizer by itself (zero_quantized_weights is served; onefold.comm.codec is its form)"


class InsertPostInitMethodToModuleSubClasses(NotOffered):
    what = "patches of module classes (torch's own registration hooks tell zero.Init of modules)"


class _init_external_params(NotOffered):
    what = "lists of external parameters on modules (register_external_parameter registers one)"


class zero3_linear_wrap(NotOffered):
    what = "a linear function in the place of torch's (torch's own is used, and holds no gathered weight)"


class DeepSpeedTensorOverride(Enum):
    dtype = 1
    device = 2


class Init(_Init):
    """`onefold.zero.Init` that shards on a single rank too, and raises if the launcher has started more ranks.

    `tensor_overrides` is ignored: tensors are made with the dtype and device that the code inside gives, and parameters
    are moved and cast once all of them are initialized.
    """

    _plan = replace(_Init._plan, shards_on_one_rank=True)
    _read_config = staticmethod(read_config)

    def __init__(
        self,
        *args: Any,
        tensor_overrides: Sequence[DeepSpeedTensorOverride] = tuple(DeepSpeedTensorOverride),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self._enabled:
            problem = _contradicting_single_rank_pg_error(self._group.size, None)
            if problem is not None:
                raise RuntimeError(problem)


def is_zero_param(parameter: Any) -> bool:
    """Return whether a parameter is sharded when it is not gathered."""
    return hasattr(parameter, "ds_id")


def _contradicting_single_rank_pg_error(
    dp_world_size: int, data_parallel_group: Any, env: Mapping[str, str | None] | None = None
) -> str | None:
    """Return the error of a group of one rank if the launcher has started several; otherwise None."""
    started = str((os.environ if env is None else env).get("WORLD_SIZE") or "")
    if dp_world_size != 1 or data_parallel_group is not None or not started.isdecimal() or int(started) < 2:
        return None
    return (
        f"zero.Init: the process group has one rank, but WORLD_SIZE={started} is set, so every rank would store "
        "the whole model. Call deepspeed.init_distributed() before other code creates a group."
    )


class ZeRORuntimeException(Exception):
    pass


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return True, because `initialize` itself refuses optimizers that are not supported."""
    return True


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the module with all parameters unsharded, for several forwards."""
    module = getattr(model, "module", model)
    with GatheredParameters(module.parameters()):
        yield module


class GatherReplacedLayerParams(AbstractContextManager[None]):
    """Do nothing: no layer is replaced by a tensor-parallel one, so no parameter is gathered over such ranks."""

    def __init__(self, params: Any, module: Any, enabled: bool = True) -> None:
        self.params, self.module, self.enabled = params, module, False

    def __exit__(self, *error: object) -> None:
        return None
