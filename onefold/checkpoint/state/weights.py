"""Export of unsharded weights, gathered one unit at a time, and loading of safetensors files into sharded models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from onefold.checkpoint.format.safetensors_files import SafetensorsReader, SafetensorsWriter
from onefold.checkpoint.state.adapters import MergedAdapters
from onefold.comm import Agreement, Ledger, data_group
from onefold.offload.buffer import Buffer
from onefold.runtime import FlatParam, ParamHandle, about_to_write, handle_of, handles_of, unsharded_shape
from onefold.runtime.quantized_layers import scales_of

T = TypeVar("T")


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model's state dict, with the scales of quantized layers, and the aliases of tied tensors.

    `tensors` has each tensor once, under its first name. `aliases` maps its other names to the first one.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @staticmethod
    def of(model: nn.Module, *, exclude_frozen: bool = False) -> ModelTensors:
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            own: dict[str, torch.Tensor | None] = {**module._parameters, **scales_of(module)}
            if exclude_frozen:
                own = {name: p for name, p in own.items() if p is not None and p.requires_grad}
            own |= {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for name, tensor in own.items():
                if tensor is None:
                    continue
                full = f"{path}.{name}" if path else name
                known = first.setdefault(id(tensor), full)
                if known == full:
                    tensors[full] = tensor
                else:
                    aliases[full] = known
        return ModelTensors(tensors, aliases)


def unsharded_tensors(contents: ModelTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over all tensors, unsharded. All ranks must iterate together; one unit is gathered at a time."""
    for handle, names in _by_handle(contents):
        if handle is not None:
            handle.acquire()
        try:
            for name in names:
                yield name, contents.tensors[name].detach()
        finally:
            if handle is not None:
                handle.release()


def _by_handle(contents: ModelTensors) -> list[tuple[ParamHandle | None, list[str]]]:
    """Group the tensors by the handle that unshards them, in the same order on all ranks."""
    found: dict[ParamHandle | None, list[str]] = {}
    for name, tensor in contents.tensors.items():
        found.setdefault(handle_of(tensor), []).append(name)
    return sorted(found.items(), key=lambda item: -1 if item[0] is None else item[0].number)


def stream_weights(
    model: nn.Module, *, bucket_bytes: int = 1 << 30, exclude_frozen: bool = False, merge_adapters: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over the unsharded weights in buckets, for example to send a model to an inference server.

    All ranks must iterate together, to the end. Each rank receives every bucket: unsharded tensors by name, on the
    device, in the compute dtype. The tensors are views of the model's memory: send or copy them before the next
    iteration, which clears the dict. A bucket contains whole units up to `bucket_bytes`. A larger unit is split into
    several buckets, so that at most `bucket_bytes` or one unit is unsharded at a time, whichever is larger. A tensor
    larger than `bucket_bytes` has its own bucket. Tied weights are yielded once, under their first name.

    With `merge_adapters`, LoRA adapters of PEFT are merged into their base weights, and the names are those of
    `merge_and_unload`. A merged weight is a copy that is freed with its bucket. The model keeps its adapters.

        for bucket in onefold.zero.stream_weights(engine.module):
            if rank == 0:
                client.update_weights(bucket)
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes = {bucket_bytes} is not positive. Pass a number of bytes above 0.")
    if merge_adapters and exclude_frozen:
        raise ValueError("merge_adapters=True changes frozen weights. Leave exclude_frozen out.")
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    merged = MergedAdapters(model, contents.tensors) if merge_adapters else None
    if merged is not None:
        contents = ModelTensors(merged.tensors, {})
    with ExitStack() as borrowed:
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for _, names in _by_handle(contents):
            sizes = [
                unsharded_shape(contents.tensors[name]).numel() * contents.tensors[name].itemsize for name in names
            ]
            if bucket and size + sum(sizes) > bucket_bytes:
                yield bucket
                bucket.clear()  # release the tensors before their units are resharded
                borrowed.close()
                size = 0
            own = [contents.tensors[name] for name in names]
            for used in handles_of(own) if merged is None else merged.handles(own):
                used.acquire()
                borrowed.callback(used.release)
            for name, bytes_ in zip(names, sizes, strict=True):
                if bucket and size + bytes_ > bucket_bytes:
                    yield bucket
                    bucket.clear()
                    size = 0
                tensor = contents.tensors[name]
                bucket[name] = merged.merge(tensor) if merged is not None else tensor.detach()
                size += bytes_
        if bucket:
            yield bucket


def consolidate(model: nn.Module, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Gather the unsharded state dict in host memory on rank 0. Return None on other ranks. Tied weights stay tied."""
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    first = data_group().rank == 0
    found = {}
    for name, tensor in unsharded_tensors(contents):
        if first:
            found[name] = tensor.to("cpu", copy=True)
    if not first:
        return None
    return {name: found[contents.aliases.get(name, name)] for name in (*contents.tensors, *contents.aliases)}


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    file_name: str = "model.safetensors",
    max_shard_size: int | str = "5GB",
    exclude_frozen: bool = False,
) -> None:
    """Save the unsharded weights as safetensors, one unit at a time, or as a pickle if the file name ends otherwise."""
    if not file_name.endswith(".safetensors"):
        found = consolidate(model, exclude_frozen=exclude_frozen)
        together = _Together()
        together.first(lambda: _pickle(found, folder, file_name))
        together.agree()
        return
    contents = ModelTensors.of(model, exclude_frozen=exclude_frozen)
    entries = [(name, tensor.dtype, tuple(unsharded_shape(tensor))) for name, tensor in contents.tensors.items()]
    together = _Together()
    writer = together.first(
        lambda: SafetensorsWriter(
            folder, entries, file_name=file_name, max_shard_size=max_shard_size, aliases=contents.aliases
        )
    )
    for name, tensor in unsharded_tensors(contents):
        if writer is not None:
            together.first(partial(writer.write, name, tensor))
    if writer is not None:
        together.first(writer.close)
        if together.error is not None:
            writer.discard()
    together.agree()


def _pickle(found: object, folder: str | os.PathLike[str], file_name: str) -> None:
    """Write a file with torch.save atomically, by a rename."""
    os.makedirs(folder, exist_ok=True)
    path, unfinished = Path(folder, file_name), Path(folder, f".{file_name}.partial")
    with unfinished.open("wb") as file:
        torch.save(found, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class _Together:
    """Work of rank 0 between collectives of all ranks. An error is raised on all ranks at the end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._group = data_group()

    def first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0, unless earlier work has failed. Return None otherwise."""
        if self._group.rank != 0 or self.error is not None:
            return None
        try:
            return work()
        except Exception as error:  # raised by `agree`, after the collectives that other ranks wait in
            self.error = error
            return None

    def agree(self) -> None:
        """Raise on all ranks if the work of rank 0 has failed."""
        failed = Agreement(self._group, Ledger()).synchronize("saving", [int(self.error is not None)])
        if self.error is not None:
            raise self.error
        if failed[0][0]:
            raise RuntimeError("rank 0 cannot save the weights. See the error of rank 0.")


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> int:
    """Load safetensors files into a model's parameters and buffers. Return the number of bytes that this rank read.

    `path` is a file, an index, or a folder with either. Each rank reads only the ranges of its shards. Tensors with
    different shapes and, with `strict`, missing and unexpected tensors raise one error before anything is written.
    """
    with SafetensorsReader.open(path) as weights:
        contents = ModelTensors.of(model)
        stored = {name: _stored_as(name, contents, weights) for name in contents.tensors}
        _check(contents, stored, weights, strict=strict)
        handles: dict[ParamHandle, None] = {}
        for tensor in contents.tensors.values():
            about_to_write(tensor)
        for name, tensor in contents.tensors.items():
            source, handle = stored[name], handle_of(tensor)
            if source is None:
                continue
            if handle is None:
                values = torch.empty(tensor.numel(), dtype=tensor.dtype)
                weights.read(source, 0, tensor.numel(), values)
                with torch.no_grad():
                    tensor.copy_(values.view(tensor.shape))
            else:
                handles[handle] = None
                _read_shard(weights, source, *handle.location_of(tensor))
        for handle in handles:
            handle.report_written()
        return weights.bytes_read


def _stored_as(name: str, contents: ModelTensors, weights: SafetensorsReader) -> str | None:
    """Return the name in the file of a tensor or of a tensor that it is tied to, or None if there is none."""
    known = {*weights.names, *weights.aliases}
    names = [name, *(alias for alias, first in contents.aliases.items() if first == name)]
    return next((candidate for candidate in names if candidate in known), None)


def _check(contents: ModelTensors, stored: dict[str, str | None], weights: SafetensorsReader, *, strict: bool) -> None:
    taken = {*stored.values(), *contents.aliases, *weights.aliases}
    problems = [f"missing: {name}" for name, source in stored.items() if source is None and strict]
    problems += [f"unexpected: {name}" for name in weights.names if name not in taken and strict]
    for name, source in stored.items():
        shape = tuple(unsharded_shape(contents.tensors[name]))
        there = weights.entry(source).shape if source is not None else shape
        if there != shape:
            problems.append(f"different shape: {name} is {shape} in the model, {there} in the file")
    if problems:
        listed = "\n  ".join([f"{weights.path} does not fit the model:", *problems])
        raise ValueError(f"{listed}\nPass strict=False to skip missing and unexpected tensors.")


def _read_shard(weights: SafetensorsReader, name: str, param: FlatParam, index: int) -> None:
    """Read this rank's range of one parameter, rounded to the compute dtype."""
    member = param.layout.members[index]
    start, stop = (0, param.layout.total) if param.stays_unsharded else param.own_range
    low, high = max(start, member.start), min(stop, member.stop)
    if low >= high:
        return
    part = torch.empty(high - low, dtype=param.dtype)
    weights.read(name, low - member.start, high - member.start, part)
    shard = param.store.param
    if shard is not None:
        shard.refresh()
        shard.forget_prefetched()
    target = Buffer.of(param.full) if shard is None else shard.buffer
    with torch.no_grad():
        target[low - start : high - start].store(part)
