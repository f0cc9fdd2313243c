"""Unsharded weights in and out of a model, gathered one unit at a time, or read by the ranges that a rank keeps."""

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
    """The tensors of a model's state dict, with the scales of quantized layers, each by its first name; and the other
    names of those that are tied.
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
    """Every tensor unsharded, in turn. All ranks iterate together; a unit is gathered only while it is passed."""
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
    """Who unshards which tensors, in the one order that all ranks keep."""
    found: dict[ParamHandle | None, list[str]] = {}
    for name, tensor in contents.tensors.items():
        found.setdefault(handle_of(tensor), []).append(name)
    return sorted(found.items(), key=lambda item: -1 if item[0] is None else item[0].number)


def stream_weights(
    model: nn.Module, *, bucket_bytes: int = 1 << 30, exclude_frozen: bool = False, merge_adapters: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Whole weights in buckets, one after the other: to send a model to an inference server without ever holding it.

    All ranks iterate together, to the end, and each gets every bucket: whole tensors by name, on the device, in the
    dtype they compute in. They are the model's own memory: send or copy them before the next bucket is asked for, which
    empties the dict. A bucket takes in units until the next one would lift it over `bucket_bytes`, and a unit larger
    than that comes in several buckets: no more than `bucket_bytes` or one unit is unsharded at a time, whichever is
    more. A tensor larger than `bucket_bytes` comes alone. Tied weights come once, by their first name.

    With `merge_adapters`, LoRA adapters of PEFT are merged into the weights they belong to, and the names are those of
    `merge_and_unload`. A merged weight is a copy that is freed with its bucket; the model keeps its adapters.

        for bucket in onefold.zero.stream_weights(engine.module):
            if rank == 0:
                client.update_weights(bucket)
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: give a number of bytes above 0")
    if merge_adapters and exclude_frozen:
        raise ValueError("merge_adapters=True changes frozen weights: leave exclude_frozen out")
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
                bucket.clear()  # whoever keeps a tensor keeps its memory
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
    """Gather the whole state dict to host memory on rank 0; None elsewhere. Tied weights stay tied."""
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
    """Save whole weights as safetensors (streamed, one unit in memory), or pickled if the file name ends otherwise."""
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
    """torch.save by a rename: the old file or the new one, never a part of it."""
    os.makedirs(folder, exist_ok=True)
    path, unfinished = Path(folder, file_name), Path(folder, f".{file_name}.partial")
    with unfinished.open("wb") as file:
        torch.save(found, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class _Together:
    """Rank 0 works alone while all ranks go through the same collectives; what fails there is raised everywhere."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._group = data_group()

    def first(self, work: Callable[[], T]) -> T | None:
        """Done on rank 0 only, and nothing more after an error."""
        if self._group.rank != 0 or self.error is not None:
            return None
        try:
            return work()
        except Exception as error:  # raised by `agree`, when no rank waits for this one any more
            self.error = error
            return None

    def agree(self) -> None:
        failed = Agreement(self._group, Ledger()).synchronize("saving", [int(self.error is not None)])
        if self.error is not None:
            raise self.error
        if failed[0][0]:
            raise RuntimeError("rank 0 could not save the weights: see its error")


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> int:
    """Fill a model's parameters and buffers from safetensors files; returns the bytes that this rank read.

    `path`: a file, an index, or a folder with either. Each rank reads the ranges it keeps and no others. With `strict`
    missing, unexpected and misshapen tensors are an error, listed together, before anything is written.
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
                _read_shard(weights, source, *handle.place_of(tensor))
        for handle in handles:
            handle.tell_written()
        return weights.bytes_read


def _stored_as(name: str, contents: ModelTensors, weights: SafetensorsReader) -> str | None:
    """The file's name for a tensor: its own, or that of a tensor it is tied to."""
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
            problems.append(f"misshapen: {name} is {shape} in the model, {there} in the file")
    if problems:
        listed = "\n  ".join([f"{weights.path} does not fit the model:", *problems])
        raise ValueError(f"{listed}\nstrict=False skips what is missing or unexpected")


def _read_shard(weights: SafetensorsReader, name: str, param: FlatParam, index: int) -> None:
    """Read the range of one parameter that this rank keeps, rounded to the dtype it computes in."""
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
