"""Linear layers in FP8: values, stages, all-gathers in FP8, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import Net, batches, config, first_difference, more, start, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.config import ConfigError
from onefold.fp8 import Fp8Linear, convert_layers
from onefold.plan import Fp8Plan

CPU = torch.device("cpu")
EMULATED = {"enabled": True, "emulate": True}


class Wide(Net):
    """A net whose blocks can multiply in FP8, and whose head cannot."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__(width=32)
        self.recomputes = recomputes

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recomputes else block(h)
        return self.head(h)


def settings(
    stage: int, *, recipe: str = "tensorwise", all_gather: bool | None = None, **others: Any
) -> dict[str, Any]:
    fp8 = EMULATED | {"recipe": recipe} | ({} if all_gather is None else {"all_gather": all_gather})
    return config(stage, **{"fp8": fp8, "bf16": {"enabled": True}, "gradient_clipping": 0.1, **others})


def trained(stage: int, *, recomputes: bool = False, **options: Any) -> tuple[Any, int, dict[str, int]]:
    torch.manual_seed(0)
    engine = start(Wide(recomputes), settings(stage, **options))
    found = train(engine, 6)
    names = ("all-gather",)
    return found, engine.state.fp8.num_products, {name: engine.ledger.bytes(name) for name in names}


# -- values ---------------------------------------------------------------------------------------------------------


def rounded(matrix: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """A matrix as FP8 stores it, in fp64."""
    largest = matrix.double().abs().amax() if dim is None else matrix.double().abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (matrix.float() * scale).to(dtype).double() / scale.double()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_computes_the_three_products_of_rounded_matrices(recipe):
    torch.manual_seed(0)
    by_row = recipe == "rowwise"
    layer = nn.Linear(48, 32)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    convert_layers(nn.Sequential(layer), Fp8Plan(by_row=by_row, emulate=True), CPU)
    x, gradient = torch.randn(3, 7, 48, requires_grad=True), torch.randn(3, 7, 32)
    output = layer(x)
    output.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rows, of_output = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    per_row, per_column = (1, 0) if by_row else (None, None)
    kind = e4m3 if by_row else e5m2
    expected = rounded(rows, e4m3, per_row) @ rounded(weight, e4m3, per_row).T + bias.double()
    to_input = rounded(of_output, kind, per_row) @ rounded(weight, e4m3, per_column)
    to_weight = rounded(of_output, kind, per_column).T @ rounded(rows, e4m3, per_column)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output.detach().double().flatten(0, 1), expected, **close)
    torch.testing.assert_close(x.grad.double().flatten(0, 1), to_input, **close)
    torch.testing.assert_close(layer.weight.grad.double(), to_weight, **close)
    torch.testing.assert_close(layer.bias.grad, of_output.sum(0))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_zeros_stay_zeros_and_infinities_become_nan(recipe):
    layer = nn.Linear(16, 16, bias=False)
    convert_layers(nn.Sequential(layer), Fp8Plan(by_row=recipe == "rowwise", emulate=True), CPU)
    assert not layer(torch.zeros(4, 16)).any()
    x = torch.zeros(4, 16)
    x[0, 0] = torch.inf
    assert layer(x)[0].isnan().all()


def test_layers_with_the_same_input_cast_it_once(monkeypatch):
    from onefold.fp8 import linear

    casts = []
    cast = linear.to_fp8
    monkeypatch.setattr(
        linear, "to_fp8", lambda matrix, *args, **kwargs: casts.append(matrix) or cast(matrix, *args, **kwargs)
    )
    model = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    convert_layers(model, Fp8Plan(emulate=True), CPU)
    x = torch.randn(4, 16)
    before = [layer(x) for layer in model]
    assert len(casts) == 1 + 3
    x.mul_(2)  # which the cast must follow
    assert not any(torch.equal(layer(x), old) for layer, old in zip(model, before, strict=True))
    assert len(casts) == 1 + 3 + 1 + 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_equals_that_of_torchao(recipe):
    float8 = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).bfloat16()

    ours, theirs = made(), made()
    convert_layers(ours, Fp8Plan(by_row=recipe == "rowwise", emulate=True), CPU)
    float8.convert_to_float8_training(
        theirs, config=replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    )
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    for model in (ours, theirs):
        model(x).float().square().sum().backward()
    assert torch.equal(ours(x), theirs(x))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# -- stages -----------------------------------------------------------------------------------------------------------


def problems_of_stages(world: int, options: dict[str, Any]) -> list[str]:
    recipe = options.get("recipe", "tensorwise")
    expected, products, _ = trained(0, **options)
    found = []
    for stage, all_gather in ((1, None), (2, None), (3, None), (3, False)):
        if recipe == "rowwise" and all_gather is False:
            continue
        got, of_stage, _ = trained(stage, all_gather=all_gather, **options)
        told = first_difference(got, expected)
        found += [f"stage {stage}, all_gather {all_gather}: {told}"] if told else []
        found += [] if of_stage == products else [f"stage {stage}: {of_stage} products instead of {products}"]
    steps = 6 * (4 if options.get("recomputes") else 3)
    found += [] if products == 6 * steps else [f"{products} products"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "rowwise"},
        {"recomputes": True},
        more({"bf16": {}}),
        more({"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 8}}),
        more({"bf16": {}, "torch_autocast": {"enabled": True}}),
        more({"zero_optimization": {"overlap_comm": False}}),
        more({"onefold": {"collective": "native"}}),
        more({"onefold": {"master_dtype": "bf16_int16"}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [2, more(3)])
def test_stages_are_bit_equal(on_ranks, world, options):
    assert on_ranks(world, problems_of_stages, world, options) == [[]] * world
