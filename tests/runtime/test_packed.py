"""Frozen weights in a format of their own, as bitsandbytes has them: sharded, gathered byte for byte, never cast."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config, rank, start, weights_of
from torch import nn

import onefold
from onefold.plan import Tier

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
WIDTH = 64


class Packed(nn.Parameter):
    """Two numbers of 4 bits in a byte, bytes that may pretend to be floating-point numbers."""


class PackedLinear(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8)
        self.weight = Packed(packed.view(storage), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.weight.data.view(torch.uint8)
        weight = torch.cat([packed & 15, packed >> 4], dim=1).to(x.dtype) / 8 - 1
        return x @ weight.t() / WIDTH**0.5


def quantized(kind: str) -> nn.Module:
    if kind in ("uint8", "bfloat16", "float32"):
        return PackedLinear(getattr(torch, kind))
    import bitsandbytes

    made = bitsandbytes.nn
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    layer = (
        made.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
        if kind == "bnb8"
        else made.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    )
    layer.load_state_dict(plain.state_dict())
    return layer.to("cpu")  # which quantizes it


class Adapted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = quantized(kind)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model(kind: str) -> nn.Module:
    """Ranks build different weights and scales on purpose: initialize must take rank 0's."""
    torch.manual_seed(5 + rank())
    return nn.Sequential(Adapted(kind), nn.ReLU(), Adapted(kind))


def losses_of(engine: onefold.Engine, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(17 * rank() + seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, WIDTH, generator=generator).to(engine.module[0].down.weight.dtype)
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def packed_bytes(engine: onefold.Engine) -> int:
    params = [param for unit in engine.state.schedule.units for param in unit.params if param.spec.packed]
    assert params
    return sum(param.param_bytes(tier) for param in params for tier in Tier)


def case(kind: str, folder: Path | None, settings: dict[str, Any]) -> Any:
    engine = start(model(kind), settings)
    losses = losses_of(engine, 3, seed=1)
    with torch.no_grad():
        engine.module.eval()
        evaluated = engine.module(torch.ones(2, WIDTH, dtype=engine.module[0].down.weight.dtype)).float().sum().item()
        engine.module.train()
    held = packed_bytes(engine)
    weights = {
        name: value.contiguous().view(torch.uint8) for name, value in weights_of(engine.module).items() if value.dim()
    }
    if folder is not None:
        engine.save_checkpoint(folder)
        after = losses_of(engine, 2, seed=2)
        engine.destroy()
        engine = start(model(kind), settings)
        engine.load_checkpoint(folder)
        assert losses_of(engine, 2, seed=2) == after
    engine.destroy()
    return losses, evaluated, held, weights


def assert_same(found: Any, expected: Any) -> None:
    assert found[:2] == expected[:2]
    assert found[3].keys() == expected[3].keys()
    assert all(torch.equal(found[3][name], expected[3][name]) for name in expected[3])


# Importing it takes a rank a quarter of a minute.
BITSANDBYTES = [pytest.param(kind, marks=[needs_bitsandbytes, pytest.mark.slow]) for kind in ("bnb4", "bnb8")]


@pytest.mark.parametrize("kind", ["uint8", "bfloat16", *BITSANDBYTES])
def test_packed_weights_are_sharded_and_give_the_values_of_unsharded_ones(on_ranks, tmp_path, kind):
    unsharded = on_ranks(2, case, kind, None, config(0))
    sharded = on_ranks(2, case, kind, tmp_path, config(3))
    for got, expected in zip(sharded, unsharded, strict=True):
        assert_same(got, expected)
        assert got[2] * 2 == expected[2], "each rank holds half"


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("bfloat16", {"offload_param": {"device": "cpu"}}),
        pytest.param("bnb4", {"offload_param": {"device": "cpu"}}, marks=[needs_bitsandbytes, pytest.mark.slow]),
        pytest.param("bnb8", {"offload_param": {"device": "cpu"}}, marks=[needs_bitsandbytes, pytest.mark.slow]),
        pytest.param("uint8", {"zero_hpz_partition_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_packed_weights_rest_where_the_config_says(on_ranks, kind, zero):
    expected = on_ranks(2, case, kind, None, config(0))
    for got, wanted in zip(on_ranks(2, case, kind, None, config(3, zero_optimization=zero)), expected, strict=True):
        assert_same(got, wanted)


def quantized_wire_case(kind: str) -> Any:
    """With gathers in int8 the trained weights are rounded on the way; packed ones must not be."""
    engine = start(model(kind), config(3, zero_optimization={"zero_quantized_weights": True}, bf16={"enabled": True}))
    layer = engine.module[0].base
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().view(torch.uint8).clone()))
    losses_of(engine, 2, seed=1)
    kept = weights_of(engine.module)["0.base.weight"].view(torch.uint8)
    return all(torch.equal(values, kept) for values in seen), len(seen), layer.weight.dtype


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_packed_weights_are_neither_rounded_nor_cast(on_ranks, kind):
    assert on_ranks(2, quantized_wire_case, kind) == [(True, 2, getattr(torch, kind))] * 2


class Odd(nn.Module):
    """Few bytes that are no multiple of eight, read through `.data`; and parameters that no flat one can hold."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(size, dtype=torch.uint8), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.freqs = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum() * self.codes.data.sum() * self.freqs.real.sum()


class Alone(nn.Module):
    """A unit of its own that has nothing to flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.mask = nn.Parameter(torch.ones(4, dtype=torch.bool), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.mask
        return x.sum()


def odd_case(size: int) -> list[float]:
    found = []
    for model_ in (Odd(size), Alone()):
        for stage in (0, 3):
            torch.manual_seed(3)
            for parameter in model_.parameters():
                if parameter.requires_grad:
                    nn.init.normal_(parameter)
            engine = start(copy.deepcopy(model_), config(stage))
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            found.append(engine(torch.ones(2, 4)).item())
            engine.destroy()
    return found


@pytest.mark.parametrize("size", [5, 30])
def test_odd_sizes_and_units_without_a_flat_parameter(on_ranks, size):
    for a, b, c, d in on_ranks(2, odd_case, size):
        assert a == b
        assert c == d
