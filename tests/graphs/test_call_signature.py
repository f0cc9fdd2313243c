"""Signatures of calls, static copies of tensors, and where CUDA graphs are refused."""

from __future__ import annotations

import pytest
import torch
from models import Net, config, start

from onefold.config import ConfigError, load_config
from onefold.graphs import call_signature
from onefold.graphs.call_signature import NotCapturable, signature_of, static_copy, update, with_tensors
from onefold.plan.activations import make_activations


@pytest.fixture
def on_any_device(monkeypatch):
    monkeypatch.setattr(call_signature, "HOST", "no device")


def key_of(*value: object) -> object:
    return signature_of(value, [])


def test_a_signature_has_constants_and_layouts(on_any_device):
    x, y = torch.ones(2, 3), torch.ones(3, 2)
    tensors: list[torch.Tensor] = []
    signature_of({"x": x, "others": [y, None], "scale": 0.5}, tensors)
    assert [id(tensor) for tensor in tensors] == [id(x), id(y)]
    assert key_of(x, 0.5, None, "a") == key_of(torch.zeros(2, 3), 0.5, None, "a")
    different = [
        (x, 1, None, "a"), (x, 0.5, None, "b"), (y, 0.5, None, "a"), (y.t(), 0.5, None, "a"), (x, 0.5, 0, "a"),
        (x.double(), 0.5, None, "a"), (x.clone().requires_grad_(), 0.5, None, "a"), ([x], 0.5, None, "a"),
    ]  # fmt: skip
    for other in different:
        assert key_of(*other) != key_of(x, 0.5, None, "a")
    assert key_of(True) != key_of(1)
    assert key_of({"a": x}) != key_of({"b": x})
    hash(key_of({"a": [x]}, x))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "an argument is a builtins.object"),
        (torch.ones(2), "a tensor on cpu"),
        ([{1}], "an argument is a builtins.set"),
    ],
)
def test_what_a_graph_cannot_take_is_named(value, reason):
    with pytest.raises(NotCapturable, match=reason):
        key_of(value)


def test_tensors_are_replaced_in_order():
    x, y = torch.ones(1), torch.zeros(1)
    value = (x, [None, {"a": y, "b": 3}])
    found = with_tensors(value, iter([y, x]))
    assert found[0] is y
    assert found[1][1]["a"] is x
    assert found[1][1]["b"] == 3


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(4.0).expand(3, 4),
        torch.arange(20.0).view(4, 5)[1:3, ::2],
        torch.arange(3).view(3, 1, 1).expand(3, 2, 2) > 1,
        torch.empty(0, 3),
        torch.tensor(2.5),
    ],
    ids=["transposed", "expanded", "sliced", "mask", "empty", "scalar"],
)
def test_static_copies_have_values_and_strides(source):
    copied = static_copy(source)
    assert torch.equal(copied, source)
    assert copied.stride() == source.stride()
    version, zeros = copied._version, static_copy(source)
    call_signature._memory_of(zeros).zero_()
    update(copied, zeros)
    assert not copied.any()
    update(copied, source)
    assert torch.equal(copied, source)
    assert copied._version == version  # autograd may have saved it


# -- what is refused ------------------------------------------------------------------------------------------------


def start_on_a_cpu() -> str:
    with pytest.raises(ConfigError) as error:
        start(Net(), config(2, onefold={"cuda_graphs": True}))
    return str(error.value)


def test_graphs_need_a_cuda_device(on_ranks):
    (message,) = on_ranks(1, start_on_a_cpu)
    assert "onefold.cuda_graphs needs a CUDA device, but the model is on cpu" in message


def test_graphs_and_chunks_exclude_each_other():
    own = {"onefold": {"cuda_graphs": True, "batch_chunks": 2}}
    with pytest.raises(ConfigError, match="Use one of them"):
        make_activations(load_config(config(2, **own)))
