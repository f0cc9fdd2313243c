"""Masters and states in fewer bytes on a GPU: kernels as specified, the same bits in every stage and tier."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Trace, batches, config, first_difference, net, precision, start, train
from test_offload_cases import holding_nothing, over_tiers
from test_states import ADAMW, FORMATS, OTHERS, run_stages, run_tiers, spread

from onefold.offload import state_codec
from onefold.offload.buffer import Buffer
from onefold.offload.state_codec import Dither
from onefold.optim import gpu_stream, rules
from onefold.optim.rules import MASTER, AdamNumbers, StoredTile
from onefold.plan.state_formats import BF16_STOCHASTIC, BLOCK, INT8, INT8_SQUARES, SPLIT_8, SPLIT_16, StateFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMS = [INT8, INT8_SQUARES, BF16_STOCHASTIC, SPLIT_16, SPLIT_8]


def values_of(form: StateFormat | None, numel: int, seed: int = 0) -> torch.Tensor:
    values = spread(numel, seed).cuda()
    return values.square() if form is INT8_SQUARES else values


def room(form: StateFormat, numel: int) -> list[torch.Tensor]:
    return [torch.zeros(part.numel(numel), dtype=part.dtype, device="cuda") for part in form.parts]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 1001])
def test_kernels_equal_the_specification(form: StateFormat, num_blocks: int) -> None:
    assert state_codec._kernels(torch.empty(1, device="cuda")) is not None
    values = values_of(form, num_blocks * BLOCK, num_blocks)
    values[:BLOCK] = 0 if num_blocks > 1 else values[:BLOCK]
    values[-1] = 1e-38
    for dither in (None, Dither(17, "blocks.0.weight", 12_345), Dither(2**31, "head", 2**31 - 100, "exp_avg")):
        found, wanted, on_host = room(form, values.numel()), room(form, values.numel()), None
        state_codec.encode(form, values, found, dither)
        state_codec.encode_in_torch(form, values, wanted, dither)
        on_host = [part.cpu().zero_() for part in wanted]
        state_codec.encode_in_torch(form, values.cpu(), on_host, dither)
        assert first_difference(found, wanted) is None
        assert first_difference([part.cpu() for part in found], on_host) is None, "a host's are the same"
        state_codec.decode(form, found, one := torch.empty_like(values))
        state_codec.decode_in_torch(form, found, other := torch.empty_like(values))
        assert first_difference([one], [other]) is None


@pytest.mark.parametrize("form", [INT8, INT8_SQUARES], ids=lambda form: form.name)
def test_a_block_with_what_is_not_finite_is_nan(form: StateFormat) -> None:
    for bad in (torch.inf, torch.nan):
        values = torch.ones(20 * BLOCK, device="cuda")
        values[BLOCK + 5] = bad
        state_codec.encode(form, values, parts := room(form, values.numel()))
        state_codec.decode(form, parts, found := torch.empty_like(values))
        assert found.view(-1, BLOCK)[1].isnan().all()
        assert found.isnan().sum() == BLOCK


HELD = {
    "int8": (None, INT8, INT8_SQUARES),
    "int8, split": (SPLIT_16, INT8, INT8_SQUARES),
    "int8, 8 bits": (SPLIT_8, INT8, INT8_SQUARES),
    "bf16": (BF16_STOCHASTIC, BF16_STOCHASTIC, BF16_STOCHASTIC),
    "int8, bf16": (BF16_STOCHASTIC, INT8, INT8_SQUARES),
    "bf16 states": (None, BF16_STOCHASTIC, BF16_STOCHASTIC),
}


def tile_of(forms: tuple[StateFormat | None, ...], numel: int, **more: Any) -> StoredTile:
    held: dict[str, Buffer] = {}
    for name, form in zip((MASTER, "exp_avg", "exp_avg_sq"), forms, strict=True):
        values = values_of(INT8_SQUARES if name == "exp_avg_sq" else form, numel, len(held))
        if form is not None:
            held[name] = Buffer(room(form, numel), numel, form)
            held[name].store(values)
        else:
            held[name] = Buffer.of(values)
    return StoredTile(held, **more)


def parts_of(tile: StoredTile) -> dict[str, Any]:
    return {name: list(buffer.parts) for name, buffer in tile.held.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.0}, {"maximize": True, "eps": 1e-3, "betas": (0.8, 0.999)}])
@pytest.mark.parametrize("factor", [1.0, 0.37, "on the device"])
def test_adamw_in_one_pass_has_the_bits_of_torch(dtype, hyper, factor) -> None:
    """Also with weights that the program has written to, and for a step that the device skips."""
    numel, given = 5_000_001, {"lr": 1.7e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **hyper}
    given |= {"decoupled_weight_decay": True}
    generator = torch.Generator("cuda").manual_seed(1)
    held = [torch.randn(numel, device="cuda", generator=generator), *torch.zeros(2, numel, device="cuda")]
    weights = held[0].to(torch.bfloat16)
    weights[::7] += 1
    expected = [held[0].clone(), *torch.zeros(2, numel, device="cuda")]
    expected[0][::7] = weights[::7].float()  # each of them changed
    coefficient = torch.full((), 0.7, device="cuda") if factor == "on the device" else factor
    buffers = dict(zip((MASTER, "exp_avg", "exp_avg_sq"), map(Buffer.of, held), strict=True))
    skip = torch.ones((), device="cuda")
    for number in (1, 2, 3):
        gradient = torch.randn(numel, device="cuda", generator=generator).to(dtype)
        tile = rules.StoredTile(buffers, gradient, coefficient, None, None, weights, takes_over=True)
        assert rules.AdamRule().apply_stored(tile, given, number)
        assert rules.AdamRule().apply_stored(replace(tile, skip=skip, takes_over=False), given, number)
        scaled = gradient.float() if factor == 1.0 else gradient.float().mul_(coefficient)
        torch._fused_adamw_(
            [expected[0]], [scaled], [expected[1]], [expected[2]], [], [torch.full((), float(number), device="cuda")],
            lr=given["lr"], beta1=given["betas"][0], beta2=given["betas"][1], weight_decay=given["weight_decay"],
            eps=given["eps"], amsgrad=False, maximize=bool(given.get("maximize")),
        )  # fmt: skip
        assert all(map(torch.equal, held, expected))
        assert torch.equal(weights, expected[0].to(torch.bfloat16))


@pytest.mark.parametrize("takes_over", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.37, "on the device"])
def test_adamw_of_several_tiles_has_the_bits_of_one_at_a_time(factor, takes_over) -> None:
    """Tiles of two dtypes, with and without model weights, some at addresses that are not aligned."""
    hyper = {"lr": 1.7e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    generator = torch.Generator("cuda").manual_seed(1)
    coefficient = torch.full((), 0.7, device="cuda") if factor == "on the device" else factor

    def tiles(
        values: torch.Tensor, weights: torch.Tensor, gradients: dict[torch.dtype, torch.Tensor], skip: Any
    ) -> Any:
        cuts = [0, 1, 1000, 70_000, 70_016, 200_000]
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            names = (MASTER, "exp_avg", "exp_avg_sq")
            held = {name: Buffer.of(row[low:high]) for name, row in zip(names, values, strict=True)}
            has_weights = number != 3
            gradient = gradients[torch.float16 if number == 1 else torch.bfloat16][low:high]
            yield rules.StoredTile(
                held, gradient, coefficient, skip, None, weights[low:high] if has_weights else None,
                takes_over and has_weights,
            )  # fmt: skip

    start = torch.stack(
        [torch.randn(200_000, device="cuda", generator=generator), *torch.zeros(2, 200_000, device="cuda")]
    )
    written = start[0].to(torch.bfloat16)
    written[::7] += 1
    states = [(start.clone(), written.clone()) for _ in range(2)]
    for number, skip in enumerate([None, torch.zeros((), device="cuda"), torch.ones((), device="cuda"), None], 1):
        full = torch.randn(200_000, device="cuda", generator=generator)
        gradients = {dtype: full.to(dtype) for dtype in (torch.bfloat16, torch.float16)}
        assert rules.AdamRule().apply_stored_together([*tiles(*states[0], gradients, skip)], hyper, number)
        for tile in tiles(*states[1], gradients, skip):
            assert rules.AdamRule().apply_stored(tile, hyper, number)
        assert all(map(torch.equal, *states))
    assert not torch.equal(states[0][0], start)


@pytest.mark.parametrize("forms", HELD)
@pytest.mark.parametrize("hyper", [{}, {"decoupled_weight_decay": False}, {"maximize": True, "eps": 1e-3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_equals_its_specification(forms: str, hyper: dict[str, Any], dtype: torch.dtype) -> None:
    from onefold.optim import adam_kernels

    numel = 37 * BLOCK
    plain = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    one = tile_of(HELD[forms], numel, gradient=torch.empty(0), coefficient=1.0, skip=None, dither=None)
    other = tile_of(HELD[forms], numel, gradient=torch.empty(0), coefficient=1.0, skip=None, dither=None)
    for step, factor in enumerate([1.0, 0.37, torch.tensor(0.7133, dtype=torch.float64, device="cuda")], 1):
        numbers = AdamNumbers.of({**plain, **hyper}, step)
        gradient = values_of(None, numel, 10 + step).to(dtype)
        dither = Dither(step, "weight", 99) if "bf16" in forms else None
        for tile, work in ((one, adam_kernels.step), (other, adam_kernels.step_in_torch)):
            work(StoredTile(tile.held, gradient, factor, None, dither), numbers)
        assert first_difference(parts_of(one), parts_of(other)) is None, f"step {step}"
    before = {name: [part.clone() for part in parts] for name, parts in parts_of(one).items()}
    for skip in (torch.ones((), device="cuda"), torch.zeros((), device="cuda")):
        adam_kernels.step(StoredTile(one.held, gradient, 1.0, skip, dither), numbers)
        assert (first_difference(parts_of(one), before) is None) == bool(skip)


@pytest.mark.parametrize("takes_over", [False, True])
def test_adam_takes_over_what_was_written_and_leaves_the_weights(takes_over: bool) -> None:
    from onefold.optim import adam_kernels

    numel, hyper = 9 * BLOCK, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    numbers = AdamNumbers.of({**hyper, "decoupled_weight_decay": True}, 1)
    gradient, tiles = values_of(None, numel, 5), []
    for work in (adam_kernels.step, adam_kernels.step_in_torch):
        tile = tile_of(HELD["int8"], numel, gradient=gradient, coefficient=1.0)
        for name in ("exp_avg", "exp_avg_sq"):
            tile.held[name].store(torch.zeros(numel, device="cuda"))
        weights = tile.held[MASTER].tensor.bfloat16()
        weights[::7] = 0.125
        tiles.append(StoredTile(tile.held, gradient, 1.0, weights=weights, takes_over=takes_over))
        work(tiles[-1], numbers)
        assert torch.equal(weights, tile.held[MASTER].tensor.bfloat16())
        assert ((tile.held[MASTER].tensor[::7] - 0.125).abs() < 0.05).all() == takes_over
    assert first_difference(parts_of(tiles[0]), parts_of(tiles[1])) is None


@pytest.mark.parametrize("formats", ["int8", "int8, split"])
def test_an_engine_uses_the_kernel(on_nccl_ranks, formats):
    assert on_nccl_ranks(1, kernel_runs, formats) == [True]


def kernel_runs(formats: str) -> bool:
    calls = []
    kernels = rules._kernels(torch.empty(1, device="cuda"))
    step = kernels.step
    kernels.step = lambda *given: calls.append(1) or step(*given)
    try:
        train(start(net(), config(2, onefold=FORMATS[formats], **precision("bf16"))), 1)
    finally:
        kernels.step = step
    return bool(calls)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("formats", ["int8", "split", "int8, split", "int8, 8 bits", "bf16"])
def test_stages_are_bit_equal(on_nccl_ranks, world, formats):
    results = on_nccl_ranks(world, run_stages, FORMATS[formats], 1, "bf16", {})
    for traces in results:
        for stage in (1, 2, 3):
            assert first_difference(traces[stage], traces[0]) is None, f"stage {stage} beside stage 0"


@pytest.mark.parametrize(("world", "formats"), [(1, "split"), (2, "int8, split"), (1, "int8, 8 bits"), (1, "bf16")])
def test_every_tier_is_bit_equal(on_nccl_ranks, tmp_path, world, formats):
    """What passes through the device is stepped by its kernels."""
    for told in on_nccl_ranks(world, run_tiers, FORMATS[formats], str(tmp_path), 1, ADAMW):
        assert told == []


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 1), (1, 2)])
def test_fp32_may_pass_through_the_device(on_nccl_ranks, tmp_path, world, accumulation):
    passes = {"offloaded_step": "device"}
    for told in on_nccl_ranks(world, run_tiers, passes, str(tmp_path), accumulation, ADAMW):
        assert [line for line in told if accumulation == 1 or "norm" not in line] == []


def test_a_host_can_step_bytes_by_itself(on_nccl_ranks, tmp_path):
    """A GPU's step rounds differently from a host's, so the device itself is left out."""
    steps = {**FORMATS["int8, split"], "offloaded_step": "host"}
    for told in on_nccl_ranks(1, run_tiers, steps, str(tmp_path), 1, ADAMW, ("device", "half")):
        assert told == []


def test_parameters_without_elements_pass(on_nccl_ranks, tmp_path):
    (found,) = on_nccl_ranks(1, over_tiers, holding_nothing, str(tmp_path), ["2 cpu", "3 disk disk"], ())
    for name, trace in found.items():
        assert first_difference(trace, found["device"]) is None, name


def chunks() -> str | None:
    """Many chunks, more than are under way at a time, as one."""
    traces, usual = [], gpu_stream.CHUNK_BYTES
    for size in (usual, 1 << 14):
        gpu_stream.CHUNK_BYTES = size
        zero = {"offload_optimizer": {"device": "cpu"}}
        engine = start(
            net(width=64), config(2, onefold=FORMATS["int8, split"], zero_optimization=zero, **precision("bf16"))
        )
        traces.append(train(engine, 4))
        engine.destroy()
    gpu_stream.CHUNK_BYTES = usual
    return first_difference(*traces)


def test_chunks_take_turns(on_nccl_ranks):
    assert on_nccl_ranks(1, chunks) == [None]


@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers_step_what_is_decoded_for_them(on_nccl_ranks, optimizer):
    for traces in on_nccl_ranks(1, run_others, OTHERS[optimizer]):
        assert first_difference(traces[1], traces[0]) is None


def run_others(optimizer: dict[str, Any]) -> list[Trace]:
    traces = []
    for stage in (0, 3):
        settings = config(stage, optimizer=optimizer, onefold=FORMATS["int8, split"], **precision("bf16"))
        engine = start(net(), settings)
        traces.append(train(engine, 3))
        engine.destroy()
    return traces


def skip_steps() -> str | None:
    """A step with gradients that are not finite leaves everything as it was, also where the device decides."""
    extra = {"gradient_clipping": 0.3, **precision("bf16")}
    engine = start(net(), config(2, onefold={**FORMATS["int8, split"], "nonfinite_gradients": "skip"}, **extra))
    train(engine, 2)
    store = engine.state.step.stores[0]
    held = {"master": store.master, **store.states}

    def parts() -> dict[str, Any]:
        return {name: [part.clone() for part in buffer.tensors] for name, buffer in held.items()}

    before = parts()
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y) * torch.inf)
    engine.step()
    assert engine.optimizer.overflow
    return first_difference(parts(), before)


def test_a_step_that_is_left_out_changes_nothing(on_nccl_ranks):
    assert on_nccl_ranks(2, skip_steps) == [None, None]
