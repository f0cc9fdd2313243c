"""Files of torch.save, read without running them: tensors and plain data, and nothing else.

A .pt file is a zip archive of a pickle (`data.pkl`) and the bytes of the tensors (`data/<key>`). A pickle is a program:
the usual reader imports and calls what it names. Here a small machine knows only the opcodes that torch writes, and
calls only the functions of this file, each of which checks what it is given. Classes of DeepSpeed that its files hold
become inert records. Tensors are views of the file, mapped privately: writing to one does not change the file, which
may be replaced meanwhile, but not cut short.
"""

from __future__ import annotations

import argparse
import collections
import math
import mmap
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.files import open_regular

# More than in any honest file: nested containers, and containers met for each byte of the pickle (repeated ones count).
MAX_DEPTH, MAX_REPETITION = 100, 100


class RefusedPickle(ValueError):
    """The file is damaged, or asks for something that is not plain data."""


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle said about an object of a class that is never made: its name, arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class _Name:
    """A global that the pickle mentioned; known, but never the thing itself."""

    name: str


INERT = {
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
STORAGES = {
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool, "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128, "torch.storage.UntypedStorage": torch.uint8,
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
FACTORIES: dict[str, Callable[[], Any]] = {
    "builtins.dict": dict, "builtins.float": float, "builtins.int": int, "builtins.list": list, "builtins.set": set,
    "collections.OrderedDict": collections.OrderedDict,
}  # fmt: skip
CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"}
_ATOMS = {str, int, float, bool, type(None), bytes, complex, torch.dtype}
_LEAVES = {*_ATOMS, bytearray, torch.Tensor, torch.Size, torch.device, np.ndarray}
_MAPPINGS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
_SEQUENCES = {list, tuple, set, frozenset, collections.deque}


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """What `torch.save` wrote, on the CPU. Anything but tensors and plain data raises `RefusedPickle`."""
    try:
        return _Machine(_Archive(Path(path))).run()
    except RefusedPickle as error:
        raise RefusedPickle(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError) as error:
        raise RefusedPickle(f"{path}: damaged: {error}") from error


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise RefusedPickle(f"{what}; refused, nothing was executed")


class _Archive:
    """The zip file: where its entries lie, and its bytes."""

    def __init__(self, file: Path) -> None:
        with os.fdopen(open_regular(file), "rb") as opened:
            if opened.read(4) != b"PK\x03\x04":
                raise RefusedPickle(
                    "not a zip file as torch.save writes it. Formats before torch 1.6 (also written with "
                    "_use_new_zipfile_serialization=False) are not read: save it again where it is trusted"
                )
            try:
                with zipfile.ZipFile(opened) as archive:
                    infos = archive.infolist()
            except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
                raise RefusedPickle(f"not a whole zip file: {error}; truncated?") from error
            # Private: tensors may be written to, the file never is.
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._infos = {info.filename: info for info in infos}
        programs = [name for name in self._infos if re.fullmatch(r"[^/]+/data\.pkl", name)]
        _require(
            len(programs) == 1 and len(self._infos) == len(infos), "not as torch.save writes it: no single data.pkl"
        )
        self._prefix = programs[0].removesuffix("data.pkl")
        self.program = self.bytes[self._locate("data.pkl")]
        named = self._prefix + "byteorder" in self._infos
        little = not named or self.bytes[self._locate("byteorder")] == b"little"
        _require(little, "written on a machine of another byte order")

    def _locate(self, name: str) -> slice:
        """Where an entry's bytes are."""
        info = self._infos.get(self._prefix + name)
        if info is None:
            raise RefusedPickle(f"has no entry {name!r}")
        # The lengths that count are those of the local header: the directory's copy may have other extra fields.
        at, size = info.header_offset, info.file_size
        header = self.bytes[at : at + 30]
        begin = at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 and size == info.compress_size
        if at < 0 or header[:4] != b"PK\x03\x04" or not plain:
            raise RefusedPickle(f"entry {name!r} is not stored as it is, as torch.save does")
        if begin + size > len(self.bytes):
            raise RefusedPickle(f"entry {name!r} goes beyond the end of the file; truncated?")
        return slice(begin, begin + size)

    def storage(self, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        where = self._locate(f"data/{key}")
        size = where.stop - where.start
        if numel < 0 or numel * dtype.itemsize != size or where.start % 16:
            what = f"{size} bytes at {where.start}, not {numel} aligned elements of {dtype}"
            raise RefusedPickle(f"storage {key!r} is not what the pickle says: {what}")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.bytes, dtype=dtype, count=numel, offset=where.start)


class _Machine:
    """Runs a pickle of protocol 2. All it ever holds is of exact, known types: nothing of theirs is overridden."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self.archive.program):
            if opcode.name != "STOP":
                self.step(opcode.name, argument)
        result = self.stack.pop()
        _check_plain(result, MAX_REPETITION * len(self.archive.program))
        return result

    def step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO":
                _require(argument == 2, f"pickle protocol {argument}, where torch writes 2")
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop_many(int(opcode[-1]))))
            case "TUPLE":
                items = self.pop_mark()
                self.stack.append(tuple(items))
            case "MARK":
                self.marks.append(stack)
                self.stack = []
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "APPEND" | "APPENDS":
                items = self.pop_mark() if opcode == "APPENDS" else self.pop_many(1)
                _require(type(self.stack[-1]) in (list, collections.deque), f"appends to {_kind(self.stack[-1])}")
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.pop_mark() if opcode == "SETITEMS" else self.pop_many(2)
                _require(type(self.stack[-1]) in _MAPPINGS, f"sets items of {_kind(self.stack[-1])}")
                _check_keys(items[::2])
                for key, value in zip(items[::2], items[1::2], strict=True):  # update() of a Counter counts
                    self.stack[-1][key] = value
            case "GLOBAL":
                stack.append(_look_up(argument.replace(" ", ".")))
            case "BINPERSID":
                stack.append(self.load_storage(stack.pop()))
            case "REDUCE" | "NEWOBJ":
                stack.append(_call(*self.pop_many(2)))
            case "BUILD":
                state = stack.pop()
                _set_state(stack[-1], state)
            case _:
                _require(False, f"opcode {opcode}, which torch does not write")

    def pop_many(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        _require(len(items) == count, "takes more from the stack than is there")
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def load_storage(self, key: Any) -> torch.Tensor:
        """A persistent id of torch: ("storage", class, key, device, number of elements)."""
        kinds = (str, _Name, str, str, int)
        fine = type(key) is tuple and tuple(map(type, key)) == kinds and key[0] == "storage" and key[1].name in STORAGES
        _require(fine, "a persistent id that is not a storage")
        return self.archive.storage(key[2], STORAGES[key[1].name], key[4])


def _kind(value: Any) -> str:
    return value.name if isinstance(value, _Name | Record) else type(value).__name__


def _look_up(name: str) -> Any:
    # As protocol 2 and numpy 2 write them.
    name = name.replace("__builtin__.", "builtins.", 1).replace("numpy._core.", "numpy.core.", 1)
    if name in DTYPES:
        return DTYPES[name]
    known = any(name in names for names in (CALLS, INERT, STORAGES, FACTORIES, CLASSES))
    _require(known, f"asks for {name}: not plain data or a tensor")
    return _Name(name)


def _call(function: Any, arguments: Any) -> Any:
    fine = type(function) is _Name and type(arguments) is tuple
    _require(fine, f"calls {_kind(function)}, which is not a function")
    if function.name in INERT:
        return Record(function.name, arguments)
    _require(function.name in CALLS, f"calls {function.name}: not plain data or a tensor")
    return CALLS[function.name](*arguments)


def _set_state(target: Any, state: Any) -> None:
    match target:
        case Record():
            _require(target.state is None, f"sets the state of a {target.name} twice")
            target.state = state
        case collections.OrderedDict():
            _require(type(state) is dict, "a state that is not a dict")  # `_metadata` of a state_dict; not needed
        case argparse.Namespace():
            _require(type(state) is dict and all(type(key) is str for key in state), "a state that is not a dict")
            vars(target).update(state)
        case np.dtype():
            # (version, byte order, sub-dtype, names, fields, ...)
            plain = type(state) is tuple and len(state) >= 5 and state[1] in ("<", "|", "=")
            _require(plain and state[2:5] == (None, None, None), "an array of another byte order, or of records")
        case np.ndarray():
            _set_array(target, state)
        case _:
            _require(False, f"sets the state of {_kind(target)}")


def _check_keys(keys: Iterable[Any]) -> None:
    """Hashing anything else may recurse without end."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        _require(all(type(part) in _ATOMS for part in parts), f"a key that is {_kind(key)}")


def _check_plain(result: Any, max_containers: int) -> None:
    """No cycles, no endless nesting or repetition, and no half-made things among the data."""
    pending, num_containers = [(result, 0)], 0
    while pending:
        value, depth = pending.pop()
        if type(value) in _LEAVES:
            continue
        num_containers += 1
        _require(depth < MAX_DEPTH and num_containers < max_containers, "data nested in itself, or too deep")
        if type(value) in _MAPPINGS:
            children: Iterable[Any] = value.values()
        elif type(value) in _SEQUENCES:
            children = value
        elif type(value) is argparse.Namespace:
            children = vars(value).values()
        else:
            _require(type(value) is Record, f"{_kind(value)} among the data")
            children = (value.args, value.state)
        pending.extend((child, depth + 1) for child in children)


def _are_sizes(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tensor(elements: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, *rest: Any) -> torch.Tensor:
    """`rest`: backward hooks and metadata, both empty in an honest file."""
    size = tuple(size) if type(size) is torch.Size else size
    fine = type(elements) is torch.Tensor and type(size) is type(stride) is tuple and len(size) == len(stride)
    _require(fine and _are_sizes(offset, *size, *stride) and not any(rest), "a tensor that is not a plain one")
    numel, available = math.prod(size), elements.numel()
    end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1 if numel else 0
    _require(max(numel, end) <= available, f"a tensor of shape {list(size)} in a storage of {available} elements")
    return elements.as_strided(size, stride, offset)  # type: ignore[no-any-return]


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.Tensor:
    _require(isinstance(data, torch.Tensor), "a parameter without a tensor")
    return data  # type: ignore[no-any-return]


def _tensor_with_attributes(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor that had attributes of its own (DeepSpeed's `ds_id`); they are left out."""
    fine = type(function) is type(kind) is _Name and function.name in _TENSORS and kind.name in CLASSES
    _require(fine and type(arguments) is tuple, "a tensor that is not a plain one")
    return _TENSORS[function.name](*arguments)


def _encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes. No other codec: some of them are programs."""
    _require(type(text) is str and encoding in ("latin1", "latin-1"), "_codecs.encode of other things than bytes")
    return text.encode("latin-1")  # type: ignore[no-any-return]


def _bytearray(data: Any = b"") -> bytearray:
    _require(type(data) is bytes, f"a bytearray of {_kind(data)}")
    return bytearray(data)


def _of_atoms(make: Callable[..., Any]) -> Callable[..., Any]:
    """A class that is called with its items; those of a deque and an OrderedDict come later."""

    def checked(items: Any = (), *rest: Any) -> Any:
        _require(type(items) in (list, tuple), f"a {make.__name__} of {_kind(items)}")
        _check_keys(items)
        return make(items, *rest)

    return checked


def _default_dict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    fine = factory is None or (type(factory) is _Name and factory.name in FACTORIES)
    _require(fine, f"a defaultdict of {_kind(factory)}")
    return collections.defaultdict(None if factory is None else FACTORIES[factory.name])


def _counter(counts: Any) -> collections.Counter[Any]:
    _require(type(counts) is dict, f"a Counter of {_kind(counts)}")
    return collections.Counter(counts)


def _enum_member(kind: Any, member: Any) -> Record:
    """getattr, which Python 3.11 before .4 writes for a member of an enum; here only of an inert class."""
    fine = type(kind) is _Name and kind.name in INERT and type(member) is str
    _require(fine, f"asks for an attribute of {_kind(kind)}: not plain data or a tensor")
    return Record(kind.name, (member,))


def _array_dtype(code: Any, *flags: Any) -> np.dtype[Any]:
    fine = type(code) is str and re.fullmatch(r"[biufc][0-9]{1,2}|[SU][0-9]{1,6}", code)
    _require(bool(fine), f"an array of {code!r}: not numbers or text")
    return np.dtype(str(code))


def _array_scalar(dtype: Any, data: Any) -> Any:
    _require(isinstance(dtype, np.dtype) and type(data) is bytes, "a number that is not a plain one")
    return np.frombuffer(data, dtype)[0].item()


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    """(version, shape, dtype, is column-major, data)"""
    fine = type(state) is tuple and len(state) == 5 and type(state[1]) is tuple and _are_sizes(*state[1])
    fine = fine and isinstance(state[2], np.dtype) and type(state[3]) is bool and type(state[4]) is bytes
    _require(fine and math.prod(state[1]) * state[2].itemsize == len(state[4]), "an array that is not a plain one")
    array.__setstate__(state)


_TENSORS: dict[str, Callable[..., torch.Tensor]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter, "torch._utils._rebuild_parameter_with_state": _parameter,
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = _TENSORS | {
    "_codecs.encode": _encode, "argparse.Namespace": lambda: argparse.Namespace(), "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda: b"", "builtins.complex": complex, "builtins.frozenset": _of_atoms(frozenset),
    "builtins.getattr": _enum_member, "builtins.set": _of_atoms(set), "collections.Counter": _counter,
    "collections.OrderedDict": _of_atoms(collections.OrderedDict), "collections.defaultdict": _default_dict,
    "collections.deque": _of_atoms(collections.deque), "numpy.dtype": _array_dtype,
    "numpy.core.multiarray._reconstruct": lambda *what: np.empty(0, np.uint8),
    "numpy.core.multiarray.scalar": _array_scalar, "torch.Size": _of_atoms(torch.Size), "torch.device": torch.device,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
}  # fmt: skip
