"""Reading of torch.save files with torch's weights-only unpickler, without executing code from the file.

A .pt file is a zip archive of a pickle (`data.pkl`) and the bytes of the tensors. A pickle is a program: the standard
unpickler imports and calls the objects that it names. torch's weights-only unpickler accepts a list of names. This
module adds placeholders for further names in DeepSpeed's files. A placeholder only stores or checks its arguments, and
never imports the named object. All other names are refused. Tensors are views of the privately mapped file.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import re
import struct
import threading
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from onefold.storage.place import open_regular

# Limits that valid files never reach: nesting depth, and visited containers (with repetitions) per byte of the pickle.
MAX_DEPTH, MAX_REPETITION = 100, 100
_ATOMS = (str, int, float, bool, type(None), bytes, bytearray, complex, torch.dtype, torch.device, torch.Size)
_exclusive = threading.Lock()  # torch has one list of allowed names per process


class RefusedPickle(ValueError):
    """The file is damaged, or contains objects that are not plain data."""


class StandIn:
    """Placeholder for a class that is not imported. It stores the arguments and the state of an object."""

    name = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> StandIn:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype:
    """Placeholder for numpy.dtype: numbers or text in native byte order."""

    def __init__(self, code: Any, *flags: Any) -> None:
        require(type(code) is str and re.fullmatch(r"[biufc][0-9]{1,2}|[SU][0-9]{1,6}", code), f"an array of {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        fine = type(state) is tuple and state[1] in ("<", "|", "=") and state[2:5] == (None, None, None)
        require(fine, "an array of another byte order, or of records")


class _Array(np.ndarray[Any, Any]):
    """Placeholder for numpy's function that creates an empty array, which `__setstate__` fills."""

    def __new__(cls, *what: Any) -> _Array:
        return super().__new__(cls, 0, np.uint8)

    def __setstate__(self, state: Any) -> None:  # type: ignore[override]
        _, shape, dtype, in_columns, data = state
        fine = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
        fine = fine and type(dtype) is _Dtype and type(data) is bytes and type(in_columns) is bool
        require(fine and math.prod(shape) * dtype.dtype.itemsize == len(data), "an array that is not a plain one")
        super().__setstate__((1, shape, dtype.dtype, in_columns, data))


def _number(dtype: Any, data: Any) -> Any:
    """Replace numpy's function that creates a scalar, and return a Python number."""
    require(type(dtype) is _Dtype and type(data) is bytes, "a number that is not a plain one")
    return np.frombuffer(data, dtype.dtype)[0].item()


def enum_member(kind: Any, name: Any) -> StandIn:
    """Replace getattr, which Python 3.11.0 to 3.11.3 uses to pickle the members of an enum."""
    require(isinstance(kind, type) and issubclass(kind, StandIn) and type(name) is str, f"an attribute of {kind}")
    return kind(name)  # type: ignore[no-any-return]


_INERT = (
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "numpy.ndarray",
    *(f"builtins.{factory}" for factory in ("dict", "float", "int", "list", "str")),
)
ALLOWED: list[Any] = [
    *((type(name.rpartition(".")[2], (StandIn,), {"name": name}), name) for name in _INERT),
    *((made, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")
      for made, name in ((_Array, "_reconstruct"), (_number, "scalar"))),
    (_Dtype, "numpy.dtype"), (enum_member, "builtins.getattr"), (lambda: b"", "builtins.bytes"),
    (frozenset, "builtins.frozenset"), (argparse.Namespace, "argparse.Namespace"),
    (lambda factory=None: {}, "collections.defaultdict"), (lambda *what: [], "collections.deque"),
]  # fmt: skip


def _byte_array(*what: Any) -> bytearray:
    """Replace bytearray, which allocates any number of zeros for a number."""
    require(what == () or (len(what) <= 2 and type(what[0]) in (str, bytes)), "a bytearray of a number")
    return bytearray(*what)


def _without_attributes(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replace torch's function that rebuilds a tensor with attributes, and drop them."""
    require(rebuild is torch._utils._rebuild_tensor_v2 and kind is _TensorClass, "a subclass of a tensor")
    return rebuild(*args)


_TensorClass = type("Tensor", (StandIn,), {"name": "torch.Tensor"})
_REBUILD = ("parameter", "parameter_with_state", "tensor", "tensor_v2", "tensor_v3")
_KEPT = {
    "_codecs.encode", "builtins.complex", "builtins.set", "collections.Counter", "collections.OrderedDict",
    "torch.Size", "torch.device", "torch.nn.parameter.Parameter", *(f"torch._utils._rebuild_{of}" for of in _REBUILD),
}  # fmt: skip


def _names_of_torch(all_names: dict[str, Any]) -> dict[str, Any]:
    """Return the names of torch's own list that plain data and tensors need.

    Others could allocate any amount of memory, such as `torch.Tensor(2**40)`.
    """
    kinds = torch.dtype, torch.serialization.StorageType
    kept = {name: value for name, value in all_names.items() if name in _KEPT or isinstance(value, kinds)}
    replaced = {"torch.Tensor": _TensorClass, "torch._tensor._rebuild_from_type_v2": _without_attributes}
    bytes_of_others = torch.serialization.StorageType("ByteStorage")  # of dtypes such as float8_e4m3fn and uint16
    return {**kept, **replaced, "builtins.bytearray": _byte_array, "torch.storage.UntypedStorage": bytes_of_others}


@contextmanager
def _only_plain_names() -> Iterator[None]:
    """Let torch's unpickler accept `ALLOWED` and `_names_of_torch` only, not names that the program has allowed."""
    unpickler: Any = torch._weights_only_unpickler
    own_names, others = unpickler._get_allowed_globals, torch.serialization.get_safe_globals()
    names = _names_of_torch(own_names())
    torch.serialization.clear_safe_globals()
    unpickler._get_allowed_globals = lambda: names
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        unpickler._get_allowed_globals = own_names
        torch.serialization.add_safe_globals(others)


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """Load a `torch.save` file to the CPU. Raise `RefusedPickle` for anything but tensors and plain data.

    A defaultdict or Namespace is returned as a dict, a deque as a list, and a numpy scalar as a Python number.
    """
    with refusing(str(path)):
        with os.fdopen(open_regular(path), "rb") as opened:
            sizes, pickle_size = _check_archive(opened)
        return _load(Path(path), sizes, pickle_size, mmap=True)


def read_torch_bytes(data: bytes, where: str) -> Any:
    """Load the content of a `torch.save` file, like `read_torch_file`. `where` names it in errors."""
    with refusing(where):
        return _load(io.BytesIO(data), *_check_archive(io.BytesIO(data)), mmap=False)


def _load(file: Any, sizes: set[int], pickle_size: int, *, mmap: bool) -> Any:
    with _exclusive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _only_plain_names():
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return PlainCopier(sizes, MAX_REPETITION * pickle_size).copy(found, 0)


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Raise `RefusedPickle` for any error but an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise RefusedPickle(f"{where}: {_what_is_wrong(error)}. The file is refused; nothing was executed.") from error


def require(fine: object, what: str) -> None:
    if not fine:
        raise RefusedPickle(f"{what}: not plain data or a tensor")


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, RefusedPickle):
        return str(error)
    # torch wraps the reason in advice on how to load untrusted files.
    text = str(error.__context__ or error if isinstance(error, pickle.UnpicklingError) else error)
    if name := re.search(r"GLOBAL (\S+)", text):
        return f"requests {name[1]}: not plain data or a tensor"
    return f"damaged: {type(error).__name__}: {text.partition(chr(10))[0]}"


def _check_archive(opened: IO[bytes]) -> tuple[set[int], int]:
    """Check that an archive is complete before torch opens it. Return the sizes of its entries and of its pickle."""
    if opened.read(4) != b"PK\x03\x04":
        raise RefusedPickle(
            "not a zip file of torch.save. Formats before torch 1.6 (also written with "
            "_use_new_zipfile_serialization=False) are not supported: save the file again where it is trusted"
        )
    try:
        with zipfile.ZipFile(opened) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise RefusedPickle(f"not a complete zip file (truncated?): {error}") from error
    pickles = [info for info in infos if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise RefusedPickle("not a file of torch.save: it must have one data.pkl")
    packed = [info.filename for info in infos if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1]
    if packed:
        raise RefusedPickle(f"not a file of torch.save: entry {packed[0]!r} is compressed or encrypted")
    return {info.file_size for info in infos}, pickles[0].file_size


class PlainCopier:
    """Copier of the loaded data, except tensors. It refuses cycles, deep nesting, excessive repetition and classes."""

    def __init__(self, sizes: set[int], max_containers: int) -> None:
        self._sizes, self._max_containers, self._num_containers = sizes, max_containers, 0

    def copy(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is _Array:
            return np.array(value)
        if isinstance(value, torch.Tensor):
            plain = kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
            require(plain and not value.is_quantized, f"a tensor of {value.layout}, {value.device}, {value.dtype}")
            nbytes = value.untyped_storage().nbytes()
            fits = value.nbytes <= nbytes and nbytes in {0, *self._sizes}
            require(fits, f"a tensor of {value.nbytes} bytes in a storage of {nbytes}")
            return value.detach()
        self._num_containers += 1
        if depth >= MAX_DEPTH or self._num_containers > self._max_containers:
            raise RefusedPickle("data is nested in itself, or too deep")
        if kind is argparse.Namespace:
            kind, value = dict, vars(value)
        if kind in (dict, OrderedDict, Counter):
            return kind({self.copy(key, depth + 1): self.copy(inner, depth + 1) for key, inner in value.items()})
        if kind in (list, tuple, set, frozenset):
            return kind(self.copy(inner, depth + 1) for inner in value)
        require(isinstance(value, StandIn), f"{getattr(value, 'name', kind.__name__)} among the data")
        value.args, value.state = self.copy(value.args, depth + 1), self.copy(value.state, depth + 1)
        return value
