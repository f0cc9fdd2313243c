"""Held parameters on a CUDA device: cases of `test_held_parameters.py` that memory, streams or kernels could change."""

from __future__ import annotations

import pytest
import test_held_parameters as held
import torch

from onefold.offload.write_check import WriteCheck, fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("plan", held.WHOLE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_writes_in_16_bits_reach_the_master(staged, plan, dtype):
    assert staged.run(held.writes_in_16_bits, plan, dtype, "AdamW", True) == [None, None]


@pytest.mark.parametrize("way", ["clamp_", "data clamp_", "data assigned"])
@pytest.mark.parametrize("plan", ["2", "2 offload"])
def test_writes_to_unsharded_parameters_equal_plain_torch(staged, plan, way):
    assert staged.run(held.writes, plan, way) == [None, None]


@pytest.mark.parametrize("plan", ["1", "2 offload"])
def test_looking_for_writes_moves_no_bit(nccl, plan):
    assert nccl.run(held.untouched, plan, "bf16") == [True]


@pytest.mark.parametrize("way", ["after", "inside", "functional_call", "no_grad", "views"])
@pytest.mark.parametrize("plan", ["3 nothing kept", "3 offload"])
def test_operations_on_parameters_inside_a_pass_equal_plain_torch(staged, plan, way):
    assert staged.run(held.penalised, plan, way) == [None, None]


def test_a_unit_is_released_after_an_operation_and_unsharded_for_its_backward(staged):
    assert staged.run(held.released_after_an_operation) == [None, None]


@pytest.mark.parametrize("way", ["view", "transposed", "torch dlpack"])
def test_what_was_kept_of_gathered_parameters_stays_valid(staged, way):
    assert staged.run(held.kept_from_gathered, way) == [None, None]


@pytest.mark.parametrize("plan", ["1", "3 nothing kept", "2 offload"])
def test_gradients_are_dropped(staged, plan):
    assert staged.run(held.dropped, plan, "model") == [None, None]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "NAdam"])
@pytest.mark.parametrize("plan", ["2", "3", "2 offload"])
def test_a_frozen_parameter_stops_moving(staged, plan, optimizer):
    assert staged.run(held.frozen_between, plan, optimizer) == [None, None]


@pytest.mark.parametrize("plan", ["0", "2", "3"])
def test_one_rank_clips_by_hand_as_plain_torch(nccl, plan):
    assert nccl.run(held.clipped_by_hand, plan) == [None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 4096, 100_032])
def test_the_kernel_takes_over_exactly_what_was_written(dtype, size):
    master = torch.randn(size, device="cuda")
    used = master.to(dtype)
    expected = master.clone()
    WriteCheck().take_over(master, used)
    assert torch.equal(master, expected)
    used[::7] = 0.25
    expected[::7] = torch.where(expected[::7].to(dtype) == 0.25, expected[::7], 0.25)
    WriteCheck().take_over(master, used)
    assert torch.equal(master, expected)


def test_fingerprints_see_values_and_their_places():
    values = torch.randn(100_000, device="cuda", dtype=torch.bfloat16)
    before = fingerprint(values)
    assert fingerprint(values.clone()) == before
    assert fingerprint(values.flip(0)) != before
    changed = values.clone()
    changed[77] += 1
    assert fingerprint(changed) != before
    assert fingerprint(values.cpu()).item() == before.item()


def moved_away_and_back(stage: int) -> list[object]:
    """`model.cpu()` gives a copy to look at; the engine saves, and goes on when the model is back."""
    engine = held.start(held.net(), held.settings(stage))
    x, y = held.data(0)

    def step() -> None:
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()

    step()
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    home = before[0].device
    engine.module.cpu()
    found: list[object] = [all(parameter.device.type == "cpu" for parameter in engine.module.parameters())]
    found.append(all(torch.equal(p, q.cpu()) for p, q in zip(engine.module.parameters(), before, strict=True)))
    refused = held.refusal(step, "was moved to cpu")
    with torch.no_grad():
        engine.module[0].bias.add_(1)  # a write to the copy comes back with it
    engine.module.to(home)
    found += [refused, torch.equal(engine.module[0].bias, before[1] + 1)]
    step()
    return [*found, engine.global_steps]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_model_that_is_moved_away_comes_back(nccl, stage):
    assert nccl.run(moved_away_and_back, stage) == [[True, True, None, True, 2]]


def test_readers_of_masters_see_writes_to_weights_on_a_gpu(nccl, tmp_path):
    """The master is in host memory: a fingerprint shows the write, and other elements keep their low bits."""
    assert nccl.run(held.readers_of_masters, "2 offload", "bf16", "host", str(tmp_path)) == [None]


def test_a_write_that_a_delayed_step_on_a_gpu_would_replace_raises(nccl):
    assert nccl.run(held.write_during_a_delayed_step) == [None]
