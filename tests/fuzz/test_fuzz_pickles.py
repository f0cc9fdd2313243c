"""Pickles of DeepSpeed and of torch's DCP: any program of opcodes is read as plain data or refused, never executed."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from generated import EFFORTS, corpus, damaged, fuzz, limited
from hypothesis import strategies as st

from onefold.checkpoint.dcp import dcp_metadata
from onefold.checkpoint.deepspeed.torch_files import ALLOWED, RefusedPickle, read_torch_file

OPCODES = {opcode.code.encode("latin-1"): opcode.arg for opcode in pickletools.opcodes}
NAMES = [
    *(name for _, name in ALLOWED), *dcp_metadata.NAMES,
    "os.system", "builtins.eval", "builtins.exec", "posix.system", "subprocess.Popen",
    "builtins.set", "builtins.bytearray", "builtins.complex", "builtins.range", "_codecs.encode", "torch.device",
    "torch.Size", "torch.Tensor", "torch.FloatStorage", "torch.ByteStorage", "torch.bfloat16", "torch.empty",
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_meta_tensor_no_storage", "torch.float8_e4m3fn",
    "torch._utils._rebuild_wrapper_subclass", "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
    "torch.nn.parameter.Parameter", "collections.OrderedDict", "collections.Counter", "torch.per_tensor_affine",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "torch._utils._rebuild_device_tensor_from_numpy",
]  # fmt: skip
NUMBERS = st.integers(-2, 20) | st.sampled_from(
    [2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 10**30]
)


def global_of(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def number_of(value: int) -> bytes:
    """An integer, as torch writes it."""
    return pickle.dumps(value, 2)[2:-1]


@st.composite
def instructions(draw: st.DrawFn) -> bytes:
    """One opcode with an argument of its kind."""
    code, kind = draw(st.sampled_from(sorted(OPCODES.items(), key=lambda item: item[0])))
    if kind is None:
        return code
    size = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}.get(kind.name)
    if size is not None:
        small = draw(st.integers(0, 8)).to_bytes(size, "little")
        return code + draw(st.just(small) | st.binary(min_size=size, max_size=size))
    if kind.name in ("bytes1", "string1", "long1", "unicodestring1"):
        data = draw(st.binary(max_size=9))
        return code + bytes([draw(st.just(len(data)) | st.integers(0, 255))]) + data
    if kind.n in (
        pickletools.TAKEN_FROM_ARGUMENT4,
        pickletools.TAKEN_FROM_ARGUMENT4U,
        pickletools.TAKEN_FROM_ARGUMENT8U,
    ):
        width = 8 if kind.n == pickletools.TAKEN_FROM_ARGUMENT8U else 4
        data = draw(st.binary(max_size=9))
        length = draw(st.just(len(data)) | st.sampled_from([2**31 - 1, 2**32 - 1, 2**31]))
        return code + (length % 2 ** (8 * width)).to_bytes(width, "little") + data
    return code + draw(st.sampled_from([b"1\n", b"'a'\n", b"99999999999999999999\n", b"posix\nsystem\n", b"\n"]))


VALUES = st.one_of(
    NUMBERS.map(number_of),
    st.sampled_from([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"(lK\x01a", b"X\x01\x00\x00\x00a", b"G" + bytes(8)]),
    st.sampled_from(NAMES).map(global_of),
    st.lists(NUMBERS.map(number_of), max_size=4).map(lambda parts: b"(" + b"".join(parts) + b"t"),
)
# The persistent id of an entry of the archive.
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%stQ"


@st.composite
def calls(draw: st.DrawFn) -> bytes:
    """A call of a name with arguments, perhaps with a state."""
    storages = NUMBERS.map(lambda number: STORAGE % number_of(number))
    arguments = b"".join(draw(st.lists(VALUES | storages, max_size=7)))
    call = global_of(draw(st.sampled_from(NAMES))) + b"(" + arguments + b"t" + draw(st.sampled_from([b"R", b"\x81"]))
    return call + draw(st.just(b"") | VALUES.map(lambda value: value + b"b"))


@st.composite
def memo_bombs(draw: st.DrawFn) -> bytes:
    """Containers that contain each other several times, to any depth."""
    kind, fill = draw(st.sampled_from([(b"]", b"e"), (b"(", b"t"), (b"}", b"u")]))
    depth, copies = draw(st.integers(1, 250)), 2 * draw(st.integers(1, 8))
    program = b"K\x01"
    for level in range(depth):
        refer = (b"h" + bytes([level])) * copies
        body = {b"]": b"](" + refer + fill, b"(": b"(" + refer + fill, b"}": b"}(" + refer + fill}[kind]
        program += b"q" + bytes([level]) + body
    return program


PROGRAMS = st.one_of(
    st.binary(max_size=60),
    st.lists(instructions(), max_size=20).map(b"".join),
    st.lists(VALUES | calls() | instructions(), max_size=6).map(b"".join),
    calls(),
    memo_bombs(),
).map(lambda body: b"\x80\x02" + body + b".")


def write_archive(folder: Path, program: bytes) -> None:
    """Write a file as torch.save lays it out, with any pickle in it."""
    writer = torch._C.PyTorchFileWriter(str(folder / "a.pt"))
    writer.write_record("data.pkl", program, len(program))
    writer.write_record("data/0", bytes(64), 64)
    writer.write_end_of_file()


def write_file(folder: Path, data: bytes) -> None:
    (folder / "a.pt").write_bytes(data)


def read(folder: Path, _: Any) -> None:
    read_torch_file(folder / "a.pt")


def saved() -> bytes:
    """A file like those of DeepSpeed."""
    weights = torch.arange(12.0).view(3, 4)
    content = {
        "module": {"a.weight": weights, "a.view": weights[1:], "b": torch.nn.Parameter(torch.ones(2).bfloat16())},
        "param_shapes": [{"a.weight": weights.shape}],
        "ds_config": {"train_batch_size": 8, "bf16": {"enabled": True}},
        "step": 3, "numbers": (1.5, None, 2**70, b"x", {1, 2}),
    }  # fmt: skip
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


HUGE = (
    b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.",
    b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.",
    b"\x80\x02cbuiltins\nrange\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.",
    b"\x80\x02B\xff\xff\xff\x7fabc.",
    b"\x80\x02X\xff\xff\xff\xffabc.",
    b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    b"\x80\x02ctorch\nSize\n(\x8a\x05\x00\x00\x00\x00\x10t\x85R.",
    b"\x80\x02r\xff\xff\xff\xff.",
    b"\x80\x02Nr\xff\xff\xff\x7f.",
)


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_pickle_is_read_or_refused(effort: int) -> None:
    with limited(write_archive, read, RefusedPickle) as run:
        assert run(b"\x80\x02}.")
        assert not run(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")
        fuzz(run, PROGRAMS, 3 * effort, (*HUGE, *corpus("pickle")))


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_damage_to_a_pickle_is_read_or_refused(effort: int) -> None:
    with zipfile.ZipFile(io.BytesIO(saved())) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        program = archive.read(name)
    with limited(write_archive, read, RefusedPickle) as run:
        fuzz(run, damaged(program), effort)


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_damage_to_a_file_of_torch_is_read_or_refused(effort: int) -> None:
    valid = saved()
    with limited(write_file, read, RefusedPickle, OSError) as run:
        assert run(valid)
        fuzz(run, damaged(valid) | st.binary().map(lambda data: b"PK\x03\x04" + data), effort, corpus("archive"))


DATA = "__0_0.distcp"


def dcp_folder(folder: Path) -> tuple[bytes, bytes]:
    """The metadata and the data of a folder of DCP."""
    state = {"model": {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.ones(2).bfloat16()}, "step": 3}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return (folder / dcp_metadata.METADATA).read_bytes(), (folder / DATA).read_bytes()


def write_dcp(folder: Path, content: tuple[bytes, bytes]) -> None:
    for name, data in zip((dcp_metadata.METADATA, DATA), content, strict=True):
        (folder / name).write_bytes(data)


def read_dcp(folder: Path, _: Any) -> None:
    for entry in dcp_metadata.DcpFolder.open(folder).entries.values():
        entry.read()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("effort", EFFORTS)
def test_any_metadata_of_dcp_is_read_or_refused(effort: int, tmp_path: Path) -> None:
    metadata, data = dcp_folder(tmp_path)
    with limited(write_dcp, read_dcp, ValueError, OSError) as run:
        assert run((metadata, data))
        assert not run((b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R.", data))
        fuzz(run, st.tuples(PROGRAMS, st.just(data)), effort, ((program, data) for program in HUGE))
        fuzz(run, st.tuples(damaged(metadata), st.just(data)), effort)
        fuzz(run, st.tuples(st.just(metadata), damaged(data)), effort)
