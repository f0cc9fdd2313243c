"""Masters and states in fewer bytes: what each form holds, the same bits in every stage and tier, and planned bytes."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    Net,
    Trace,
    batches,
    config,
    first_difference,
    more,
    net,
    precision,
    start,
    tiers_of,
    train,
    weights_of,
)

import onefold
from onefold.config import ConfigError, load_config
from onefold.offload import state_codec
from onefold.offload.buffer import Buffer
from onefold.offload.state_codec import TINY, Dither, decode, encode
from onefold.optim import pipeline
from onefold.plan import make_plan
from onefold.plan.state_formats import BF16_STOCHASTIC, BLOCK, INT8, INT8_SQUARES, SPLIT_8, SPLIT_16, StateFormat
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

# Of these models even the matrices are small.
INT8_CONFIG = {"state_dtype": "int8", "int8_min_numel": 256}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": INT8_CONFIG,
    "split": {"master_dtype": "bf16_int16"},
    "int8, split": {**INT8_CONFIG, "master_dtype": "bf16_int16"},
    "int8, 8 bits": {**INT8_CONFIG, "master_dtype": "bf16_int8"},
    "bf16": {"state_dtype": "bf16", "master_dtype": "bf16"},
}


# -- what each form holds ----------------------------------------------------------------------------------------------


def room(form: StateFormat, numel: int) -> list[torch.Tensor]:
    return [torch.zeros(part.numel(numel), dtype=part.dtype) for part in form.parts]


def through(form: StateFormat, values: torch.Tensor, dither: Dither | None = None) -> torch.Tensor:
    parts = room(form, values.numel())
    encode(form, values, parts, dither)
    decode(form, parts, out := torch.empty_like(values))
    return out


def spread(numel: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(numel, generator=generator) * 3
    return torch.randn(numel, generator=generator) * exponents.exp()


@pytest.mark.parametrize("form", [INT8, INT8_SQUARES, SPLIT_16, SPLIT_8, BF16_STOCHASTIC], ids=lambda form: form.name)
@given(st.integers(0, 10_000), st.integers(-80, 80))
@settings(max_examples=20, deadline=None)
def test_what_was_decoded_is_encoded_to_the_same_bytes(form: StateFormat, seed: int, exponent: int) -> None:
    values = spread(2 * BLOCK, seed).ldexp(torch.tensor(exponent))
    values = (
        values.square()
        if form is INT8_SQUARES and abs(exponent) < 40
        else values.abs()
        if form is INT8_SQUARES
        else values
    )
    once = room(form, values.numel())
    encode(form, values, once)
    decode(form, once, out := torch.empty_like(values))
    again = room(form, values.numel())
    encode(form, out, again, Dither(3, "weight", 0))
    assert first_difference(again, once) is None


@pytest.mark.parametrize(
    ("form", "codes"), [(INT8, range(-127, 128)), (INT8_SQUARES, range(1, 256))], ids=["signed", "squares"]
)
def test_every_code_comes_back(form: StateFormat, codes: range) -> None:
    parts = room(form, BLOCK)
    parts[0].fill_(codes[-1])
    parts[0][: len(codes)] = torch.tensor(list(codes), dtype=parts[0].dtype)
    for scale in (1.0, 3.7e-9, 8e24, TINY):
        parts[1].fill_(scale)
        decode(form, parts, values := torch.empty(BLOCK))
        again = room(form, BLOCK)
        encode(form, values, again)
        assert first_difference(again, parts) is None
        assert values.isfinite().all()
        assert values.max() == torch.tensor(scale)


@pytest.mark.parametrize(("form", "top", "power"), [(INT8, 127, 2), (INT8_SQUARES, 255, 4)], ids=["signed", "squares"])
def test_bytes_are_as_close_as_roots_can_be(form: StateFormat, top: int, power: int) -> None:
    values = torch.logspace(-3 * power, 0, 8 * BLOCK).view(BLOCK, 8).t().flatten()  # each block has all magnitudes
    if form is INT8:
        values = values * torch.tensor([1.0, -1.0]).repeat(4 * BLOCK)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()
    codes = (values.abs() / largest) ** (1 / power) * top
    steps = ((codes + 0.5) / codes) ** power - 1
    errors = ((through(form, values) - values) / values).abs()
    assert (errors <= steps * 1.001)[codes > 1].all()
    assert errors[codes > top / 4].max() < 0.07


def test_squares_beside_others_never_become_zero() -> None:
    values = torch.zeros(2 * BLOCK)
    values[0], values[1] = 1.0, 1e-30
    found = through(INT8_SQUARES, values)
    assert found[0] == 1.0
    assert (found[1:BLOCK] == torch.tensor(1 / 255).square().square()).all()
    assert not found[BLOCK:].any(), "a block of zeros"


@pytest.mark.parametrize("form", [INT8, INT8_SQUARES], ids=["signed", "squares"])
def test_a_block_with_what_is_not_finite_is_nan_and_its_neighbours_are_not(form: StateFormat) -> None:
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
    is_tie, upper_is_even = (before & 0xFFFF) == 0x8000, (before & 0x10000) != 0
    moved = torch.where(is_tie, torch.where(upper_is_even, 1, -1), 0)
    assert is_tie[:2].all()
    assert torch.equal(before + moved, after), "towards the weight"
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
    whole = through(BF16_STOCHASTIC, values, Dither(4, "weight", 0))
    assert set(whole.tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs(whole.mean().item() - values[0].item()) < 3e-5
    cut = 5 * BLOCK
    parts = [through(BF16_STOCHASTIC, values[:cut], Dither(4, "weight", 0))]
    parts.append(through(BF16_STOCHASTIC, values[cut:], Dither(4, "weight", cut)))
    assert torch.equal(torch.cat(parts), whole), "however it is cut"
    for other in (Dither(5, "weight", 0), Dither(4, "bias", 0), Dither(4, "weight", 0, "exp_avg")):
        assert 0.35 < (through(BF16_STOCHASTIC, values, other) != whole).float().mean() < 0.5
    exact = spread(BLOCK).bfloat16().float()
    assert torch.equal(through(BF16_STOCHASTIC, exact, Dither(1, "weight", 0)), exact)
    assert through(BF16_STOCHASTIC, torch.tensor([torch.inf, -torch.inf, torch.nan] + [0.0] * 5)).isfinite().sum() == 5


def test_whatever_torch_s_default_dtype_is() -> None:
    values = spread(2 * BLOCK)
    wanted = [through(form, values.abs()) for form in (INT8, INT8_SQUARES, SPLIT_16, SPLIT_8)]
    state_codec._of_thread.memory.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [through(form, values.abs()) for form in (INT8, INT8_SQUARES, SPLIT_16, SPLIT_8)]
    finally:
        torch.set_default_dtype(torch.float32)
        state_codec._of_thread.memory.clear()
    assert first_difference(found, wanted) is None


def test_a_range_of_encoded_values_may_end_within_a_block() -> None:
    flat = Buffer(room(INT8, 4 * BLOCK), 4 * BLOCK, INT8)
    values = spread(BLOCK + 10)
    flat[BLOCK : 2 * BLOCK + 10].store(values)
    assert (flat.fetch()[BLOCK : 2 * BLOCK + 10] - values).abs().max() < 0.02 * values.abs().max()
    assert not flat.fetch()[2 * BLOCK + 10 :].any()
    assert [part.numel() for part in flat.split(3 * BLOCK)] == [3 * BLOCK, BLOCK]


# -- every stage and tier ----------------------------------------------------------------------------------------------


def run_stages(formats: dict[str, Any], accumulation: int, dtype: str, more_zero: dict[str, Any]) -> dict[int, Trace]:
    traces = {}
    for stage in range(4):
        extra = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.3, **precision(dtype)}
        engine = start(net(), config(stage, onefold=formats, zero_optimization=more_zero, **extra))
        traces[stage] = train(engine, 4 * accumulation)
        held, planned = engine.model_memory.held_bytes(), engine.model_memory.planned_bytes()
        assert (held.masters, held.states, held.parameters) == (planned.masters, planned.states, planned.parameters)
        engine.destroy()
    return traces


@covering(
    formats=("int8, split", "int8, 8 bits", "bf16", more("int8"), more("split")),
    world=(2, 1, 3, more(4)),
    strength=1,
)
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
    for traces in on_ranks(2, run_stages, INT8_CONFIG, accumulation, dtype, zero):
        for stage, other in ((1, 0), (3, 2)):
            assert first_difference(traces[stage], traces[other]) is None, f"stage {stage} beside stage {other}"


def run_tiers(
    formats: dict[str, Any], folder: str, accumulation: int, optimizer: dict[str, Any], left_out: tuple[str, ...] = ()
) -> list[str]:
    """In words, where states and parameters in one tier differ from another, or from what is planned."""
    on_disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    parameters = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": on_disk}
    told, first = [], None
    for name, zero in {**tiers_of(folder), "parameters on disk": parameters}.items():
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
        planned = engine.model_memory.planned_offload_traffic()
        moved = {row.operation: row.bytes for row in engine.ledger.since(before).rows()}
        crossed = {way: moved.get(way, 0) for way in ("down", "write")}
        expected = {"down": planned.down, "write": planned.written}
        # What the program keeps unsharded saves a gather.
        if zero["stage"] < 3:
            crossed["up"], expected["up"] = moved.get("up", 0), planned.up
        if zero.get("offload_param", {}).get("device") != "nvme":
            crossed["read"], expected["read"] = moved.get("read", 0), planned.read
        if crossed != expected:
            told.append(f"{name}: {crossed} moved, planned {expected}")
        for tier in onefold.plan.Tier:
            held, plan = engine.model_memory.held_bytes(tier), engine.model_memory.planned_bytes(tier)
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
    "shampoo": {"type": "Shampoo", "params": {"lr": 1e-2}},
}


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize(("formats", "accumulation"), [
    ("int8, split", 1), more("int8", 1), more("split", 1), more("int8, 8 bits", 1), more("bf16", 1),
    more("int8, split", 2),
])  # fmt: skip
def test_every_tier_is_bit_equal_and_as_planned(on_ranks, tmp_path, world, formats, accumulation):
    for told in on_ranks(world, run_tiers, FORMATS[formats], str(tmp_path), accumulation, ADAMW):
        assert told == []


@pytest.mark.parametrize(
    "optimizer", [more("lion"), more("sgd"), more("adagrad"), more("amsgrad"), more("shampoo"), "muon"]
)
def test_other_optimizers_too(on_ranks, tmp_path, optimizer):
    for told in on_ranks(2, run_tiers, FORMATS["int8, split"], str(tmp_path), 1, OTHERS[optimizer]):
        assert told == []


def run_wires(zero: dict[str, Any]) -> Trace:
    settings = config(3, onefold=FORMATS["int8, 8 bits"], zero_optimization=zero, **precision("bf16"))
    return train(start(net(), settings), 3)


@pytest.mark.parametrize("zero", [{"zero_hpz_partition_size": 2}, more({"mics_shard_size": 2})], ids=["hpZ", "MiCS"])
def test_secondary_shards_and_replica_groups_go_with_them(on_ranks, zero):
    plain, found = on_ranks(4, run_wires, {}), on_ranks(4, run_wires, zero)
    assert [first_difference(*pair) for pair in zip(found, plain, strict=True)] == [None] * 4


def tiles_of(size: int) -> dict[str, torch.Tensor]:
    """A run whose tiles have so many elements."""
    pipeline.host_tile, before = (lambda: size), pipeline.host_tile
    try:
        engine = start(net(width=64), config(2, onefold=FORMATS["bf16"], **precision("bf16")))
        return train(engine, 3).weights
    finally:
        pipeline.host_tile = before


def test_dithered_tiles_of_any_size_give_the_same_bits(on_ranks):
    assert first_difference(on_ranks(1, tiles_of, 512), on_ranks(1, tiles_of, 1 << 18)) is None


# -- beside plain torch ------------------------------------------------------------------------------------------------


class Reference:
    """AdamW by torch's fused kernel on fp32 masters, each rounded by its form after every step, in plain torch."""

    def __init__(self, model: torch.nn.Module, masters: StateFormat | None, *, int8: bool) -> None:
        self.parameters = list(model.parameters())
        self.forms = {
            "master": masters,
            "exp_avg": INT8 if int8 else None,
            "exp_avg_sq": INT8_SQUARES if int8 else None,
        }
        self.held = [{"master": padded(p.detach().float())} for p in self.parameters]
        for held in self.held:
            held |= {name: torch.zeros_like(held["master"]) for name in ("exp_avg", "exp_avg_sq")}
        self.number = 0

    @torch.no_grad()
    def step(self) -> None:
        self.number += 1
        for parameter, held in zip(self.parameters, self.held, strict=True):
            gradient = padded(parameter.grad.float())
            numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
            torch._fused_adamw_(
                [held["master"]], [gradient], [held["exp_avg"]], [held["exp_avg_sq"]], [],
                [torch.tensor(float(self.number))], **numbers, amsgrad=False, maximize=False,
            )  # fmt: skip
            for name, form in self.forms.items():
                small = form in (INT8, INT8_SQUARES) and parameter.numel() < INT8_CONFIG["int8_min_numel"]
                if form is not None and not small:
                    held[name] = through(form, held[name])
            parameter.copy_(held["master"][: parameter.numel()].view(parameter.shape))
            parameter.grad = None


def padded(values: torch.Tensor) -> torch.Tensor:
    """In whole blocks, so that vector kernels meet no tail."""
    found = torch.zeros(-(-values.numel() // BLOCK) * BLOCK)
    found[: values.numel()] = values.flatten()
    return found


def beside_torch(stage: int, formats: dict[str, Any]) -> str | None:
    torch.manual_seed(3)
    model, plain = Net(width=64), Net(width=64)
    plain.load_state_dict(model.state_dict())
    plain.bfloat16()
    masters = {"bf16_int16": SPLIT_16, "bf16_int8": SPLIT_8}.get(formats.get("master_dtype", ""))
    reference = Reference(plain, masters, int8="state_dtype" in formats)
    engine = start(model, config(stage, onefold=formats, **precision("bf16")))
    for x, y in batches(6):
        engine.backward(engine(x, y))
        engine.step()
        plain(x, y).backward()
        reference.step()
    return first_difference(
        {n: w for n, w in weights_of(engine.module).items() if n != "scale"},
        {n: w for n, w in weights_of(plain).items() if n != "scale"},
    )


@covering(stage=(0, 2, 3), formats=("int8", "split", "int8, 8 bits"), strength=1)
def test_it_is_torchs_adamw_with_values_rounded_between_steps(on_ranks, stage, formats):
    assert on_ranks(1, beside_torch, stage, FORMATS[formats]) == [None]


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_a_parameter(stage: int, formats: dict[str, Any], more_config: dict[str, Any]) -> dict[str, float]:
    engine = start(net(width=256, depth=1), config(stage, onefold=formats, **precision("bf16"), **more_config))
    for x, y in batches(1):
        engine.backward(engine(x, y))
    held, planned = engine.model_memory.held_bytes(), engine.model_memory.planned_bytes()
    assert (held.total, held.gradients) == (planned.total, planned.gradients)
    total = sum(param.layout.total for unit in engine.state.schedule.units for param in unit.params)
    kinds = ("parameters", "gradients", "masters", "states")
    return {kind: getattr(held, kind) / total for kind in kinds} | {"all": held.total / total}


def test_eight_bytes_a_parameter_and_seven(on_ranks):
    """On one rank: 2 of weights, 2 of gradients, 2 or 1 beside the weight, 2 of moments, and their scales."""
    formats = {"state_dtype": "int8", "master_dtype": "bf16_int16"}
    for stage in (0, 2, 3):
        found = on_ranks(1, bytes_a_parameter, stage, formats, {})[0]
        assert found["all"] == pytest.approx(8, rel=0.02), stage
        found = on_ranks(1, bytes_a_parameter, stage, {**formats, "master_dtype": "bf16_int8"}, {})[0]
        assert found["all"] == pytest.approx(7, rel=0.02), stage
        assert found["masters"] == 1
    plain = on_ranks(1, bytes_a_parameter, 2, {}, {})[0]
    assert plain["all"] == 2 + 2 + 4 + 8


def test_bf16_masters_are_the_weights(on_ranks):
    both = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    for world in (1, 2):
        found = on_ranks(world, whole_bf16, both)[0]
        assert found == {"masters": 0, "states": 4 / world, "gradients": 2 / world, "parameters": 2}


def whole_bf16(given: dict[str, Any]) -> dict[str, float]:
    engine = start(net(width=256, depth=1), config(2, **given))
    for x, y in batches(1):
        engine.backward(engine(x, y))
    held = engine.model_memory.held_bytes()
    total = sum(param.layout.total for unit in engine.state.schedule.units for param in unit.params)
    return {kind: getattr(held, kind) / total for kind in ("masters", "states", "gradients", "parameters")}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def states_of(engine: onefold.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {state}"] = safe_get_full_optimizer_state(parameter, state)
    return found


def save(folder: str, stage: int, formats: dict[str, Any], zero: dict[str, Any]) -> tuple[Trace, dict[str, Any]]:
    settings = config(stage, onefold=formats, zero_optimization=zero, checkpoint={"async_save": True})
    engine = start(net(), {**settings, **precision("bf16")})
    train(engine, 3)
    engine.save_checkpoint(folder)
    held = states_of(engine)
    return train(engine, 2, seed=1), held


def load(
    folder: str, stage: int, formats: dict[str, Any], zero: dict[str, Any], caplog: Any = None
) -> tuple[Trace, dict[str, Any], list[str]]:
    engine = start(net(seed=9), config(stage, onefold=formats, zero_optimization=zero, **precision("bf16")))
    told: list[str] = []
    handler = _Keeping(told)
    logging.getLogger("onefold").addHandler(handler)
    engine.load_checkpoint(folder)
    logging.getLogger("onefold").removeHandler(handler)
    held = states_of(engine)
    return train(engine, 2, seed=1), held, [line for line in told if "rounded" in line]


class _Keeping(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@covering(formats=("int8, split", more("bf16"), more("int8"), more("split"), more("int8, 8 bits")))
def test_a_run_goes_on_as_it_was_in_any_stage_and_tier(on_ranks, tmp_path, formats):
    ends, held = zip(*on_ranks(2, save, str(tmp_path), 2, FORMATS[formats], {}), strict=True)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    for stage, zero in ((2, {}), (0, {}), (3, HOST), (3, disk)):
        results = on_ranks(2, load, str(tmp_path), stage, FORMATS[formats], zero)
        for (trace, found, told), end in zip(results, ends, strict=True):
            assert told == []
            assert first_difference(found, held[0]) is None
            assert first_difference(trace, end) is None, f"stage {stage}"


def save_beside_training(folder: str, formats: dict[str, Any]) -> tuple[int, int]:
    """A save in the background, with steps beside it, and one in the foreground of the same moment: bytes that were
    copied for the first, and bytes that this rank holds of masters and states.
    """
    engine = start(net(width=128), config(2, onefold=formats, **precision("bf16")))
    train(engine, 2)
    engine.save_checkpoint(f"{folder}/waits")
    engine.save_checkpoint(f"{folder}/beside", background=True)
    staged = engine._saver.coordinator._staging._memory.numel()
    stores = engine.state.step.stores
    held = sum(buffer.nbytes for store in stores for buffer in (store.master, *store.states.values()))
    train(engine, 2, seed=4)
    engine.destroy()
    return staged, held


def load_both(folder: str, formats: dict[str, Any]) -> str | None:
    found = []
    for name in ("waits", "beside"):
        engine = start(net(seed=3, width=128), config(2, onefold=formats, **precision("bf16")))
        engine.load_checkpoint(f"{folder}/{name}")
        found.append(train(engine, 2))
        engine.destroy()
    return first_difference(*found)


@pytest.mark.parametrize("formats", ["int8, split", more("int8, 8 bits"), more("bf16")])
def test_a_save_beside_training_copies_what_is_held(on_ranks, tmp_path, formats):
    for staged, held in on_ranks(2, save_beside_training, str(tmp_path), FORMATS[formats]):
        assert staged < held + 10_000, "what is held, and random states"
    assert on_ranks(2, load_both, str(tmp_path), FORMATS[formats]) == [None, None]


def test_states_reshape_to_other_ranks(on_ranks, tmp_path):
    _, held = on_ranks(3, save, str(tmp_path), 3, FORMATS["int8, 8 bits"], {})[0]
    for world in (1, 2):
        for _, found, told in on_ranks(world, load, str(tmp_path), 2, FORMATS["int8, 8 bits"], {}):
            assert told == []
            assert first_difference(found, held) is None


@pytest.mark.parametrize(("saved", "loaded", "lossless"), [
    ("fp32", "int8", False), more("int8", "fp32", True), ("int8, 8 bits", "int8, split", True),
    more("split", "fp32", True),
    more("bf16", "fp32", True), more("bf16", "split", True), more("fp32", "bf16", False), more("split", "int8", False),
])  # fmt: skip
def test_checkpoints_go_from_any_form_to_any_other(on_ranks, tmp_path, saved, loaded, lossless):
    formats = {"fp32": {}, **FORMATS}
    _, held = on_ranks(2, save, str(tmp_path), 2, formats[saved], {})[0]
    results = on_ranks(2, load, str(tmp_path), 2, formats[loaded], {})
    for rank, (trace, found, told) in enumerate(results):
        assert (first_difference(found, held) is None) == lossless
        assert len(told) == (0 if lossless or rank else 1), told
        for name, values in held.items():
            assert torch.allclose(found[name], values, rtol=0.2, atol=0.05 * values.abs().max().item()), name
        assert all(loss == loss for loss in trace.losses)
    if not lossless:
        assert f"states as {formats[loaded].get('state_dtype', 'fp32')}" in results[0][2][0]


# -- from outside ------------------------------------------------------------------------------------------------------


def look_and_set(stage: int, formats: dict[str, Any], zero: dict[str, Any]) -> list[str]:
    """Masters and states are read and set as fp32 tensors, whatever they are held in."""
    engine = start(net(), config(stage, onefold=formats, zero_optimization=zero, **precision("bf16")))
    train(engine, 2)
    parameter = engine.module.blocks[1].up.weight
    master = safe_get_full_fp32_param(parameter)
    told = []
    if not torch.equal(master.bfloat16().float(), weights_of(engine.module)["blocks.1.up.weight"].float()):
        told.append("the weight is not the rounding of its master")
    safe_set_full_fp32_param(parameter, torch.full_like(master, 0.25))
    if not (safe_get_full_fp32_param(parameter) == 0.25).all():
        told.append("the master is not what was set")
    if not (weights_of(engine.module)["blocks.1.up.weight"] == 0.25).all():
        told.append("the weight is not what was set")
    safe_set_full_optimizer_state(parameter, torch.full_like(master, 2.0**-30), "exp_avg")
    if not (safe_get_full_optimizer_state(parameter, "exp_avg") == 2.0**-30).all():
        told.append("the state is not what was set")
    with onefold.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.fill_(-0.5)
    if not (safe_get_full_fp32_param(parameter) == -0.5).all():
        told.append("the master is not what was written to the weight")
    if stage < 3:
        with torch.no_grad():
            parameter.zero_()
        train(engine, 1)
        if not (weights_of(engine.module)["blocks.1.up.weight"].abs() < 0.05).all():
            told.append("what was written did not reach the master")
    train(engine, 1)
    return told


@pytest.mark.parametrize("formats", ["int8, split", more("int8, 8 bits"), more("bf16")])
@pytest.mark.parametrize(
    ("stage", "zero"), [(2, {}), (3, {}), more(3, HOST), more(1, {"offload_optimizer": HOST["offload_optimizer"]})]
)
def test_masters_and_states_are_read_and_set_as_fp32(on_ranks, formats, stage, zero):
    for told in on_ranks(2, look_and_set, stage, FORMATS[formats], zero):
        assert told == []


def park(stage: int, formats: dict[str, Any]) -> str | None:
    traces = []
    for parks in (False, True):
        engine = start(net(), config(stage, onefold=formats, **precision("bf16")))
        train(engine, 2)
        if parks:
            engine.offload_states()
            engine.reload_states()
        traces.append(train(engine, 2))
        engine.destroy()
    return first_difference(*traces)


@covering(stage=(3, more(2)))
def test_states_may_leave_the_device_for_a_while(on_ranks, stage):
    assert on_ranks(2, park, stage, FORMATS["int8, split"]) == [None, None]


# -- who gets which form -----------------------------------------------------------------------------------------------


def forms_of(given: dict[str, Any], optimizer: str = "", **shape: Any) -> dict[str, tuple[str, ...]]:
    model = net(**shape)
    handed: dict[str, Any] = {}
    if optimizer:
        import bitsandbytes

        handed["optimizer"] = getattr(bitsandbytes.optim, optimizer)(model.parameters(), lr=1e-2, weight_decay=0.1)
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(model.embed, "weight", {"optim_bits": 32})
    engine = start(model, {**config(2), **given}, **handed)
    train(engine, 2)
    found = {}
    for store in engine.state.step.stores:
        for member in store.spec.layout.members:
            forms = store.spec.state_spec.formats or (None,) * len(store.spec.state_spec.names)
            found[member.name] = tuple(form.name if form else "fp32" for form in forms)
    return found


BYTES = (INT8.name, INT8_SQUARES.name)
FP32 = ("fp32", "fp32")


def test_small_parameters_and_named_ones_keep_fp32(on_ranks):
    own = {"state_dtype": "int8", "fp32_state_names": ["*head*"]}
    for world in (1, 3):  # by the parameter's size, and not by that of a shard
        found = on_ranks(world, forms_of, {"onefold": own}, width=64)[0]
        assert found["blocks.0.up.weight"] == BYTES
        assert found["head.weight"] == found["embed.weight"] == found["blocks.0.up.bias"] == FP32
    assert on_ranks(1, forms_of, {"onefold": {**own, "int8_min_numel": 0}})[0]["blocks.0.norm.bias"] == BYTES


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "AdamW8bit", "adamw_bnb_8bit"])
def test_names_of_others_in_a_config(on_ranks, name):
    found = on_ranks(1, forms_of, {"optimizer": {"type": name, "params": {"lr": 1e-2}}}, width=64)[0]
    assert found["blocks.0.up.weight"] == BYTES
    assert found["blocks.0.up.bias"] == FP32


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW32bit"])
def test_classes_of_bitsandbytes_are_taken_as_ours(on_ranks, name):
    pytest.importorskip("bitsandbytes")
    own = {"fp32_state_names": ["*head*"]} if "8bit" in name else {}
    found = on_ranks(1, forms_of, {"optimizer": None, "onefold": own}, name, width=256)[0]
    wanted = BYTES[: 1 if "Lion" in name else 2] if "8bit" in name else FP32
    assert found["blocks.0.up.weight"] == wanted
    assert set(found["embed.weight"]) == {"fp32"}, "as its manager was told"
    assert set(found["head.weight"]) == {"fp32"}, "as the config says"


def handed_in(given: dict[str, Any]) -> Any:
    """A torch optimizer that is handed in leaves the config's section unread, its name with it."""
    model = net(width=64)
    engine = start(model, {**config(2), **given}, optimizer=torch.optim.AdamW(model.parameters()))
    return engine.plan.formats.states


def test_the_name_of_an_optimizer_that_is_not_built_says_nothing(on_ranks):
    assert on_ranks(1, handed_in, {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3}}}) == ["fp32"]


def test_switches_of_bf16_count_where_it_is_on() -> None:
    off = {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    for more_keys in ({}, {"fp16": {"enabled": True}}):
        found = load_config({"zero_optimization": {"stage": 1}, **off, **more_keys})
        plan = make_plan(found, 1)
        assert plan.formats.are_plain
        assert plan.precision.accumulate is torch.float32
        assert any("bf16_optimizer_states" in line for line in found.notices)


def of_bitsandbytes(given: dict[str, Any], key: str, value: Any) -> str:
    import bitsandbytes

    model = net(width=64)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    if key:
        manager.override_config(model.blocks[0].up.weight, key, value)
    try:
        engine = start(model, {**config(2), "optimizer": None, **given}, optimizer=optimizer)
    except ConfigError as error:
        return str(error)
    finally:
        manager.pid2config.clear()
    forms = {m.name: s.spec.state_spec.formats for s in engine.state.step.stores for m in s.spec.layout.members}
    return str(forms["blocks.0.up.weight"])


def test_what_an_8bit_instance_says_is_kept_or_refused(on_ranks):
    pytest.importorskip("bitsandbytes")
    assert on_ranks(1, of_bitsandbytes, {}, "optim_bits", 32) == ["()"]
    assert "only optim_bits = 32 is supported" in on_ranks(1, of_bitsandbytes, {}, "lr", 1.0)[0]
    told = on_ranks(1, of_bitsandbytes, {"onefold": {"state_dtype": "bf16"}}, "", None)[0]
    assert "AdamW8bit keeps 8-bit states" in told
    told = on_ranks(1, of_bitsandbytes, {"onefold": {"int8_min_numel": 7}}, "", None)[0]
    assert "onefold.int8_min_numel = 7" in told


def of_torchao(name: str, arguments: dict[str, Any]) -> str:
    from torchao import optim

    model = net(width=64)
    try:
        engine = start(
            model, config(2, optimizer=None), optimizer=getattr(optim, name)(model.parameters(), **arguments)
        )
    except ConfigError as error:
        return str(error)
    return f"{engine.plan.formats.states}, decoupled {engine.optimizer.param_groups[0]['decoupled_weight_decay']}"


@pytest.mark.parametrize(("name", "arguments", "told"), [
    ("AdamW8bit", {}, "int8, decoupled True"), ("Adam8bit", {}, "int8, decoupled False"),
    ("AdamW4bit", {}, "only its Adam, AdamW and Lion"), ("AdamW8bit", {"block_size": 128}, "block_size = 128"),
    ("AdamW8bit", {"bf16_stochastic_round": True}, "onefold.master_dtype to bf16"),
])  # fmt: skip
def test_classes_of_torchao_are_taken_as_ours_or_refused(own_ranks, name, arguments, told):
    pytest.importorskip("torchao")
    assert told in own_ranks(1, of_torchao, name, arguments)[0]


def save_without_elements(folder: str) -> bool:
    model = net()
    model.nothing = torch.nn.Parameter(torch.empty(0))
    settings = config(2, onefold=FORMATS["int8, split"], checkpoint={"async_save": True}, **precision("bf16"))
    engine = start(model, settings)
    train(engine, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    return True


def test_a_parameter_without_elements_is_saved(on_ranks, tmp_path):
    assert on_ranks(2, save_without_elements, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(("given", "told"), [
    ({"onefold": {"master_dtype": "bf16_int8"}}, "onefold.master_dtype = bf16_int8 needs bf16 weights"),
    ({"onefold": {"master_dtype": "bf16_int8"}, "fp16": {"enabled": True}}, "needs bf16 weights"),
    ({"optimizer": {"type": "adamw_8bit"}, "onefold": {"state_dtype": "bf16"}}, "adamw_8bit selects 8-bit states"),
    ({"optimizer": {"type": "adamw_8bit"}, "onefold": {"state_dtype": "fp32"}}, "adamw_8bit selects 8-bit states"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "onefold": {"master_dtype": "bf16_int8"}},
     "bf16_master_weights_and_grads and onefold.master_dtype = bf16_int8 differ"),
])  # fmt: skip
def test_contradictions_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"zero_optimization": {"stage": 1}, **given})


def refusal(given: dict[str, Any], own: str = "") -> str:
    model = net()
    handed = {"optimizer": getattr(torch.optim, own)(model.parameters())} if own else {}
    try:
        start(model, {**config(2), **given}, **handed)
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def test_refusals_name_key_and_way_out(on_ranks):
    told = on_ranks(1, refusal, {"onefold": INT8_CONFIG, "optimizer": None}, "NAdam")[0]
    assert "onefold.state_dtype = int8" in told
    assert "optimizer NAdam steps by its own class" in told
    told = on_ranks(1, refusal, {"onefold": {**INT8_CONFIG, "fp32_state_names": ["*nothing*"]}})[0]
    assert "onefold.fp32_state_names: '*nothing*' matches no parameter" in told


def as_deepspeed_shows_it() -> list[str]:
    from onefold.compat import deepspeed

    model, told = net(), []
    settings = {"log_level": "warning", **config(2, onefold=FORMATS["int8, split"], **precision("bf16"))}
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    train(engine, 2)
    masters = optimizer.fp32_partitioned_groups_flat
    if [state["exp_avg"].dtype for state in (optimizer.state[master] for master in masters)] != [torch.float32] * len(
        masters
    ):
        told.append("masters are no keys of their states")
    if len(optimizer.state) != len(masters):
        told.append("states are hidden")
    shown = optimizer.state_dict()
    if not all(isinstance(master, torch.Tensor) for master in shown["single_partition_of_fp32_groups"]):
        told.append("a state dict has something else than tensors")
    train(engine, 1)
    if any(torch.equal(*pair) for pair in zip(masters, optimizer.fp32_partitioned_groups_flat, strict=True)):
        told.append("masters of the step before are shown")
    return told


def test_deepspeeds_names_show_fp32_tensors(on_ranks):
    assert on_ranks(1, as_deepspeed_shows_it) == [[]]


def freeze_at_once(stage: int, formats: dict[str, Any], zero: dict[str, Any]) -> Trace:
    """A parameter is frozen right after a step that the host may still be at."""
    model = net(width=64)
    engine = start(model, config(stage, onefold=formats, zero_optimization=zero, **precision("bf16")))
    train(engine, 1)
    for number in range(4):
        (x, y), *_ = batches(1, seed=number)
        engine.backward(engine(x, y))
        if (memory := engine.state.schedule.memory) is not None:
            memory.worker.submit(time.sleep, 0.1)  # the host begins later
        engine.step()
        weight = model.blocks[number % 3].up.weight  # reading engine.module would wait for the step
        weight.requires_grad = number % 2 == 1
    return train(engine, 1)


def test_what_is_frozen_after_a_step_was_in_it(on_ranks):
    for formats in ({}, FORMATS["int8, split"]):
        wanted = on_ranks(2, freeze_at_once, 2, formats, {})
        found = on_ranks(2, freeze_at_once, 3, formats, {"offload_optimizer": {"device": "cpu"}})
        assert [first_difference(*pair) for pair in zip(found, wanted, strict=True)] == [None, None]
