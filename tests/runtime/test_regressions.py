"""Properties that a review found broken once."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import Net, batches, config, first_difference, net, rank, start, train, train_beside, weights_of
from torch import nn


class Skipping(Net):
    """A model whose last block is left out of most steps."""

    skip = False

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks[: 2 if self.skip else 3]:
            h = block(h)
        return self.head(h)


def skipped_twice(overlap: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(5 + rank())
    model = Skipping()
    buckets = {"allgather_bucket_size": 2, "reduce_bucket_size": 2}
    engine = start(model, config(2, zero_optimization={"overlap_comm": overlap, **buckets}))
    for index, (x, y) in enumerate(batches(5)):
        model.skip = index in (1, 2, 3)
        engine.backward(engine(x, y))
        engine.step()
        flying = [name for flight in engine.state.schedule.in_flight.updates for name in flight.names]
        assert len(flying) == len(set(flying))
    return weights_of(engine.module)


def test_a_unit_no_forward_uses_is_never_gathered_twice_at_once(on_ranks):
    serial, overlapped = on_ranks(2, skipped_twice, False), on_ranks(2, skipped_twice, True)
    for ours, theirs in zip(serial, overlapped, strict=True):
        assert first_difference(theirs, ours) is None


def deleted_in_flight(token: str) -> dict[str, torch.Tensor]:
    """Rank 1 sends its slices only once rank 0 is about to delete its engine, which has what it needs of them."""
    model = net()
    engine = start(model, config(2, zero_optimization={"overlap_comm": True}))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    store = dist.distributed_c10d._get_default_store()
    collective = engine.state.schedule.in_flight.collective
    send = collective.start_gather

    def send_late(gatherings):
        store.wait([token], timedelta(seconds=60))
        return send(gatherings)

    if rank() == 1:
        collective.start_gather = send_late
    engine.step()
    assert engine.state.schedule.in_flight.updates
    if rank() == 0:
        store.set(token, "rank 0 deletes its engine")
    del engine
    return weights_of(model)


def test_a_deleted_engine_lets_what_is_in_flight_arrive(on_ranks, tmp_path):
    first, second = on_ranks(2, deleted_in_flight, f"{tmp_path}")
    assert first_difference(second, first) is None


def gradients_on_the_side(dtype: str) -> tuple[bool, list[float]]:
    """`autograd.grad` through the model, on rank 0 alone, is nobody's backward."""
    sections = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
    engine = start(net(), config(2, gradient_accumulation_steps=2, **sections[dtype]))
    losses = []
    for x, y in batches(4):
        if rank() == 0:
            torch.autograd.grad(engine.module(x, y), engine.module.embed.weight)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    plain = start(net(), config(2, gradient_accumulation_steps=2, **sections[dtype]))
    return train(plain, 4).losses == losses, losses


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autograd_grad_disturbs_nothing(on_ranks, dtype):
    for same, _ in on_ranks(2, gradients_on_the_side, dtype):
        assert same


class NormScaled(torch.optim.Optimizer):
    """Looks at whole parameters: each step is as long as the parameter's norm."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                direction = parameter.grad / (parameter.grad.norm() + 1e-12)
                parameter.sub_(direction * parameter.norm() * group["lr"])


def with_a_class_of_ones_own() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = net()
    settings = config(0)
    del settings["optimizer"]
    engine = start(model, settings, optimizer=NormScaled(model.parameters()))
    plain = Net()
    plain.load_state_dict(engine.module.state_dict())
    return train_beside(engine, plain, NormScaled(plain.parameters()), 3)


def test_a_class_of_ones_own_sees_shaped_parameters_where_states_are_whole(on_ranks):
    for mine, theirs in on_ranks(2, with_a_class_of_ones_own):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-5)


def cast_afterwards() -> list[str]:
    said = []
    engine = start(net(), config(1))
    assert engine.to(engine.device) is engine
    for act in (engine.double, engine.half, lambda: engine.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match="cannot be cast or moved"):
            act()
    with pytest.raises(RuntimeError, match=r"was given data of torch\.float64.*Do it before initialize") as caught:
        engine.module.double()
    said.append(str(caught.value))
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
    train(engine, 1)  # nothing was changed
    return said


def test_a_model_cast_after_initialize_is_an_error_not_a_silent_no_op(on_ranks):
    assert "weight" in on_ranks(2, cast_afterwards)[0][0]


def adagrad_instance() -> float:
    model = net()
    settings = config(2)
    del settings["optimizer"]
    engine = start(model, settings, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    losses = []
    for _ in range(8):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="already has states"):
        start(other, settings, optimizer=optimizer)
    return losses[-1] - losses[0]


def test_an_adagrad_instance_is_taken_before_its_first_step(on_ranks):
    assert all(change < 0 for change in on_ranks(2, adagrad_instance))


def two_backwards_in_bf16() -> set[torch.dtype]:
    engine = start(net(), config(1, bf16={"enabled": True}))
    for x, y in batches(2):
        engine.backward(engine(x, y))
    return {run.grad.shard.value.dtype for unit in engine.state.schedule.units for run in unit.trained_params}


@pytest.mark.parametrize("world", [1, 2])
def test_a_sum_of_two_backwards_is_fp32(on_ranks, world):
    assert on_ranks(world, two_backwards_in_bf16)[0] == {torch.float32}


def autocast_fp16() -> tuple[float, float, bool]:
    engine = start(net(), config(2, torch_autocast={"enabled": True, "dtype": "fp16"}))
    before = engine.optimizer.loss_scale
    losses = train(engine, 6).losses
    return before, engine.optimizer.loss_scale, losses[-1] == losses[-1]


def test_fp16_autocast_has_a_loss_scale(on_ranks):
    for before, after, finite in on_ranks(2, autocast_fp16):
        assert before == 2.0**16
        assert after <= before
        assert finite


def breakdown_alone(caplog_level: str) -> bool:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    try:
        engine = start(net(), config(1, wall_clock_breakdown=True, log_level=caplog_level))
        train(engine, 10)
    finally:
        logging.getLogger("onefold").removeHandler(handler)
    return any("forward" in line and "step 10" in line for line in lines)


def test_wall_clock_breakdown_prints_by_itself(on_ranks):
    assert on_ranks(1, breakdown_alone, "info")[0]


def left_out() -> tuple[bool, bool]:
    """Parameters that need gradients but are in no optimizer group keep no gradient from step to step."""
    model = net()
    engine = start(model, config(2), model_parameters=list(model.blocks.parameters()))
    before = model.head.weight.detach().clone()
    train(engine, 2)
    return model.head.weight.grad is None, torch.equal(before, model.head.weight)


def test_parameters_in_no_group_are_left_alone(on_ranks):
    assert on_ranks(2, left_out)[0] == (True, True)


def copied_model() -> str:
    engine = start(net(), config(1))
    copied = copy.deepcopy(engine.module)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), engine.module.parameters(), strict=True))
    return "ok"


def test_the_bare_model_can_be_copied(on_ranks):
    assert on_ranks(1, copied_model) == ["ok"]


def unfrozen_later() -> str:
    model = net()
    model.head.weight.requires_grad_(False)
    engine = start(model, config(2))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    engine.step()
    model.head.weight.requires_grad_(True)
    engine.backward(engine(x, y))
    with pytest.raises(RuntimeError, match="frozen at initialize") as caught:
        engine.step()
    return str(caught.value)


def test_a_parameter_unfrozen_later_is_an_error_not_silence(on_ranks):
    assert "head.weight" in on_ranks(2, unfrozen_later)[0]


def profiled() -> tuple[int, int]:
    import onefold

    engine = start(net(), config(2))
    train(engine, 2)
    before = engine.ledger.bytes("reduce-scatter")
    with onefold.Profiling() as profile:
        train(engine, 2, seed=1)
    (traffic,) = profile.traffic()
    return traffic.bytes("reduce-scatter"), engine.ledger.bytes("reduce-scatter") - before


def test_a_profile_counts_the_traffic_inside_it(on_ranks):
    inside, expected = on_ranks(2, profiled)[0]
    assert inside == expected > 0
