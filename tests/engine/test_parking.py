"""`offload_states` gives the device's memory up and `reload_states` brings everything back, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, first_difference, more, net, precision, start, train, weights_of

import onefold


def held(engine: onefold.Engine) -> int:
    """Bytes of storages behind everything the engine keeps on its device."""
    found: dict[int, int] = {}
    for run in (run for unit in engine.state.schedule.units for run in unit.params):
        tensors: list[Any] = [
            run.full,
            run.store.param and run.store.param.values,
            *(run.grad.device_tensors() if run.trainable else []),
        ]
        if run.trainable:
            store = run.store
            tensors += [
                store.master,
                store.param_copy,
                *(state.memory for state in engine.state.step.stepper.held_states(store)),
            ]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().size()
    return sum(found.values())


def leave_and_come_back(stage: int, dtype: str) -> list[Any]:
    straight = start(net(), config(stage, **precision(dtype)))
    reference = [train(straight, 2), train(straight, 2, seed=1)]
    straight.destroy()
    engine = start(net(), config(stage, **precision(dtype)))
    first = train(engine, 2)
    before = held(engine)
    engine.offload_states()
    between = held(engine)
    for work in (lambda: engine(*batches(1)[0]), engine.step, lambda: engine.save_checkpoint("nowhere")):
        with pytest.raises(RuntimeError, match=r"call engine.reload_states\(\) first"):
            work()
    with pytest.raises(RuntimeError):
        engine._modules["module"](*batches(1)[0])  # the bare model: an error, and no crash
    engine.reload_states()
    after = held(engine)
    second = train(engine, 2, seed=1)
    return [
        first_difference(first, reference[0]),
        first_difference(second, reference[1]),
        between,
        after - before,
    ]


@covering(stage=(0, 1, 2, 3), dtype=("bf16", "fp32"), strength=1)
def test_it_comes_back_as_it_was(on_ranks, stage, dtype):
    for found in on_ranks(2, leave_and_come_back, stage, dtype):
        assert found == [None, None, 0, 0]


def by_kind(engine: onefold.Engine) -> dict[str, int]:
    """Bytes on the device, under the names of `include`, where each kind has storages of its own."""
    found = dict.fromkeys(("lp_params", "lp_grads", "hp_params", "optim_states"), 0)
    for run in (run for unit in engine.state.schedule.units for run in unit.trained):
        store = run.store
        tensors = {
            "lp_params": [run.full],
            "lp_grads": run.grad.device_tensors(),
            "hp_params": [store.master],
            "optim_states": [state.memory for state in engine.state.step.stepper.held_states(store)],
        }
        for kind, held in tensors.items():
            found[kind] += sum(tensor.untyped_storage().size() for tensor in held)
    return found


def some_leave(include: list[str]) -> tuple[dict[str, int], dict[str, int], dict[str, int], str | None]:
    """Between two micro-steps of a window: gradients are there too."""
    settings = config(2, gradient_accumulation_steps=2, **precision("bf16"))
    straight = start(net(), settings)
    train(straight, 3)
    expected = train(straight, 3, seed=1)
    engine = start(net(), settings)
    train(engine, 3)
    before = by_kind(engine)
    engine.offload_states(include=include)
    between = by_kind(engine)
    engine.reload_states()
    return before, between, by_kind(engine), first_difference(train(engine, 3, seed=1), expected)


@pytest.mark.parametrize(
    "include", [["optim_states"], ["lp_params"], *map(more, (["hp_params"], ["lp_grads"])), ["hp_params", "lp_grads"]]
)
def test_only_what_include_names_leaves(on_ranks, include):
    for before, between, after, difference in on_ranks(2, some_leave, include):
        assert all(before.values())
        assert between == {kind: 0 if kind in include else size for kind, size in before.items()}
        assert after == before
        assert difference is None


def ask_for_what_is_not_there() -> None:
    engine = start(net(), config(2))
    with pytest.raises(ValueError, match=r"include 'optim_state' is not known; known: .*optim_states"):
        engine.offload_states(include=["optim_state"])
    with pytest.raises(ValueError, match="states go to the host"):
        engine.offload_states(device="cuda")
    engine.offload_states(include=[onefold.zero.OffloadStateTypeEnum.optim_states])
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.offload_states()
    engine.reload_states()
    engine.reload_states()  # nothing to do


def test_wrong_calls_are_told_so(on_ranks):
    on_ranks(1, ask_for_what_is_not_there)


def large_ones_leave(stage: int) -> bool:
    """Shards of more than a megabyte lie in mappings of their own."""
    found = []
    for leaves in (False, True):
        torch.manual_seed(3)
        engine = start(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)), config(stage))
        for number in range(3):
            engine.backward(engine(torch.full((2, 1024), 0.1 + number)).square().mean())
            engine.step()
            if leaves:
                engine.offload_states()
                engine.reload_states()
        found.append(weights_of(engine.module))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_large_shards_come_back_too(on_ranks, stage):
    assert on_ranks(2, large_ones_leave, stage) == [True, True]
