"""Checkpoints and weights: any manifest, header and client state is read, or is an error that names it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from generated import EFFORTS, JSON, NUMBERS, WORDS, corpus, damaged, edited, fuzz, limited
from hypothesis import strategies as st
from models import config, net, start, train

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.files import CheckpointError, parse_json
from onefold.checkpoint.format.folder import examine, list_tags, read_latest
from onefold.checkpoint.format.manifest import _HEAD, _HEAD_BYTES, NAME, checksum
from onefold.checkpoint.format.safetensors_files import SafetensorsReader, make_header
from onefold.checkpoint.format.shard_files import CheckpointReader


def save(folder: str) -> None:
    engine = start(net(), config(2))
    train(engine, 1)
    engine.save_checkpoint(folder, "tag", client_state={"epoch": 3, "seen": {1, 2}, "best": (0.5, torch.ones(2))})
    engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    from ranks import RankPool

    folder, pool = tmp_path_factory.mktemp("saved"), RankPool(2)
    try:
        pool.run(save, str(folder))
    finally:
        pool.stop()
    return folder


def read_checkpoint(folder: Path, _: Any) -> None:
    """Read all that a checkpoint contains, as the tools do."""
    for found in (examine(folder / "tag"), *list_tags(folder)):
        assert found.manifest is not None or found.problems
    read_latest(folder)
    with CheckpointReader.open(folder) as checkpoint:
        for name, tensor in checkpoint.manifest.tensors.items():
            out = torch.empty(min(tensor.numel, 1 << 16), dtype=tensor.dtype)
            checkpoint.read(name, 0, len(out), out)


def sealed(document: Any) -> bytes:
    """The text of a manifest with a valid checksum."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return (_HEAD % checksum(body)).encode() + body + b"}\n"


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_manifest_is_read_or_is_an_error(effort: int, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    text = (saved / "tag" / NAME).read_bytes()
    valid = json.loads(text[_HEAD_BYTES:-2])

    def write(folder: Path, data: bytes) -> None:
        if not (folder / "tag").exists():
            shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)
        (folder / "tag" / NAME).write_bytes(data)

    deep = (b"[" * 100_000, b'{"format":' * 50_000, b'{"format": ' + b"9" * 10_000 + b"}")
    with limited(write, read_checkpoint, CheckpointError, plain_data.ClientStateError) as run:
        assert run(text)
        strategy = edited(valid).map(sealed) | damaged(json.dumps(valid).encode()).map(sealed) | damaged(text)
        fuzz(run, strategy | st.binary(), effort, (*map(sealed, deep), *corpus("manifest")))


def write_weights(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)


def read_weights(folder: Path, _: bytes) -> None:
    with SafetensorsReader.open(folder) as weights:
        for name in weights.names:
            entry = weights.entry(name)
            count = min(entry.numel, 1 << 16)
            weights.read(name, 0, count, torch.empty(count, dtype=entry.dtype))


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_header_is_read_or_is_an_error(effort: int) -> None:
    shapes = {"a.weight": (torch.float32, (3, 4)), "b": (torch.bfloat16, ()), "c": (torch.int64, (0, 7))}
    valid = make_header(Path("valid"), shapes, {"format": "pt"})[0] + bytes(50)
    length = struct.unpack("<Q", valid[:8])[0]
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]

    def file_of(document: Any) -> bytes:
        text = json.dumps(document).encode()
        return struct.pack("<Q", len(text)) + text + data

    lengths = st.sampled_from([0, 1, 7, 2**31, 2**32, 2**63, 2**64 - 1]).map(
        lambda size: struct.pack("<Q", size) + valid[8:]
    )
    with limited(write_weights, read_weights, CheckpointError, ValueError) as run:
        assert run(valid)
        strategy = edited(header).map(file_of) | damaged(valid) | lengths | st.binary()
        fuzz(run, strategy, effort, corpus("safetensors"))


TAGS = [
    "tuple", "set", "frozenset", "deque", "dict", "ordered_dict", "counter", "state_dict", "int", "float", "complex",
    "bytes", "torch_dtype", "torch_device", "torch_size", "tensor", "complex128_tensor", "ndarray", "numpy_scalar",
]  # fmt: skip
LEAVES = JSON | st.sampled_from(
    [
        "0",
        "0x" + "f" * 5000,
        "cuda:99999999999",
        "float32",
        "uint16",
        "object",
        "O",
        "1e400",
        "AAAA",
        [2**62, 2**62],
        [-1],
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(WORDS, inner, max_size=3),
        st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: {f"${pair[0]}": pair[1]}),
        st.fixed_dictionaries({"maxlen": NUMBERS, "items": st.lists(inner, max_size=2)}).map(lambda d: {"$deque": d}),
        st.fixed_dictionaries({"dtype": LEAVES, "tensor": inner}).map(lambda d: {"$ndarray": d}),
        st.fixed_dictionaries({"dtype": LEAVES, "value": inner}).map(lambda d: {"$numpy_scalar": d}),
        st.lists(st.tuples(inner, inner).map(list), max_size=3).map(lambda pairs: {"$dict": pairs}),
        st.lists(st.tuples(inner, NUMBERS).map(list), max_size=3).map(lambda pairs: {"$counter": pairs}),
    ),
    max_leaves=8,
)


def nothing(folder: Path, value: Any) -> None:
    """Need no file."""


def decode(folder: Path, text: bytes) -> None:
    tensors = {
        "0": torch.zeros(4),
        "1": torch.zeros(2, 2, dtype=torch.float64),
        "2": torch.zeros(3, dtype=torch.uint16),
    }
    found = plain_data.decode(parse_json(text), tensors)
    plain_data.encode(found, "the state")  # what is decoded can be saved again


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_client_state_is_decoded_or_is_an_error(effort: int) -> None:
    value = {"a": (1, {2}), "b": torch.ones(2), "c": [b"x", 1j, 2**70, float("nan"), torch.float16], 3: {4: "5"}}
    valid = json.dumps(plain_data.encode(value, "")[0]).encode()
    bombs = (
        b'{"$tuple":' * 5000,
        b'{"$int": "0x' + b"f" * 10**6 + b'"}',
        b'{"$torch_size": [' + b"9" * 4000 + b"]}",
        b'{"$deque": {"maxlen": 1e30, "items": []}}',
        b'{"$counter": [["a", ' + b"9" * 5000 + b"]]}",
        b'{"$numpy_scalar": {"dtype": "uint8", "value": 99999}}',
        b'{"$set": [[1]]}',
        b'{"$dict": [[{}, 1]]}',
    )
    with limited(nothing, decode, ValueError) as run:
        assert run(valid)
        texts = TREES.map(lambda tree: json.dumps(tree).encode())
        fuzz(run, texts | damaged(valid), 2 * effort, (*bombs, *corpus("client_state")))
