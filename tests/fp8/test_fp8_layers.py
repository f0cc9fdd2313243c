"""Linear layers in FP8 alone: which inputs they accept, and which layers are converted."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from onefold.fp8 import Fp8Layers, convert_layers
from onefold.fp8 import linear as fp8_linear
from onefold.plan import Fp8Plan

RECIPES = pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])


def converted(model: nn.Module, **options: Any) -> Fp8Layers:
    return convert_layers(model, Fp8Plan(emulate=True, **options), torch.device("cpu"))


@RECIPES
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (16,), (1, 16), (2, 3, 4, 16)], ids=str)
def test_inputs_of_any_number_of_dimensions_and_tokens(shape, by_row):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    converted(model, by_row=by_row)
    x = torch.randn(shape, requires_grad=True)
    output = model(x)
    assert output.shape == shape
    output.sum().backward()
    assert x.grad is not None
    weight = model[0].weight.grad
    assert weight is not None
    assert weight.any() == bool(x.numel())


@RECIPES
def test_strided_inputs_and_gradients_give_the_same_bits(by_row):
    layers = nn.ModuleList([nn.Linear(16, 32)])
    layers.append(copy.deepcopy(layers[0]))
    converted(layers, by_row=by_row)
    x, gradient = torch.randn(16, 5, 3).transpose(0, 2), torch.randn(32, 5, 3).transpose(0, 2)
    layers[0](x).backward(gradient)
    layers[1](x.contiguous()).backward(gradient.contiguous())
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


@RECIPES
def test_emulated_products_do_not_overflow_in_fp16_autocast(by_row):
    layer = nn.Linear(2048, 32, bias=False)
    nn.init.ones_(layer.weight)
    converted(nn.Sequential(layer), by_row=by_row)
    with torch.autocast("cpu", dtype=torch.float16):
        output = layer(torch.ones(4, 2048))
    assert output.dtype == torch.float16
    assert (output == 2048).all()


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_writes_to_an_input_without_a_version_are_seen(write):
    layer = nn.Linear(16, 16, bias=False)
    converted(nn.Sequential(layer))
    x = torch.randn(4, 16)
    before = layer(x)
    if write == "data":
        x.data.mul_(3)
    else:
        x.numpy()[:] *= 3
    torch.testing.assert_close(layer(x), before * 3)


def test_inputs_get_no_attributes_and_are_not_kept():
    layer = nn.Linear(16, 16, bias=False)
    converted(nn.Sequential(layer))
    batch = torch.randn(4, 16)
    with torch.inference_mode():
        layer(batch)
    layer(batch).sum().backward()
    x = batch.clone().requires_grad_() * 1.0
    layer(x)
    assert not vars(x)
    assert fp8_linear._last_cast._kept is not None
    del x
    assert fp8_linear._last_cast._kept is None
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), batch)


def test_layers_of_other_classes_are_listed():
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    found = converted(layer)
    assert [*found.layers] == ["linear1", "linear2"]
    assert found.reasons == {
        "self_attn.out_proj": "a NonDynamicallyQuantizableLinear",
        "self_attn": "a MultiheadAttention",
    }
    experts = nn.ModuleDict({"gate": nn.Linear(16, 16), "experts": nn.Bilinear(16, 16, 4), "norm": nn.LayerNorm(16)})
    reasons = converted(nn.Sequential(nn.Linear(16, 16), experts)).reasons
    assert reasons == {"1.gate": "a router of experts", "1.experts": "a Bilinear"}


def test_a_pattern_skips_the_layers_inside_a_module():
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for name in ("a", "b", "c")})
    assert [*converted(model, skip=("a", "*b")).layers] == ["c.0"]


def test_a_layer_with_two_names_has_that_of_its_parameters():
    model = nn.Module()
    model.block = nn.Sequential(nn.Linear(16, 16))
    model.again = model.block[0]
    found = converted(model)
    assert {*found.of_weights(model)} == {"block.0.weight"}


def test_unused_frozen_layers_are_named_too(caplog):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    found = converted(model)
    model[0](torch.randn(4, 16))
    found.warn_of_unused()
    assert "fp8: 1 did not multiply in FP8" in caplog.text


def test_many_layers_are_converted_in_linear_time():
    calls = 0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(64))

        def modules(self) -> Any:
            nonlocal calls
            calls += 1
            return super().modules()

    converted(Model())
    assert calls < 8
