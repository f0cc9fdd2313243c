"""Weights on disk: what safetensors writes we read and the other way round, by ranges, whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from onefold.checkpoint.format import safetensors_files as ours
from onefold.checkpoint.format.safetensors_files import DTYPES, SafetensorsReader, SafetensorsWriter
from onefold.log import parse_size

theirs = pytest.importorskip("safetensors.torch", reason="compares with the safetensors package")

SHAPES = [(3, 5), (7,), (), (0,), (4, 0, 2), (2, 3, 4)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern the dtype has: NaNs and subnormals too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return data.reshape(-1).view(dtype).reshape(shape)


def every_dtype() -> dict[str, torch.Tensor]:
    return {
        f"{name}.{k}": random_bits(dtype, shape, seed=k)
        for name, dtype in DTYPES.items()
        for k, shape in enumerate(SHAPES)
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def export(folder: Path, tensors: dict[str, torch.Tensor], **options: object) -> list[str]:
    with SafetensorsWriter(folder, [(name, t.dtype, t.shape) for name, t in tensors.items()], **options) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.write(name, tensor)
    return writer.file_names


def load(path: Path) -> dict[str, torch.Tensor]:
    with SafetensorsReader.open(path) as weights:
        tensors = {}
        for name in weights.names:
            entry = weights.entry(name)
            tensors[name] = torch.empty(entry.numel, dtype=entry.dtype)
            weights.read(name, 0, entry.numel, tensors[name])
            tensors[name] = tensors[name].reshape(entry.shape)
    return tensors


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert same_bits(left[name], right[name]), name


def files_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# Round trips.


def test_safetensors_reads_what_we_write(tmp_path):
    tensors = every_dtype()
    assert export(tmp_path, tensors) == ["model.safetensors"]
    assert_same(theirs.load_file(tmp_path / "model.safetensors"), tensors)
    with theirs.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_safetensors_writes(tmp_path):
    tensors = every_dtype()
    theirs.save_file(tensors, tmp_path / "model.safetensors", {"made by": "them"})
    assert_same(load(tmp_path), tensors)
    with SafetensorsReader.open(tmp_path) as weights:
        assert weights.metadata == {"made by": "them"}
        assert weights.entry("BF16.0").file == tmp_path / "model.safetensors"


def test_every_dtype_of_safetensors_that_torch_can_hold_is_known():
    assert theirs._TYPES == DTYPES


def test_a_file_without_tensors(tmp_path):
    export(tmp_path, {})
    assert theirs.load_file(tmp_path / "model.safetensors") == load(tmp_path) == {}


def test_tensors_lie_at_multiples_of_their_element_size(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.int8),
        "b": torch.ones(5, dtype=torch.float64),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "d": torch.ones(1),
    }
    for metadata in ({"format": "pt"}, {"format": "pt", "odd": "x"}, {}):
        export(tmp_path, tensors, metadata=metadata)
        with SafetensorsReader.open(tmp_path) as weights:
            assert all(weights.entry(name).offset % weights.entry(name).dtype.itemsize == 0 for name in tensors)
            assert weights.entry("b").offset % 8 == 0


def test_odd_names_and_layouts_survive(tmp_path):
    base = torch.randn(6, 4, requires_grad=True)
    tensors = {
        'gewicht "ü"\n': base.t(),
        "strided": base[::2, 1],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    export(tmp_path, tensors)
    plain = {name: tensor.detach().clone().resolve_conj().contiguous() for name, tensor in tensors.items()}
    assert_same(theirs.load_file(tmp_path / "model.safetensors"), plain)
    assert_same(load(tmp_path), plain)


# Ranges and casts.


def test_any_range_is_what_slicing_gives_and_costs_its_own_bytes_only(tmp_path):
    tensors = {name: tensor for name, tensor in every_dtype().items() if tensor.numel()}
    tensors["long"] = random_bits(torch.bfloat16, (301, 17))
    export(tmp_path, tensors, max_shard_size=700)
    choose = random.Random(5)
    with SafetensorsReader.open(tmp_path) as weights:
        expected_bytes = 0
        for _ in range(400):
            name = choose.choice([*tensors, "long"])
            flat = tensors[name].reshape(-1)
            start, stop = sorted(choose.choices(range(flat.numel() + 1), k=2))
            line = torch.zeros(stop - start + 2, dtype=flat.dtype)
            weights.read(name, start, stop, line[1:-1])
            assert same_bits(line[1:-1], flat[start:stop])
            assert not line[[0, -1]].view(torch.uint8).any()
            expected_bytes += (stop - start) * flat.element_size()
            assert weights.bytes_read == expected_bytes


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_another_dtype_is_cast_as_torch_casts_in_tiles(tmp_path, monkeypatch, source, target):
    monkeypatch.setattr(ours, "TILE", 16)
    tensor = (torch.randn(9, 11) * 5).to(source)
    export(tmp_path, {"w": tensor})
    with SafetensorsReader.open(tmp_path) as weights:
        for start, stop in ((0, 99), (5, 5), (3, 19), (20, 53)):
            out = torch.empty(stop - start, dtype=target)
            weights.read("w", start, stop, out)
            assert same_bits(out, tensor.reshape(-1)[start:stop].to(target))
        assert weights.bytes_read == tensor[0, 0].nbytes * (99 + 0 + 16 + 33)
    with SafetensorsWriter(tmp_path, [("w", target, (9, 11))]) as writer:
        writer.write("w", tensor)
    assert same_bits(theirs.load_file(tmp_path / "model.safetensors")["w"], tensor.to(target))


def test_reading_refuses_what_it_cannot_fill(tmp_path):
    export(tmp_path, {"w": torch.ones(4, 4)})
    with SafetensorsReader.open(tmp_path) as weights:
        for start, stop in ((-1, 3), (3, 2), (0, 17)):
            with pytest.raises(ValueError, match="'w' has 16 elements"):
                weights.read("w", start, stop, torch.empty(max(0, stop - start)))
        for out in (torch.empty(3), torch.empty(2, 2), torch.empty(8)[::2], torch.empty(4, device="meta")):
            with pytest.raises(ValueError, match="contiguous 1-d CPU tensor of 4 elements"):
                weights.read("w", 0, 4, out)
        with pytest.raises(ValueError, match=r"torch\.float32 cannot be cast to torch\.int64"):
            weights.read("w", 0, 4, torch.empty(4, dtype=torch.int64))
        with pytest.raises(ValueError, match="no tensor 'v'"):
            weights.entry("v")


def test_a_parameter_that_wants_gradients_is_read_into(tmp_path):
    export(tmp_path, {"w": torch.arange(4.0)})
    out = torch.zeros(4, requires_grad=True)
    with SafetensorsReader.open(tmp_path) as weights:
        weights.read("w", 0, 4, out)
    assert out.tolist() == [0, 1, 2, 3]


# Several files.


def test_shards_have_hugging_face_names_and_their_index(tmp_path):
    tensors = {f"layer.{k}": torch.randn(10) for k in range(5)} | {"big": torch.randn(100), "last": torch.randn(3)}
    names = export(tmp_path, tensors, max_shard_size="80B")
    assert names == [f"model-{k:05d}-of-00005.safetensors" for k in range(1, 6)] + ["model.safetensors.index.json"]
    assert files_in(tmp_path) == set(names)
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 4 * 153}
    assert [index["weight_map"][name] for name in tensors] == [names[k] for k in (0, 0, 1, 1, 2, 3, 4)]
    loaded = {}
    for name in names[:-1]:
        loaded |= theirs.load_file(tmp_path / name)
    assert_same(loaded, tensors)
    assert_same(load(tmp_path), tensors)
    assert_same(load(tmp_path / names[-1]), tensors)
    assert load(tmp_path / names[0]).keys() == {"layer.0", "layer.1"}


def test_our_cut_is_the_hugging_face_cut(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="compares with its cut")
    choose = random.Random(3)
    for case in range(20):
        tensors = {f"w{k}": torch.empty(choose.randint(1, 60)) for k in range(choose.randint(1, 12))}
        limit = choose.randint(240, 900)  # larger than any tensor: theirs reorders around a larger one
        split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
        names = export(tmp_path / str(case), tensors, max_shard_size=limit)
        assert set(split.filename_to_tensors) == {name for name in names if name.endswith(".safetensors")}
        for name, held in split.filename_to_tensors.items():
            assert theirs.load_file(tmp_path / str(case) / name).keys() == set(held)


def test_a_folder_is_opened_by_what_it_holds(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SafetensorsReader.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        SafetensorsReader.open(tmp_path)
    export(tmp_path, {"a": torch.ones(1)}, file_name="adapter_model.safetensors")
    assert load(tmp_path).keys() == {"a"}
    export(tmp_path, {"b": torch.ones(1), "c": torch.ones(1)}, file_name="other.safetensors", max_shard_size=4)
    assert load(tmp_path).keys() == {"b", "c"}
    export(tmp_path, {"d": torch.ones(1), "e": torch.ones(1)}, file_name="more.safetensors", max_shard_size=4)
    with pytest.raises(ValueError, match=r"Name one of more.*, other"):
        SafetensorsReader.open(tmp_path)
    export(tmp_path, {"f": torch.ones(1)})
    assert load(tmp_path).keys() == {"f"}


def test_tied_weights_are_stored_once_and_found_under_both_names(tmp_path):
    tensors = {"embed": torch.randn(4, 2), "norm": torch.randn(2)}
    for limit in ("1GB", 32):
        export(tmp_path, tensors, aliases={"head": "embed"}, max_shard_size=limit)
        assert_same(load(tmp_path), tensors)
        with SafetensorsReader.open(tmp_path) as weights:
            assert weights.names == ("embed", "norm")
            assert weights.aliases == {"head": "embed"}
            assert weights.entry("head") == weights.entry("embed")
            out = torch.empty(3)
            weights.read("head", 2, 5, out)
            assert torch.equal(out, tensors["embed"].reshape(-1)[2:5])


def test_tied_weights_of_safetensors_itself_are_found(tmp_path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    theirs.save_model(model, str(tmp_path / "model.safetensors"))
    with SafetensorsReader.open(tmp_path) as weights:
        assert len(weights.names) == 1
        assert weights.entry("head.weight") == weights.entry("embed.weight")


# Files that are not what they should be.


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def info(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": (b"", "truncated"),
    "three bytes": (b"abc", "truncated"),
    "header longer than the file": (raw({}, length=10_000), "truncated"),
    "header of 2**64 - 1 bytes": (raw({}, length=2**64 - 1), "truncated"),
    "no JSON object": (raw(b"[1, 2]  "), "not a JSON object"),
    "padding before the brace": (raw(b"   {}"), "not a JSON object"),
    "half a header": (raw(b'{"w": {"dtype"'), "not valid JSON"),
    "not UTF-8": (raw(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "UTF-16": (raw('{"w": 1}'.encode("utf-16-le")), "not valid JSON"),
    "text after the object": (raw(b"{} {}"), "not valid JSON"),
    "nested too deep": (raw(b'{"w":' + b"[" * 200_000), "not valid JSON"),
    "number of 10,000 digits": (raw(b'{"w":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "name twice": (raw(b'{"w": 1, "w": 2}'), "key is given twice"),
    "info is a number": (raw({"w": 3}), "tensor 'w': needs dtype"),
    "info without offsets": (raw({"w": {"dtype": "F32", "shape": []}}), "tensor 'w': needs dtype"),
    "unknown dtype": (raw({"w": info("F31")}, bytes(8)), "tensor 'w': unknown dtype 'F31'"),
    "dtype is a list": (raw({"w": info(["F32"])}, bytes(8)), "tensor 'w': unknown dtype"),
    "shape is a string": (raw({"w": info(shape="2")}, bytes(8)), "tensor 'w': shape must be a list"),
    "negative shape": (raw({"w": info(shape=[-1, -2])}, bytes(8)), "tensor 'w': shape must be whole numbers"),
    "fractional shape": (raw({"w": info(shape=[2.0])}, bytes(8)), "tensor 'w': shape must be whole numbers"),
    "boolean shape": (raw({"w": info(shape=[True, 2])}, bytes(8)), "tensor 'w': shape must be whole numbers"),
    "shape beyond 63 bits": (raw({"w": info(shape=[2**70, 0])}, bytes(8)), "tensor 'w': shape must be whole"),
    "100,000 dims": (raw({"w": info(shape=[1] * 100_000)}, bytes(8)), "tensor 'w': shape must be a list of at most"),
    "shape that wraps around": (raw({"w": info(shape=[2**62, 2**62])}, bytes(8)), "do not fit"),
    "shape larger than its bytes": (raw({"w": info(shape=[3])}, bytes(8)), "do not fit torch.float32"),
    "shape smaller than its bytes": (raw({"w": info(shape=[1])}, bytes(8)), "do not fit torch.float32"),
    "offsets are a number": (raw({"w": info(offsets=8)}, bytes(8)), "tensor 'w': data_offsets must be a list"),
    "three offsets": (raw({"w": info(offsets=[0, 4, 8])}, bytes(8)), "tensor 'w': data_offsets must be a list"),
    "one offset": (raw({"w": info(offsets=[8])}, bytes(8)), "tensor 'w': data_offsets .* are outside"),
    "offsets backwards": (raw({"w": info(offsets=[8, 0])}, bytes(8)), "tensor 'w': data_offsets .* are outside"),
    "negative offsets": (raw({"w": info(offsets=[-8, 0])}, bytes(8)), "tensor 'w': data_offsets must be whole"),
    "offsets after the end": (raw({"w": info(offsets=[0, 8])}, bytes(7)), "tensor 'w': .*truncated"),
    "overlap": (raw({"w": info(), "v": info(offsets=[4, 12])}, bytes(12)), "tensor 'v' begins at 4.* ends at 8"),
    "the same bytes twice": (raw({"w": info(), "v": info()}, bytes(8)), "begins at 0.* ends at 8"),
    "empty tensor inside another": (raw({"w": info(), "v": info(shape=[0], offsets=[4, 4])}, bytes(8)), "'v' begins"),
    "hole": (raw({"w": info(), "v": info(offsets=[12, 20])}, bytes(20)), "tensor 'v' begins at 12"),
    "bytes that are nobody's": (raw({"w": info()}, bytes(9)), "9 bytes of data"),
    "metadata is a list": (raw({"__metadata__": []}), "__metadata__ must map"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__ must map"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name_without_large_allocations(tmp_path, case):
    content, message = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    num_open = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsReader.open(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1_000_000 + 50 * len(content)
    assert len(os.listdir("/proc/self/fd")) == num_open
    # In these two we are stricter: the format wants the brace first, and torch has 64 dims at most.
    if case not in ("padding before the brace", "100,000 dims"):
        with pytest.raises(Exception):  # noqa: B017, PT011 (safetensors has its own)
            theirs.load_file(path)


def test_every_truncation_is_noticed(tmp_path):
    export(tmp_path, {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.int8)})
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            SafetensorsReader.open(tmp_path)


def test_random_damage_to_a_header_never_crashes(tmp_path):
    export(tmp_path, {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.int8), "c": torch.randn(2, 2)})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    choose = random.Random(1)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            damaged[choose.randrange(len(whole) - 30)] = choose.randrange(256)
        path.write_bytes(damaged)
        try:
            load(tmp_path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 (some damage renames a tensor, which is no error)
            refused += 1
    assert refused > 250


def test_a_file_cut_short_after_opening_is_noticed_at_the_read(tmp_path):
    export(tmp_path, {"w": torch.randn(100)})
    with SafetensorsReader.open(tmp_path) as weights:
        os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 40)
        weights.read("w", 0, 90, torch.empty(90))
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match="'w' is incomplete"):
                weights.read("w", 80, 100, torch.empty(20, dtype=dtype))


HOSTILE_INDEXES = {
    "not JSON": (b"{", "not valid JSON"),
    "a list": (b"[]", "not a JSON object"),
    "no weight_map": (b"{}", "no weight_map"),
    "weight_map is a list": (b'{"weight_map": []}', "no weight_map"),
    "name twice": (b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "given twice"),
    "parent folder": (
        b'{"weight_map": {"a": "../secret.safetensors"}}',
        "'a' must be in a .safetensors file in the same folder",
    ),
    "absolute": (
        b'{"weight_map": {"a": "/etc/x.safetensors"}}',
        "'a' must be in a .safetensors file in the same folder",
    ),
    "backslash": (
        b'{"weight_map": {"a": "..\\\\x.safetensors"}}',
        "'a' must be in a .safetensors file in the same folder",
    ),
    "zero byte": (
        b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
        "'a' must be in a .safetensors file in the same folder",
    ),
    "a pickle": (
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        "'a' must be in a .safetensors file in the same folder",
    ),
    "a number": (b'{"weight_map": {"a": 7}}', "'a' must be in a .safetensors file in the same folder"),
    "missing file": (
        b'{"weight_map": {"a": "gone.safetensors"}}',
        "the file 'gone.safetensors' in the same folder cannot be read",
    ),
    "a folder": (
        b'{"weight_map": {"a": "folder.safetensors"}}',
        "the file 'folder.safetensors' in the same folder cannot be read",
    ),
    "surrogate": (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "the file .* in the same folder cannot be read"),
    "missing tensor": (b'{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}', "'b' is not in 'one"),
}


@pytest.mark.parametrize("case", HOSTILE_INDEXES)
def test_a_hostile_index_is_refused_by_name(tmp_path, case):
    (tmp_path / "in").mkdir()
    theirs.save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    theirs.save_file({"a": torch.ones(2)}, tmp_path / "in" / "one.safetensors")
    (tmp_path / "in" / "folder.safetensors").mkdir()
    content, message = HOSTILE_INDEXES[case]
    path = tmp_path / "in" / "model.safetensors.index.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsReader.open(tmp_path / "in")
    assert str(path) in str(caught.value)


# Whole, or not at all.


def version(k: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), float(k)) for name in ("a", "b", "c", "d")}


def test_an_error_leaves_the_former_export_untouched(tmp_path):
    export(tmp_path, version(1), max_shard_size=32)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    entries = [(name, torch.float32, (4,)) for name in "abc"]

    def stop_half_way(error: BaseException | None) -> None:
        with SafetensorsWriter(tmp_path, entries, max_shard_size=16) as writer:
            writer.write("a", torch.ones(4))
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        stop_half_way(KeyboardInterrupt())
    with pytest.raises(ValueError, match=r"not written: 'b', 'c'$"):
        stop_half_way(None)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()} == before


def test_a_killed_writer_leaves_the_former_export_and_the_next_one_sweeps(tmp_path):
    export(tmp_path, version(1))
    child = os.fork()
    if child == 0:
        writer = SafetensorsWriter(tmp_path, [(name, torch.float32, (4,)) for name in "abcd"], max_shard_size=16)
        writer.write("a", torch.zeros(4))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(files_in(tmp_path)) == 2
    assert_same(load(tmp_path), version(1))
    export(tmp_path, version(2))
    assert files_in(tmp_path) == {"model.safetensors"}
    assert_same(load(tmp_path), version(2))


@pytest.mark.parametrize("new", [64, 32, 16])
@pytest.mark.parametrize("old", [64, 32, 16])
def test_a_crash_between_moves_never_mixes_two_exports(tmp_path, monkeypatch, old, new):
    """One, two or four files replace one, two or four, stopped at every move and removal."""
    moves = {"replace": os.replace, "unlink": Path.unlink}
    seen = set()
    for fatal in range(12):
        folder = tmp_path / str(fatal)
        export(folder, version(1), max_shard_size=old)
        count = iter(range(100))

        def maybe(kind: str, count=count, fatal=fatal):
            def move(*args, **kwargs):
                if next(count) == fatal:
                    raise OSError("power cut")
                return moves[kind](*args, **kwargs)

            return move

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", maybe("replace"))
            patch.setattr(Path, "unlink", maybe("unlink"))
            try:
                export(folder, version(2), max_shard_size=new)
                finished = True
            except OSError:
                finished = False
        try:
            values = {tensor[0].item() for tensor in load(folder).values()}
        except ValueError:  # refused aloud: an index that names what is gone, or no index yet
            values = {"refused"}
        assert len(values) == 1
        assert values == {2} or not finished
        seen |= values
    assert seen == {1, 2} or (old == new and old < 64)


@pytest.mark.parametrize("new", [64, 32, 16])
@pytest.mark.parametrize("old", [64, 32, 16])
def test_stale_files_go_and_strangers_stay(tmp_path, old, new):
    strangers = {
        "config.json",
        "model-notes.safetensors",
        "adapter_model.safetensors",
        "model-00001-of-00002.bin",
        "xmodel-00001-of-00009.safetensors",
        "model.safetensors.index.json.bak",
    }
    for name in strangers:
        (tmp_path / name).write_text("mine")
    export(tmp_path, version(1), max_shard_size=old)
    names = export(tmp_path, version(2), max_shard_size=new)
    assert files_in(tmp_path) == strangers | set(names)
    assert_same(load(tmp_path), version(2))


def test_a_reader_keeps_the_export_it_opened(tmp_path):
    export(tmp_path, version(1), max_shard_size=32)
    with SafetensorsReader.open(tmp_path) as weights:
        export(tmp_path, version(2), max_shard_size=32)
        for name in weights.names:
            out = torch.empty(4)
            weights.read(name, 0, 4, out)
            assert out.tolist() == [1] * 4
    assert_same(load(tmp_path), version(2))


def test_files_have_ordinary_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    export(tmp_path, version(1), max_shard_size=32)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_writing_refuses_what_does_not_fit(tmp_path):
    with SafetensorsWriter(tmp_path, [("a", torch.int64, (2,))], aliases={"tied": "a"}) as writer:
        for name, tensor, message in (
            ("b", torch.ones(2), "'b' is not among the entries"),
            ("tied", torch.ones(2), "'tied' is tied to 'a'"),
            ("a", torch.ones(3), r"'a' has shape \(3,\), its entry \(2,\)"),
            ("a", torch.ones(1, 2), r"'a' has shape \(1, 2\)"),
            ("a", torch.ones(2), r"'a': torch\.float32 cannot be cast to torch\.int64"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.write(name, tensor)
        writer.write("a", torch.tensor([1, 2], dtype=torch.int32))
        with pytest.raises(ValueError, match="'a' was already written"):
            writer.write("a", torch.tensor([1, 2]))
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write("a", torch.tensor([1, 2]))
    assert load(tmp_path)["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ([("a", torch.float32, (1,))] * 2, {}, "'a' is given twice"),
        ([("__metadata__", torch.float32, (1,))], {}, "'__metadata__' is reserved"),
        ([("a", torch.complex128, (1,))], {}, r"does not support torch\.complex128"),
        ([("a", torch.float32, (1,))], {"file_name": "../model.safetensors"}, "plain name"),
        ([("a", torch.float32, (1,))], {"file_name": "model.bin"}, "plain name"),
        ([("a", torch.float32, (1,))], {"aliases": {"b": "c"}}, "alias 'b' of 'c'"),
        ([("a", torch.float32, (1,))], {"aliases": {"a": "a"}}, "alias 'a' of 'a'"),
        ([("a", torch.float32, (1,))], {"aliases": {"format": "a"}}, "alias 'format' of 'a'"),
        ([("a", torch.float32, (1,))], {"metadata": {"step": 3}}, "strings to strings"),
        ([("a", torch.float32, (1,))], {"max_shard_size": "much"}, "Give a number of bytes"),
    ],
)
def test_a_writer_is_refused_before_it_touches_the_disk(tmp_path, entries, options, message):
    with pytest.raises(ValueError, match=message):
        SafetensorsWriter(tmp_path / "new", entries, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("1.5 KiB", 1536),
        (" 3TB ", 3_000_000_000_000),
        (2**61 + 1, 2**61 + 1),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5Gb", "5 parsecs", "0", 0, -3, "0.1B", "5GBx", True, "1e9", "٣GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="Give a number of bytes"):
        parse_size(text)


# Elsewhere.

TRANSFORMERS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig
from onefold.checkpoint.format.safetensors_files import SafetensorsWriter

for tied in (False, True):
    for limit in ("20KB", "5GB"):
        folder = Path(sys.argv[1], f"{tied}-{limit}")
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        config.save_pretrained(folder)
        state = dict(model.state_dict())
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        stored = {name: tensor for name, tensor in state.items() if name not in aliases}
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in stored.items()]
        with SafetensorsWriter(folder, entries, max_shard_size=limit, aliases=aliases) as writer:
            for name, tensor in stored.items():
                writer.write(name, tensor.float())
        assert (len(writer.file_names) > 2) == (limit == "20KB"), writer.file_names
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        assert loaded.dtype is torch.bfloat16
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert loaded.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
"""


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_loads_an_export(tmp_path):
    """In a process of its own: transformers starts threads, and ranks are forked from this one."""
    command = [sys.executable, "-c", TRANSFORMERS, str(tmp_path)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_are_written(tmp_path):
    tensor = torch.randn(3 * ours.TILE + 5, device="cuda")
    with SafetensorsWriter(
        tmp_path, [("same", torch.float32, tensor.shape), ("cast", torch.bfloat16, tensor.shape)]
    ) as writer:
        writer.write("cast", tensor)
        writer.write("same", tensor)
    assert_same(load(tmp_path), {"same": tensor.cpu(), "cast": tensor.bfloat16().cpu()})
