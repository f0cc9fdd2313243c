"""Plain data through JSON and tensors: what comes back is what went in, to the type and the bit; or it is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import pathlib
import random
import struct
import types

import numpy as np
import pytest
import torch

from onefold.checkpoint.format import plain_data
from onefold.checkpoint.format.plain_data import ClientStateError
from onefold.checkpoint.format.safetensors_files import DTYPES
from onefold.checkpoint.state.random_states import capture_random_states, restore_random_states

CPU = torch.device("cpu")


def through_json(value):
    tree, tensors = plain_data.encode(value, "client_state")
    assert all(t.is_contiguous() and t.device == CPU and t.dtype in DTYPES.values() for t in tensors.values())
    return plain_data.decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def same(a, b) -> bool:
    """Equal in type, value and order, down to signed zeros and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and (a.tobytes() == b.tobytes() or (a != a and b != b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, dict):
        return same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, set | frozenset):
        rest = list(b)
        return len(a) == len(b) and all(any(same(x, y) for y in rest) for x in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (isinstance(a, int) or repr(a) == repr(b))


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


LEAVES = [
    *(None, True, False, 0, 1, -1, 2**53, 2**53 + 1, -(2**64), 3**10_000),
    *(0.0, -0.0, 1.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan),
    *(1j, complex(-0.0, 0.0), complex(math.nan, -math.inf)),
    *("", "plain", "$tuple", "ünïcödé \0 \n", "\U0001f600", b"", b"\0\xff"),
    *(torch.bfloat16, torch.complex128, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0])),
    *(np.float32(0.1), np.float64("nan"), np.float16(-0.0), np.int8(-128), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.complex64(1 + 2j), np.complex128(complex(math.inf, -0.0))),
]  # fmt: skip


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: type(value).__name__)
def test_leaves_come_back(value):
    assert same(through_json(value), value)
    assert same(through_json([{"a": value}]), [{"a": value}])


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.complex128], ids=str)
def test_tensors_come_back(dtype):
    filled = torch.arange(24).to(torch.float32).to(dtype).reshape(2, 3, 4)
    for tensor in (
        filled,
        filled.permute(2, 0, 1),
        filled[:, 1],
        filled[0, 0, 0],
        filled[:0],
        filled[1:].expand(5, 3, 4),
    ):
        assert same(through_json({"t": tensor}), {"t": tensor.contiguous()})


def test_tensors_are_plain_copies():
    parameter = torch.nn.Parameter(torch.ones(3))
    tree, tensors = plain_data.encode(
        [parameter, parameter, torch.tensor([1j], dtype=torch.complex128).conj()], "state"
    )
    assert tree == [{"$tensor": "0"}, {"$tensor": "0"}, {"$complex128_tensor": "1"}]
    with torch.no_grad():
        parameter.zero_()
    first, second, conjugate = plain_data.decode(tree, tensors)
    assert first is second, "what was one tensor stays one"
    assert type(first) is torch.Tensor
    assert not first.requires_grad
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert conjugate.tolist() == [-1j]


@pytest.mark.parametrize("dtype", sorted(plain_data.NUMBERS))
def test_arrays_come_back(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for each in (array, array.T, array[:, ::-1], array[0, 0, 0, ...], array[:0], np.array(1, dtype)):
        assert same(through_json(each), each)
    assert same(through_json(array[0, 0, 1]), array[0, 0, 1])


def random_value(draw: random.Random, depth: int, hashable: bool = False):
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(LEAVES)
    inner = functools.partial(random_value, draw, depth - 1)
    items = [inner(hashable) for _ in range(draw.randrange(4))]
    if hashable:
        return draw.choice([tuple, frozenset])(items)
    if draw.random() < 0.15:
        return draw.choice([torch.randn(2, 2), np.arange(3, dtype=np.uint16), torch.zeros(0, dtype=torch.bool)])
    names = [draw.choice(["a", "$a", "$tuple", "", "b c", "ü"]) for _ in items]
    keys = [inner(True) for _ in items]
    return draw.choice(
        [
            lambda: items,
            lambda: tuple(items),
            lambda: set(keys),
            lambda: frozenset(keys),
            lambda: collections.deque(items, draw.choice([None, 2, 10])),
            lambda: dict(zip(names, items, strict=True)),
            lambda: dict(zip(keys, items, strict=True)),
            lambda: collections.OrderedDict(zip(keys, items, strict=True)),
            lambda: collections.Counter(keys),
        ]
    )()


@pytest.mark.parametrize("seed", range(20))
def test_random_nested_values_come_back(seed):
    draw = random.Random(seed)
    for _ in range(100):
        value = random_value(draw, draw.randrange(6))
        assert same(through_json(value), value)


def test_plain_data_is_plain_json():
    value = {"step": 3, "lr": [0.1, 1e-5], "name": "run", "nested": {"done": False, "best": None}}
    assert plain_data.encode(value, "client_state") == (value, {})


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        ((1, (2,)), {"$tuple": [1, {"$tuple": [2]}]}),
        ({1: "a", (None,): "b", "c": 0}, {"$dict": [[1, "a"], [{"$tuple": [None]}, "b"], ["c", 0]]}),
        ({True: "a"}, {"$dict": [[True, "a"]]}),
        ({"$tuple": [1]}, {"$dict": [["$tuple", [1]]]}),
        ({"b", "a"}, {"$set": ["a", "b"]}),
        (collections.deque([1], 5), {"$deque": {"maxlen": 5, "items": [1]}}),
        (collections.Counter("aa"), {"$counter": [["a", 2]]}),
        (np.float32(0.5), {"$numpy_scalar": {"dtype": "float32", "value": 0.5}}),
        (math.nan, {"$float": "nan"}),
        (2**60, {"$int": "0x1000000000000000"}),
    ],
)
def test_tags_read_well(value, tree):
    assert plain_data.encode(value, "client_state")[0] == tree


def test_a_module_state_dict_keeps_its_versions():
    norm = torch.nn.BatchNorm1d(2)
    state = through_json({"norm": norm.state_dict()})["norm"]
    assert same(state, norm.state_dict())
    assert state._metadata == norm.state_dict()._metadata
    assert type(through_json(collections.OrderedDict(a=1))) is collections.OrderedDict


# -- refusing ----------------------------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


class Words(dict):
    pass


@dataclasses.dataclass
class Options:
    lr: float = 0.1


Point = collections.namedtuple("Point", "x y")


CANNOT = "cannot be saved: checkpoints contain only plain data and tensors."


class Opaque:
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.nn.Linear(1, 1), f"a Linear {CANNOT} Save its state_dict() instead"),
        (torch.optim.SGD([torch.zeros(1)]), "Save its state_dict() instead"),
        (lambda: 0, "the function <lambda> cannot be saved"),
        (Options, "the class Options cannot be saved: "),
        (json, "the module json"),
        (functools.partial(print), "It is code. Save a name that your script looks up"),
        (Options(), f"an Options {CANNOT} Save dataclasses.asdict() of it instead"),
        (Point(1, 2), "Save its _asdict() instead"),
        (Color.RED, "Save its .value instead"),
        (Words(a=1), f"a Words {CANNOT} Save dict() of it instead"),
        (collections.defaultdict(lambda: 0), "Its factory is code. Save dict() of it instead"),
        (type("Text", (str,), {})("a"), "Save str() of it instead"),
        ((i for i in ()), f"a generator {CANNOT} Save list() of it instead"),
        (torch.Generator(), "Save its get_state() instead"),
        (random.Random(), "Save its getstate() instead"),
        (np.random.default_rng(), "Save its bit_generator.state instead"),
        (np.array([None]), "Its dtype is object, not a number. Save its tolist() instead"),
        (np.array(["2024-01-01"], dtype="datetime64[D]"), "not a number"),
        (np.datetime64("2024-01-01"), "Save its item() instead"),
        (np.str_("a"), "Save its item() instead"),
        (np.zeros(2, ">f4"), "newbyteorder"),
        (np.ma.masked_array([1]), "Save numpy.array() of it instead"),
        (torch.zeros(2, device="meta"), "has no values"),
        (torch.eye(2).to_sparse(), "Save its to_dense() instead"),
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "safetensors does not support torch.float8_e8m0fnu"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3, 4), f"a datetime {CANNOT} Save its isoformat() instead"),
        (datetime.date(1, 1, 1), "Save its isoformat() instead"),
        (datetime.time(23, 59), "Save its isoformat() instead"),
        (datetime.timedelta(-1, 2, 3), "Save its total_seconds() instead"),
        (pathlib.Path("/a/b"), f"a PosixPath {CANNOT} Save str() of it instead"),
        (pathlib.PureWindowsPath("C:\\x"), "Save str() of it instead"),
        (slice(1, 2), "Save its start, stop and step instead"),
        (range(3), "Save list() of it instead"),
        (bytearray(b"ab"), "Save bytes() of it instead"),
        (collections.defaultdict(list), "Save dict() of it instead"),
        (argparse.Namespace(lr=0.1), f"a Namespace {CANNOT} Save its plain values instead, such as vars()"),
        (types.SimpleNamespace(lr=0.1), "such as vars() of it"),
        ("lone \udcff", f'a str {CANNOT} It has surrogates. Save its encode("utf-8", "surrogatepass") instead'),
        (types.MappingProxyType({}), "a mappingproxy cannot be saved"),
        (Opaque(), "Save its plain values instead"),
        (..., "an ellipsis cannot be saved"),
    ],
)  # fmt: skip
def test_other_values_are_refused_with_a_hint(value, problem):
    with pytest.raises(ClientStateError) as refused:
        plain_data.encode({"args": {"model": [1, value]}}, "client_state")
    assert str(refused.value).startswith('client_state["args"]["model"][1]: ')
    assert problem in str(refused.value)


def test_all_places_are_told_at_once():
    value = {"a": [print, {2: ..., (3, "x"): {Opaque(): 1}}], "s": {Opaque()}}
    with pytest.raises(ClientStateError) as refused:
        plain_data.encode(value, "client_state")
    assert [line.split(": ")[0] for line in str(refused.value).splitlines()] == [
        'client_state["a"][0]',
        'client_state["a"][1][2]',
        'client_state["a"][1][(3, "x")].keys()',
        'client_state["s"] (a member)',
    ]
    with pytest.raises(ClientStateError) as refused:
        plain_data.encode([print] * 25, "client_state")
    assert len(str(refused.value).splitlines()) == 11
    assert str(refused.value).endswith("\nand 15 more")


def test_data_that_contains_itself_is_refused_by_path():
    loop = {"a": {"b": []}}
    loop["a"]["b"].append(loop["a"])
    with pytest.raises(
        ClientStateError, match=r'client_state\["a"\]\["b"\]\[0\]: the same object as client_state\["a"\]'
    ):
        plain_data.encode(loop, "client_state")
    shared = [1]
    assert through_json([shared, shared, (shared,)]) == [[1], [1], ([1],)]


def refusal(value) -> str:
    try:
        plain_data.encode(value, "client_state")
    except ClientStateError as error:
        return str(error)
    return ""


NESTINGS = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "pairs": lambda inner: {1: inner},
    "deque": lambda inner: collections.deque([inner]),
    "ordered": lambda inner: collections.OrderedDict(a=inner),
    "frozenset": lambda inner: frozenset([inner]),
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS.keys())
def test_what_is_written_can_be_read_however_deep(nest):
    """The deepest that is taken comes back, and one more is refused, not a RecursionError."""
    value = np.complex128(complex(math.nan, 1))
    taken = 0
    while "levels of JSON" not in refusal(value):
        assert same(through_json(value), value)
        value, taken = nest(value), taken + 1
    assert 20 < taken <= plain_data.MAX_DEPTH
    for _ in range(5000):
        value = nest(value)
    with pytest.raises(ClientStateError, match="levels of JSON"):
        plain_data.encode(value, "client_state")


# -- reading what anyone may have written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1},
        {"$": 1},
        {"$tuple": [1], "more": 2},
        {"a": 1, "$tuple": [1]},
        {"$tuple": "abc"},
        {"$tuple": {"$set": [1]}},
        {"$set": [1, 1]},
        {"$set": [[1]]},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$dict": ["ab"]},
        {"$dict": [[[], 1]]},
        {"$dict": {"a": 1}},
        {"$counter": 3},
        {"$ordered_dict": [[1]]},
        {"$state_dict": {"items": []}},
        {"$deque": {"maxlen": -1, "items": []}},
        {"$deque": {"maxlen": None}},
        {"$int": "12"},
        {"$int": 12},
        {"$float": "1.5"},
        {"$float": []},
        {"$complex": [1, 2]},
        {"$complex": ["1", "2"]},
        {"$bytes": "not base64!"},
        {"$bytes": [1]},
        {"$torch_dtype": "nn"},
        {"$torch_dtype": "save"},
        {"$torch_device": "toaster"},
        {"$torch_size": ["a"]},
        {"$tensor": "7"},
        {"$tensor": ["0"]},
        {"$complex128_tensor": "0"},
        {"$ndarray": {"dtype": "int8", "tensor": {"$tensor": "0"}}},
        {"$ndarray": {"dtype": "object", "tensor": {"$tensor": "0"}}},
        {"$ndarray": {"dtype": "float32", "tensor": 3}},
        {"$numpy_scalar": {"dtype": "int8", "value": 300}},
        {"$numpy_scalar": {"dtype": "int8", "value": 1.5}},
        {"$numpy_scalar": {"dtype": "float32", "value": [1.0]}},
        {"$numpy_scalar": {"dtype": "O", "value": 1}},
    ],
    ids=json.dumps,
)
def test_malformed_tags_are_refused_by_name(tree):
    with pytest.raises(ValueError, match=r"^\$"):
        plain_data.decode([{"a": tree}], {"0": torch.zeros(3)})


@pytest.mark.parametrize(
    "tree",
    [
        {"$namespace": {"lr": 0.1}},
        {"$simple_namespace": {"lr": 0.1}},
        {"$defaultdict": {"factory": "list", "items": []}},
        {"$path": "/a/b"},
        {"$datetime": "2024-01-01"},
        {"$timedelta": [1, 2, 3]},
        {"$slice": [1, 2, None]},
        {"$range": [1, 2, 3]},
        {"$str": [55357]},
        {"$bytearray": "AA=="},
    ],
    ids=json.dumps,
)
def test_tags_of_other_versions_are_refused_by_name(tree):
    (tag,) = tree
    with pytest.raises(ValueError, match=rf"^\{tag}: malformed: .*another version"):
        plain_data.decode([{"a": tree}], {})


def test_deep_and_foreign_trees_are_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="levels of nesting"):
        plain_data.decode(deep, {})
    for tree in ({1: 2}, (1,), b"a"):
        with pytest.raises(ValueError, match="not JSON"):
            plain_data.decode(tree, {})
    while deep:  # freed level by level: some versions of Python free nested lists by recursion
        deep = deep.pop()


# -- random number generators ------------------------------------------------------------------------------------------


def draw_everywhere():
    return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(1).item()


def test_random_numbers_go_on_where_they_were():
    draw_everywhere()
    state = capture_random_states(CPU)
    expected = [draw_everywhere() for _ in range(3)]
    restore_random_states(through_json(state), CPU)
    assert [draw_everywhere() for _ in range(3)] == expected
    restore_random_states(state, CPU)
    assert [draw_everywhere() for _ in range(3)] == expected


def test_every_capture_sees_numpy_move():
    """Also where a normal number is kept for the next call, and where the state jumps."""
    np.random.seed(3)
    draws = [np.random.rand, np.random.randn, np.random.randn, np.random.randn, lambda: np.random.bytes(4000)]
    states, numbers = [], []
    for draw in [*draws, lambda: 0, *draws]:
        states += [capture_random_states(CPU), capture_random_states(CPU)]
        draw()
    for state in [*states, *reversed(states)]:
        restore_random_states(state, CPU)
        assert same(capture_random_states(CPU)["numpy"], state["numpy"])
        assert same(np.random.get_state(legacy=False), state["numpy"])
        numbers.append(np.random.randn())
    assert numbers == numbers[::-1]


def twister(num_words, position):
    words = {"key": np.zeros(num_words, np.uint32), "pos": position}
    return {"bit_generator": "MT19937", "state": words, "has_gauss": 0, "gauss": 0.0}


@pytest.mark.parametrize(
    ("key", "broken"),
    [
        ("python", (3, (1, 2), None)),
        ("python", None),
        ("torch", torch.zeros(5, dtype=torch.uint8)),
        ("torch", torch.zeros(5056)),
        ("torch", torch.zeros(5056, dtype=torch.uint8)),
        ("numpy", {"bit_generator": "PCG64"}),
        ("numpy", twister(3, 0)),
        ("numpy", twister(624, 999)),
        ("numpy", 3),
        ("other", 3),
    ],
)  # fmt: skip
def test_a_broken_random_state_changes_nothing(key, broken):
    before = capture_random_states(CPU)
    moved = before | {"torch": torch.Generator().manual_seed(5).get_state(), key: broken}
    with pytest.raises(ValueError, match=f"random state of {key} cannot|must have python and torch"):
        restore_random_states(moved, CPU)
    assert same(capture_random_states(CPU), before)
    with pytest.raises(ValueError, match="must have"):
        restore_random_states({"torch": before["torch"]}, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_on_the_gpu_go_on():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.rand(1, device=device)
    state = capture_random_states(device)
    expected = torch.rand(5, device=device).tolist()
    restore_random_states(through_json(state), device)
    assert torch.rand(5, device=device).tolist() == expected
    with pytest.raises(ValueError, match="random state of cuda cannot"):
        restore_random_states(state | {"cuda": torch.zeros(3, dtype=torch.uint8)}, device)
    restore_random_states(state, CPU)
