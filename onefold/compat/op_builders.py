"""DeepSpeed's builders of operators. Nothing is compiled: torch's kernels do the work.

`AsyncIOBuilder().load().aio_handle(...)` reads and writes tensors in threads.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch


class AsyncIOBuilder:
    """The builder of `AsyncIOHandle`. Nothing is compiled: Python reads and writes files without its global lock."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        return SimpleNamespace(aio_handle=AsyncIOHandle)


class AsyncIOHandle:
    """Reads and writes whole tensors. `wait` finishes the calls that were started, and returns their number."""

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._threads = ThreadPoolExecutor(max(1, intra_op_parallelism), thread_name_prefix="aio")
        self._started: list[Future[int]] = []

    def get_block_size(self) -> int:
        return self._options[0]

    def get_queue_depth(self) -> int:
        return self._options[1]

    def get_single_submit(self) -> bool:
        return self._options[2]

    def get_overlap_events(self) -> bool:
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        return self._options[4]

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available())

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return True

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        self._started.append(self._threads.submit(_read, buffer, filename, file_offset))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        self._started.append(self._threads.submit(_write, buffer, filename, file_offset))
        return 0

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return _read(buffer, filename, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return _write(buffer, filename, file_offset)

    read, write = sync_pread, sync_pwrite

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, offset: int = 0) -> int:
        return self.async_pread(buffer, filename, offset) if asynchronous else self.sync_pread(buffer, filename, offset)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, offset: int = 0) -> int:
        return (self.async_pwrite if asynchronous else self.sync_pwrite)(buffer, filename, offset)

    def wait(self) -> int:
        started, self._started = self._started, []
        for future in started:
            future.result()
        return len(started)


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise ValueError("aio_handle: the tensor must be contiguous")
    return memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(buffer: torch.Tensor, filename: str, offset: int) -> int:
    host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
    view = _bytes(host)
    with open(filename, "rb", buffering=0) as file:
        done = 0
        while done < len(view) and (got := os.preadv(file.fileno(), [view[done:]], offset + done)):
            done += got
    if done < len(view):
        raise OSError(f"{filename}: it has {done} of the {len(view)} bytes of the tensor")
    if host is not buffer:
        buffer.copy_(host)
    return done


def _write(buffer: torch.Tensor, filename: str, offset: int) -> int:
    view, done = _bytes(buffer), 0
    descriptor = os.open(filename, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
    finally:
        os.close(descriptor)
    return done


# -- builders by name --------------------------------------------------------------------------------------------------


class OpBuilder:
    """The builder of an operator. `instead` names the class that does its work with torch's kernels, if any."""

    NAME = "deepspeed_not_implemented"
    instead = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the feature of the operator is available here, for scripts that check before they train."""
        return bool(self.instead)

    def load(self, verbose: bool = False) -> Any:
        use = f"Use {self.instead}." if self.instead else "Run the script with DeepSpeed itself."
        raise NotImplementedError(f"{type(self).__name__}: onefold has no operator {self.name!r}. {use}")


CUDAOpBuilder = TorchCPUOpBuilder = OpBuilder


class UtilsBuilder(OpBuilder):
    """The builder of functions that flatten tensors into one and back."""

    NAME = "utils"
    instead = "torch._utils"

    def load(self, verbose: bool = False) -> Any:
        from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

        return SimpleNamespace(flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors)


def _builder(name: str, operator: str, instead: str = "") -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": operator, "instead": instead, "__module__": __name__})


CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", "deepspeed.ops.adam.DeepSpeedCPUAdam")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "deepspeed.ops.lion.DeepSpeedCPULion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", "deepspeed.ops.adam.FusedAdam")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", "deepspeed.ops.lion.FusedLion")
CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm")
DeepCompileBuilder = _builder("DeepCompileBuilder", "dc")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb")
GDSBuilder = _builder("GDSBuilder", "gds")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops")
NotImplementedBuilder = _builder("NotImplementedBuilder", "deepspeed_not_implemented")
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
ShareMemCommBuilder = _builder("ShareMemCommBuilder", "deepspeed_shm_comm")
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer")
TransformerBuilder = _builder("TransformerBuilder", "transformer")

ALL_OPS: dict[str, Any] = {
    kind.NAME: kind() for name, kind in list(globals().items()) if name.endswith("Builder") and kind is not OpBuilder
}
COMPATIBLE = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
