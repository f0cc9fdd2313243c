"""Chunked blocks: the forward of each block runs over chunks of the batch, and one chunk at a time is recomputed.

[Note: chunked blocks]
With `onefold.batch_chunks`, the forward of the module of each block unit is replaced by a call in chunks
(`chunked_call.py`). The hooks of the unit run around all chunks, so a large micro-batch gathers each unit once per pass
and reduces its gradient once, and needs the activations of one chunk in addition to the inputs of the blocks. This is
gradient accumulation with the order of the loops exchanged: for each block all chunks, instead of for each micro-step
all blocks.

The result equals that of the whole batch, to rounding, if a block computes each sample independently. Classes that are
known not to are refused by name (`check_blocks`). In addition, the first call of each block compares one chunk with its
part of the whole output, and the first recomputation looks for tensors that would lose their gradient. Problems that a
rank finds in a training step are raised by all ranks when the first backward ends, before any weight changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_flatten

from onefold.comm import Agreement
from onefold.config import ConfigError
from onefold.log import logger
from onefold.plan import UnitCut
from onefold.runtime.call_hooks import stored_tensors
from onefold.runtime.chunked_call import ChunkedCall, RandomState
from onefold.runtime.torch_internals import inside_backward, outside_compiler, tensors_in
from onefold.runtime.unit import Unit

# Rows (tokens) of a chunk that `auto` aims at. A matrix product of 8,192 rows and 3,072 columns has 1,536 tiles of
# 128 x 128, about 12 for each multiprocessor of an H100, so that the last, incomplete wave costs less than a tenth.
ROWS_OF_CHUNK = 8192

# Classes that assign tokens to experts within a capacity, or compute a loss, over all samples of a call.
_ROUTERS = {
    "TopKGate", "Top1Gate", "Top2Gate", "TopKRouter", "MOELayer", "SwitchTransformersTop1Router", "NllbMoeTop2Router",
}  # fmt: skip


def check_blocks(model: nn.Module, cuts: Iterable[UnitCut]) -> None:
    """Raise if a block contains a module that is known to mix the samples of a batch, or if there are no blocks."""
    paths = [found.module for found in cuts if found.is_block]
    if not paths:
        raise ConfigError(
            "onefold.batch_chunks divides the batch of blocks, but the model has no repeated blocks. Name its blocks "
            "in onefold.units."
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            "onefold.batch_chunks: the model's config has output_router_logits, whose auxiliary loss is computed from "
            "tensors that chunked blocks do not return. Set output_router_logits to false, or leave out batch_chunks."
        )
    for path in paths:
        _refuse_mixing(path, model.get_submodule(path))


def _refuse_mixing(path: str, block: nn.Module) -> None:
    """Raise if a block contains a module of a class that is known to mix the samples of a batch."""
    for name, module in block.named_modules(prefix=path):
        norm = isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
        norm |= isinstance(module, _InstanceNorm) and module.track_running_stats and module.training
        if norm or type(module).__name__ in _ROUTERS:
            raise ConfigError(
                f"onefold.batch_chunks: {name} is a {type(module).__name__}, which computes statistics over the "
                "samples of a batch, so the results would depend on the chunks. Replace it by a layer that treats each "
                "sample separately, or leave out batch_chunks."
            )


def num_chunks_for(batch: int, num_rows: int) -> int:
    """Return the number of chunks of `auto`: chunks with about `ROWS_OF_CHUNK` rows."""
    per_sample = max(1, num_rows // max(1, batch))
    return -(-batch // -(-ROWS_OF_CHUNK // per_sample))


class ChunkChecks:
    """Problems that the first calls of chunked blocks have found on this rank."""

    def __init__(self) -> None:
        self._problem = ""
        self._is_open = True

    def report(self, problem: str) -> None:
        """Record a problem of a training step. All ranks raise it when the first backward ends.

        Raise a problem of a later step, in which a block is called for the first time, at once.
        """
        if not self._is_open:
            raise RuntimeError(f"onefold.batch_chunks: {problem}")
        self._problem = self._problem or problem

    def end_backward(self, agreement: Agreement) -> None:
        """Raise on all ranks if any rank has found a problem, at the end of the first backward."""
        if not self._is_open:
            return
        self._is_open = False
        what = "the comparison of chunks in the first backward"
        found = [row[0] for row in agreement.synchronize(what, [int(bool(self._problem))])]
        if any(found):
            problem = agreement.broadcast_text(what, self._problem, found.index(1))
            raise RuntimeError(f"onefold.batch_chunks: on rank {found.index(1)}, {problem}")


class ChunkedBlocks:
    """The chunked forwards of one engine's blocks. `num_chunks` is None for a number that depends on the batch."""

    def __init__(self, units: Iterable[Unit], num_chunks: int | None) -> None:
        self.checks = ChunkChecks()
        blocks = [unit for unit in units if unit.is_block and not unit.encloses]
        self._forwards = [ChunkedForward(unit.name, unit.module, num_chunks, self.checks) for unit in blocks]

    def remove(self) -> None:
        """Restore the forwards of the modules."""
        while self._forwards:
            self._forwards.pop().remove()


class ChunkedForward:
    """The forward of a block that computes the batch in chunks. It refers to the module, but not to the engine."""

    def __init__(self, name: str, module: nn.Module, num_chunks: int | None, checks: ChunkChecks) -> None:
        self._name, self._module, self._num_chunks, self._checks = name, module, num_chunks, checks
        self._set_on_module = module.__dict__.get("forward")
        self._original = module.forward
        # Computes one chunk.
        self._function: Callable[..., Any] = module.forward
        self._parameters = list(module.parameters())
        self._norms = [inner for inner in module.modules() if isinstance(inner, _BatchNorm | _InstanceNorm)]
        self._tables: set[tuple[int, ...]] = set()
        # Whether chunks were compared in evaluation and in training mode, and the first recomputation was inspected.
        self._is_compared = {False: False, True: False}
        self._is_inspected = False
        functools.update_wrapper(self, self._original, updated=())
        module.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the forward of the module."""
        self._module.__dict__.pop("forward", None)
        if self._set_on_module is not None:
            self._module.__dict__["forward"] = self._set_on_module

    def compile(self, backend: Any, options: dict[str, Any]) -> None:
        """Compile the computation of one chunk with `torch.compile`."""
        self._function = torch.compile(self._original, backend=backend, **options)

    def __reduce__(self) -> Any:
        """Copy and pickle as the original forward, because no engine manages the copy of a model."""
        return _same, (self._original,)

    @outside_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inside_backward() and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._name} is recomputed by activation checkpointing around it, although chunked blocks recompute "
                "themselves. Disable activation checkpointing, or checkpoint each block alone with use_reentrant=False."
            )
        if any(norm.training for norm in self._norms):
            _refuse_mixing(self._name, self._module)
        call = ChunkedCall(self._name, self._function, args, kwargs, self._tables)
        inputs, is_training = ChunkedCall.inputs_of(args, kwargs), self._module.training
        num_chunks = self._num_chunks or num_chunks_for(call.batch, call.num_rows)
        compares = not self._is_compared[is_training] and min(num_chunks, call.batch) > 1 and not inputs[0].is_meta
        before = RandomState(inputs) if compares else None
        versions = {name: buffer._version for name, buffer in self._module.named_buffers()} if compares else {}
        output = call.run(num_chunks, inputs, self._parameters, None if self._is_inspected else self._inspect)
        if before is not None:
            self._is_compared[is_training] = True
            problem = self._find_written_buffer(versions) or self._compare(call, inputs, output, before)
            if problem and not torch.is_grad_enabled():
                raise RuntimeError(f"onefold.batch_chunks: {problem}")
            if problem:
                self._checks.report(problem)
        return output

    # -- checks of the first step -------------------------------------------------------------------------------

    @torch.no_grad()
    def _compare(self, call: ChunkedCall, inputs: Sequence[Tensor], output: Any, before: RandomState) -> str | None:
        """Compare the last chunk with its part of the whole output. Return a problem.

        The first chunk would not show a block that depends on the position of a sample in the batch.
        """
        after, size = RandomState(inputs), call.sizes[-1]
        flags = [(inner, inner.training) for inner in self._module.modules()]
        found = _last_samples(output, call.batch, size)
        try:
            before.restore()
            expected = self._last_of_whole(call, inputs)
            if RandomState(inputs) != before:
                # The dropout masks of a chunk differ from those of the whole batch, so compare without dropout.
                for inner, _ in flags:
                    inner.training = False
                before.restore()
                expected = self._last_of_whole(call, inputs)
                found = _last_samples(call.call(inputs, call.batch - size, size), size, size)
                if RandomState(inputs) != before:
                    logger.warning(
                        "onefold.batch_chunks: %s draws random numbers in evaluation mode too, so its chunks cannot be "
                        "compared with the whole batch",
                        self._name,
                    )
                    return None
        finally:
            for inner, training in flags:
                inner.training = training
            after.restore()
        allowed = rounding_of([*inputs, *self._parameters])
        for place, (chunk, whole) in enumerate(zip(found, expected, strict=True)):
            difference = relative_difference(chunk, whole)
            if not difference <= allowed:
                return (
                    f"{self._name} mixes the samples of a batch: output {place} of its last {size} samples differs "
                    f"from that in the whole batch by {difference:.2g} (relative), but rounding explains "
                    f"{allowed:.2g}. Compute each sample independently, or leave out batch_chunks."
                )
        return None

    def _find_written_buffer(self, versions: Mapping[str, int]) -> str | None:
        """Return a problem if the forward has written to a buffer since its version was read."""
        for name, buffer in self._module.named_buffers():
            if buffer._version != versions.get(name):
                return (
                    f"{self._name} writes to its buffer {name} in forward, which would happen once per chunk and again "
                    "in backward. Write to it outside of the block, or leave out batch_chunks."
                )
        return None

    def _last_of_whole(self, call: ChunkedCall, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the whole batch, and return the outputs of the samples in the last chunk."""
        size = call.sizes[-1]
        try:
            return _last_samples(call.call(inputs, 0, call.batch), call.batch, size)
        except torch.OutOfMemoryError:
            pass  # The error's traceback holds the activations, so it ends before the next attempt.
        pair = sum(call.sizes[-2:])
        logger.info("%s: the whole batch does not fit, so its chunks are compared with two of them", self._name)
        return _last_samples(call.call(inputs, call.batch - pair, pair), pair, size)

    def _inspect(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Report tensors outside the arguments and parameters of the block that would lose their gradient."""
        self._is_inspected = True
        problem = find_lost_gradient(self._name, self._module, outputs, targets)
        if problem:
            self._checks.report(f"{problem}, or leave out batch_chunks.")


def find_lost_gradient(
    name: str, module: nn.Module, outputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> str | None:
    """Return a problem, without its last words, if a recomputed chunk loses the gradient of a tensor.

    `targets` are the arguments and parameters of the module, from which `outputs` were computed.
    """
    for place, value in stored_tensors(module):
        if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
            return (
                f"{name} stores a tensor with a gradient in {place!r}, which is lost when a chunk is recomputed. "
                "Return it as an output"
            )
    known = {id(tensor) for tensor in targets}
    foreign = [leaf for leaf in _leaves(outputs) if id(leaf) not in known]
    if foreign:
        return (
            f"{name} uses a tensor of shape {list(foreign[0].shape)} that requires a gradient and is neither an "
            "argument nor a parameter of it. Pass it as an argument"
        )
    return None


def _same(value: Any) -> Any:
    return value


def _last_samples(outputs: Any, batch: int, size: int) -> list[Tensor]:
    """Return the part of the last `size` samples of each tensor in the outputs for `batch` samples."""
    tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
    return [tensor[tensor.shape[0] * (batch - size) // batch :] if tensor.dim() else tensor for tensor in tensors]


def rounding_of(tensors: Sequence[Tensor]) -> float:
    """Return the relative difference that rounding may cause between kernels for different batch sizes."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kinds = {tensor.device.type for tensor in tensors}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    if torch.float16 in dtypes or (dtypes == {torch.float32} and "cuda" in kinds and _uses_tf32()):
        return 1e-2
    return {torch.float64: 1e-8, torch.float32: 1e-4}.get(min(dtypes, key=lambda dtype: dtype.itemsize), 4e-2)


def _uses_tf32() -> bool:
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two rows, relative to the norm of the row."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point() or not one.numel():
        return 0.0
    wide = torch.promote_types(one.dtype, torch.float32)
    one, other = (torch.nan_to_num(tensor.to(wide)).reshape(len(tensor), -1) for tensor in (one, other))
    norms = other.norm(dim=1)
    norms = norms.clamp_min(max(float(norms.mean()), torch.finfo(wide).tiny))
    return float(((one - other).norm(dim=1) / norms).max())


def _leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that get a gradient from some outputs."""
    waiting, seen, found = [tensor.grad_fn for tensor in outputs], set(), []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
