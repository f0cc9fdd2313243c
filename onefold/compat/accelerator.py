"""`get_accelerator()`: one class over torch's functions for CUDA and the CPU."""

from __future__ import annotations

import contextlib
import os
from functools import cache, partial
from typing import Any

import torch

from onefold.compat.numa import get_numa_cores
from onefold.report.memory_usage import peak_resident_bytes, resident_bytes

# Functions of torch.cuda that keep their name; on a CPU they have nothing to do.
_OF_CUDA = {
    "current_stream", "default_stream", "empty_cache", "is_current_stream_capturing", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "synchronize",
}  # fmt: skip
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class DeepSpeedAccelerator:
    """The interface of a device that DeepSpeed scripts use: CUDA, or the CPU."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_cuda = name == "cuda"

    # -- devices ----------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index) if self._is_cuda else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._is_cuda else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of GPUs; without GPUs `LOCAL_SIZE`, or the number of NUMA nodes that have cores."""
        if self._is_cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE", 0)) or max(1, sum(map(bool, get_numa_cores())))

    def is_available(self) -> bool:
        return torch.cuda.is_available() if self._is_cuda else True

    def is_synchronized_device(self) -> bool:
        return not self._is_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        return "nccl" if self._is_cuda else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    # -- random numbers ---------------------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed) if self._is_cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed) if self._is_cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._is_cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return (
            torch.cuda.get_rng_state(device_index or self.current_device()) if self._is_cuda else torch.get_rng_state()
        )

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state, device_index or self.current_device())
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._is_cuda else torch.default_generator

    # -- memory -----------------------------------------------------------------------------------------------------

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._is_cuda else resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._is_cuda else peak_resident_bytes()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._is_cuda else resident_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._is_cuda else peak_resident_bytes()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        if self._is_cuda:
            return torch.cuda.memory_stats(device_index)
        return {
            "allocated_bytes.all.current": resident_bytes(),
            "allocated_bytes.all.peak": peak_resident_bytes(),
        }

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cuda:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return _host_memory("MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0] if self._is_cuda else _host_memory("MemAvailable")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() if self._is_cuda else False

    # -- dtypes and kernels -----------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._is_cuda else True

    def is_fp16_supported(self) -> bool:
        """Return whether the device itself computes in fp16. On other CPUs torch computes it in fp32, slowly."""
        return self._is_cuda or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return self._is_cuda

    def lazy_call(self, callback: Any) -> Any:
        return torch.cuda._lazy_call(callback) if self._is_cuda else callback()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        if self._is_cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()

    def get_op_builder(self, class_name: str) -> Any:
        from onefold.compat import op_builders

        return getattr(op_builders, class_name, op_builders.NotImplementedBuilder)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_compile_backend(self) -> str:
        return "inductor"

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._is_cuda else contextlib.nullcontext()

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream if self._is_cuda else None

    @property
    def Event(self) -> Any:
        return torch.cuda.Event if self._is_cuda else None

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CUDA:
            return getattr(torch.cuda, name) if self._is_cuda else _nothing
        if name in _TENSORS:
            return partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        raise AttributeError(f"the accelerator has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _host_memory(field: str) -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    return True


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    if accel_obj.device_name() != get_accelerator().device_name():
        raise NotImplementedError(
            f"set_accelerator: another device than {get_accelerator().device_name()} is not supported"
        )
