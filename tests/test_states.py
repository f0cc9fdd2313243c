"""Masters and states in fewer bytes: what each form holds, the same bits in every stage and tier, and planned bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Net, Trace, batches, config, first_difference, more, net, precision, start, train, weights_of

import onefold
from onefold.config import ConfigError
from onefold.offload.encoded import EncodedFlat
from onefold.offload.state_codec import TINY, Dither, decode, encode
from onefold.plan.forms import BLOCK, DITHERED, SIGNED, SPLIT_8, SPLIT_16, SQUARES, Form
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

# Of these models even the matrices are small.
INT8 = {"state_dtype": "int8", "int8_min_numel": 256}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": INT8,
    "split": {"master_dtype": "bf16_int16"},
    "int8, split": {**INT8, "master_dtype": "bf16_int16"},
    "int8, 8 bits": {**INT8, "master_dtype": "bf16_int8"},
    "bf16": {"state_dtype": "bf16", "master_dtype": "bf16"},
}


# -- what each form holds ----------------------------------------------------------------------------------------------


def room(form: Form, numel: int) -> list[torch.Tensor]:
    return [torch.zeros(part.numel(numel), dtype=part.dtype) for part in form.parts]


def through(form: Form, values: torch.Tensor, dither: Dither | None = None) -> torch.Tensor:
    parts = room(form, values.numel())
    encode(form, values, parts, dither)
    decode(form, parts, out := torch.empty_like(values))
    return out


def spread(numel: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(numel, generator=generator) * 3
    return torch.randn(numel, generator=generator) * exponents.exp()


@pytest.mark.parametrize("form", [SIGNED, SQUARES, SPLIT_16, SPLIT_8, DITHERED], ids=lambda form: form.name)
@given(st.integers(0, 10_000), st.integers(-80, 80))
@settings(max_examples=20, deadline=None)
def test_what_was_decoded_is_encoded_to_the_same_bytes(form: Form, seed: int, exponent: int) -> None:
    values = spread(2 * BLOCK, seed).ldexp(torch.tensor(exponent))
    values = values.square() if form is SQUARES and abs(exponent) < 40 else values.abs() if form is SQUARES else values
    once = room(form, values.numel())
    encode(form, values, once)
    decode(form, once, out := torch.empty_like(values))
    again = room(form, values.numel())
    encode(form, out, again, Dither(3, "weight", 0))
    assert first_difference(again, once) is None


@pytest.mark.parametrize(
    ("form", "codes"), [(SIGNED, range(-127, 128)), (SQUARES, range(256))], ids=["signed", "squares"]
)
def test_every_code_comes_back(form: Form, codes: range) -> None:
    parts = room(form, BLOCK)
    parts[0][: len(codes)] = torch.tensor(list(codes), dtype=parts[0].dtype)
    for scale in (1.0, 3.7e-9, 8e24, TINY):
        parts[1].fill_(scale)
        decode(form, parts, values := torch.empty(BLOCK))
        again = room(form, BLOCK)
        encode(form, values, again)
        assert first_difference(again, parts) is None
        assert values.isfinite().all()
        assert values.max() == torch.tensor(scale)


@pytest.mark.parametrize(("form", "top", "power"), [(SIGNED, 127, 2), (SQUARES, 255, 4)], ids=["signed", "squares"])
def test_bytes_are_as_close_as_roots_can_be(form: Form, top: int, power: int) -> None:
    values = torch.logspace(-3 * power, 0, 8 * BLOCK).view(BLOCK, 8).t().flatten()  # each block has all magnitudes
    if form is SIGNED:
        values = values * torch.tensor([1.0, -1.0]).repeat(4 * BLOCK)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()
    codes = (values.abs() / largest) ** (1 / power) * top
    steps = ((codes + 0.5) / codes) ** power - 1
    errors = ((through(form, values) - values) / values).abs()
    assert (errors <= steps * 1.001)[codes > 1].all()
    assert errors[codes > top / 4].max() < 0.07


def test_squares_above_zero_stay_above_zero() -> None:
    values = torch.zeros(BLOCK)
    values[0], values[1] = 1.0, 1e-30
    found = through(SQUARES, values)
    assert found[0] == 1.0
    assert found[1] > 0
    assert not found[2:].any()


@pytest.mark.parametrize("form", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_a_block_with_what_is_not_finite_is_nan_and_its_neighbours_are_not(form: Form) -> None:
    for bad in (torch.inf, torch.nan):
        values = torch.ones(3 * BLOCK)
        values[BLOCK + 5] = bad
        found = through(form, values).view(3, BLOCK)
        assert found[1].isnan().all()
        assert (found[0] == 1).all()
        assert (found[2] == 1).all()
    assert not through(form, torch.full((BLOCK,), TINY / 2)).any()


def test_a_split_master_comes_back_but_for_ties() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)
    bits[:8] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, -0x407F8000, 0, 1, 0x7F7F0000])
    values = bits.view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    parts = room(SPLIT_16, values.numel())
    encode(SPLIT_16, values, parts)
    decode(SPLIT_16, parts, found := torch.empty_like(values))
    before, after = values.view(torch.int32), found.view(torch.int32)
    ties = (before & 0x1FFFF) == 0x8000
    assert ties.any()
    assert torch.equal(before - ties.to(torch.int32), after)
    assert torch.equal(parts[0], found.bfloat16()), "the weight is torch's rounding of the master"
    assert torch.equal(parts[0], values.bfloat16())
    encode(SPLIT_8, values, parts := room(SPLIT_8, values.numel()))
    decode(SPLIT_8, parts, found)
    assert torch.equal(parts[0], values.bfloat16())
    assert torch.equal(parts[0], found.bfloat16())
    normal = values.abs() > 1e-37
    errors = ((found - values) / values)[normal].abs()
    assert errors.max() <= 2.0**-15, "next to a tie"
    assert (errors <= 2.0**-16).float().mean() > 0.99


def test_a_weight_that_is_written_is_what_is_decoded() -> None:
    values = spread(BLOCK) * 1e-3
    for form in (SPLIT_16, SPLIT_8):
        parts = room(form, BLOCK)
        encode(form, values, parts)
        for written in (0.0, 1.0, -0.5):
            parts[0].fill_(written)
            decode(form, parts, found := torch.empty(BLOCK))
            assert (found.bfloat16() == written).all()


def test_dithered_values_keep_their_mean_and_know_their_place() -> None:
    values = torch.full((1 << 16,), 1.0 + 0.3 / 128)
    whole = through(DITHERED, values, Dither(4, "weight", 0))
    assert set(whole.tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs(whole.mean().item() - values[0].item()) < 3e-5
    cut = 5 * BLOCK
    parts = [through(DITHERED, values[:cut], Dither(4, "weight", 0))]
    parts.append(through(DITHERED, values[cut:], Dither(4, "weight", cut)))
    assert torch.equal(torch.cat(parts), whole), "however it is cut"
    for other in (Dither(5, "weight", 0), Dither(4, "bias", 0), Dither(4, "weight", 0, "exp_avg")):
        assert 0.35 < (through(DITHERED, values, other) != whole).float().mean() < 0.5
    exact = spread(BLOCK).bfloat16().float()
    assert torch.equal(through(DITHERED, exact, Dither(1, "weight", 0)), exact)
    assert through(DITHERED, torch.tensor([torch.inf, -torch.inf, torch.nan] + [0.0] * 5)).isfinite().sum() == 5


def test_a_range_of_encoded_values_may_end_within_a_block() -> None:
    flat = EncodedFlat(SIGNED, room(SIGNED, 4 * BLOCK), 4 * BLOCK)
    values = spread(BLOCK + 10)
    flat[BLOCK : 2 * BLOCK + 10].store(values)
    assert (flat.load()[BLOCK : 2 * BLOCK + 10] - values).abs().max() < 0.02 * values.abs().max()
    assert not flat.load()[2 * BLOCK + 10 :].any()
    assert [part.numel() for part in flat.split(3 * BLOCK)] == [3 * BLOCK, BLOCK]


# -- every stage and tier ----------------------------------------------------------------------------------------------


def run_stages(formats: dict[str, Any], accumulation: int, dtype: str, more_zero: dict[str, Any]) -> dict[int, Trace]:
    traces = {}
    for stage in range(4):
        extra = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision(dtype)}
        engine = start(net(), config(stage, onefold=formats, zero_optimization=more_zero, **extra))
        traces[stage] = train(engine, 4 * accumulation)
        held, planned = engine.held_bytes(), engine.planned_bytes()
        assert (held.masters, held.states, held.parameters) == (planned.masters, planned.states, planned.parameters)
        engine.destroy()
    return traces


@pytest.mark.parametrize("world", [1, 3, more(2), more(4)])
@pytest.mark.parametrize("formats", [more("int8"), more("split"), "int8, split", "int8, 8 bits", "bf16"])
def test_stages_are_bit_equal(on_ranks, world, formats):
    results = on_ranks(world, run_stages, FORMATS[formats], 1, "bf16", {})
    for traces in results:
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"
        assert first_difference(traces[3].weights, results[0][3].weights) is None


@pytest.mark.parametrize(("dtype", "accumulation", "zero"), [
    ("fp32", 2, {}), more("fp16", 1, {}), more("bf16", 2, {"stage3_param_persistence_threshold": 1000}),
])  # fmt: skip
def test_stages_are_bit_equal_in_other_settings(on_ranks, dtype, accumulation, zero):
    for traces in on_ranks(2, run_stages, INT8, accumulation, dtype, zero):
        for stage, other in ((1, 0), (3, 2)):
            assert first_difference(traces[stage], traces[other]) is None, f"stage {stage} beside stage {other}"


def run_tiers(
    formats: dict[str, Any], folder: str, accumulation: int, optimizer: dict[str, Any], left_out: tuple[str, ...] = ()
) -> list[str]:
    """In words, where states and parameters in one tier differ from another, or from what is planned."""
    disk = {"device": "nvme", "nvme_path": folder}
    tiers: dict[str, dict[str, Any]] = {
        "device": {"stage": 2},
        "host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "half": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "host and parameters": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}
        },
        "disk": {"stage": 3, "offload_optimizer": {**disk, "buffer_size": 4096}},
        "all on disk": {"stage": 3, "offload_optimizer": disk, "offload_param": disk},
        "parameters on disk": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": disk},
    }  # fmt: skip
    told, first = [], None
    for name, zero in tiers.items():
        extra = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision("bf16")}
        engine = start(net(), config(2, onefold=formats, zero_optimization=zero, optimizer=optimizer, **extra))
        trace = train(engine, 3 * accumulation)
        first = first or (trace if name not in left_out else None)
        if name not in left_out and (difference := first_difference(trace, first)):
            told.append(f"{name}: {difference}")
        engine.optimizer.sharded.wait_for_host()
        before = engine.ledger.copy()
        train(engine, accumulation)
        engine.optimizer.sharded.wait_for_host()
        planned = engine.planned_crossing()
        moved = {row.operation: row.bytes for row in engine.ledger.since(before).rows()}
        crossed = {way: moved.get(way, 0) for way in ("down", "read", "write")}
        if crossed != {"down": planned.down, "read": planned.read, "write": planned.written}:
            told.append(f"{name}: {crossed} moved, planned {planned}")
        for tier in onefold.plan.Tier:
            held, plan = engine.held_bytes(tier), engine.planned_bytes(tier)
            if (held.masters, held.states, held.parameters) != (plan.masters, plan.states, plan.parameters):
                told.append(f"{name}: on {tier.value} {held}, planned {plan}")
        engine.destroy()
    return told


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
OTHERS = {
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "amsgrad": {"type": "Adam", "params": {"lr": 1e-2, "amsgrad": True}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2}},
}


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize(("formats", "accumulation"), [
    ("int8", 1), more("split", 1), ("int8, split", 1), more("int8, 8 bits", 1), ("bf16", 1), more("int8, split", 2),
])  # fmt: skip
def test_every_tier_is_bit_equal_and_as_planned(on_ranks, tmp_path, world, formats, accumulation):
    for told in on_ranks(world, run_tiers, FORMATS[formats], str(tmp_path), accumulation, ADAMW):
        assert told == []
