"""`offload_states` gives the device's memory up and `reload_states` brings everything back, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, first_difference, more, net, precision, start, train, weights_of
from onefold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

import onefold
from onefold.compat import deepspeed
from onefold.utils import safe_get_full_fp32_param


def held(engine: onefold.Engine) -> int:
    """Bytes of storages behind everything the engine keeps on its device."""
    sizes: dict[int, int] = {}
    for run in (run for unit in engine.state.schedule.units for run in unit.params):
        tensors: list[Any] = [
            run.full,
            run.store.param and run.store.param.values,
            *(run.grad.device_tensors() if run.trainable else []),
        ]
        if run.trainable:
            store = run.store
            tensors += [
                *(value for *_, found in engine.state.step.loose_states(store) for value in found.values()),
                *store.master.parts,
                *(store.separate_model_weight.parts if store.separate_model_weight is not None else ()),
                *(part for state in engine.state.step.states.held_states(store) for part in state.buffer.parts),
            ]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().size()
    return sum(sizes.values())


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
        with pytest.raises(RuntimeError, match=r"Call engine.reload_states\(\) first"):
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
    for run in (run for unit in engine.state.schedule.units for run in unit.trained_params):
        store = run.store
        tensors = {
            "lp_params": [run.full],
            "lp_grads": run.grad.device_tensors(),
            "hp_params": [store.master.tensor],
            "optim_states": [state.buffer.tensor for state in engine.state.step.states.held_states(store)],
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
    with pytest.raises(ValueError, match=r"unknown state 'optim_state'\. Use .*optim_states"):
        engine.offload_states(include=["optim_state"])
    with pytest.raises(ValueError, match=r"is not supported\. Pass device"):
        engine.offload_states(device="cuda")
    with pytest.raises(ValueError, match=r"is not supported\. Pass device"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    assert engine.offload_states(device=OffloadDeviceEnum.none) == {}
    engine.offload_states(include=[onefold.zero.OffloadStateTypeEnum.optim_states])
    assert "optim_states" not in engine.offload_states()  # the other kinds
    assert set(engine.reload_states()) == set(onefold.zero.OffloadStateTypeEnum)
    assert engine.reload_states() == {}


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


# -- what a call reports, and what works in between ---------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen net with a few trained weights, as an adapter leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net()
        self.base.requires_grad_(False)
        self.base.blocks[0].up.weight.requires_grad_(True)
        self.extra = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.base(x, y) * self.extra(self.extra.weight.new_ones(1)).squeeze().exp()


MODELS = {"net": net, "adapted": Adapted}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole matrices": {"optimizer": {"type": "Shampoo", "params": {"lr": 0.01}}},
    "int8, split": {"onefold": {"state_dtype": "int8", "int8_min_numel": 256, "master_dtype": "bf16_int16"}},
}


def slept(stage: int, dtype: str, model: str, formats: str) -> list[str]:
    """Sleep in two parts between steps, from the optimizer and from the engine: what went wrong."""
    settings, told = config(stage, **precision(dtype), **FORMATS[formats]), []
    straight = start(MODELS[model](), settings)
    expected = [train(straight, 2), train(straight, 2, seed=1)]
    straight.destroy()
    engine = start(MODELS[model](), settings)
    first = train(engine, 2)
    before, weights = held(engine), weights_of(engine.module)
    with torch.no_grad():
        loss = engine(*batches(1)[0]).item()
    freed = engine.optimizer.offload_states(include=["optim_states", "hp_params"])
    between = held(engine)
    if sum(freed.values()) != before - between or not freed["optim_states"]:
        told.append(f"{freed} are reported, {before - between} are free")
    if dtype != "fp32" and not freed["hp_params"]:
        told.append("masters have not left")
    with torch.no_grad():
        if engine(*batches(1)[0]).item() != loss:
            told.append("the model computes something else while its optimizer sleeps")
    if first_difference(weights_of(engine.module), weights):
        told.append("other weights are gathered while the optimizer sleeps")
    streamed = {n: t.clone() for bucket in onefold.zero.stream_weights(engine.module) for n, t in bucket.items()}
    if first_difference(streamed, {name: weights[name] for name in streamed}):
        told.append("other weights are streamed while the optimizer sleeps")
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    complete = {
        "backward": lambda: engine.backward(engine(*batches(1)[0])),
        "step": engine.step,
        "save_checkpoint": lambda: engine.save_checkpoint("nowhere"),
        "load_checkpoint": lambda: engine.load_checkpoint("nowhere"),
        "safe_get": lambda: safe_get_full_fp32_param(parameter),
        "modifier_rank": lambda: onefold.zero.GatheredParameters([parameter], modifier_rank=0).__enter__(),
    }
    told += [f"{name}: {answer}" for name, work in complete.items() if (answer := asleep(work)) != "raises"]
    engine.state.schedule.reshard_all()
    rest = engine.offload_states()
    if rest.keys() & freed.keys() or held(engine):
        told.append(f"{held(engine)} bytes stay after the second call, {rest}")
    weights_too = {
        "forward": lambda: engine(*batches(1)[0]),
        "forward without grad": torch.no_grad()(lambda: engine(*batches(1)[0])),
        "bare model": torch.no_grad()(lambda: engine._modules["module"](*batches(1)[0])),
        "GatheredParameters": lambda: weights_of(engine.module),
        "state dict": lambda: engine.module_state_dict(),
        "a parameter": lambda: engine.module.state_dict() and parameter.sum(),
        "stream_weights": lambda: list(onefold.zero.stream_weights(engine.module)),
        "save_16bit_model": lambda: engine.save_16bit_model("nowhere"),
    }
    told += [f"{name}: {answer}" for name, work in weights_too.items() if (answer := asleep(work)) != "raises"]
    restored = engine.reload_states()
    if restored != {**freed, **rest, "contiguous_grad_buffer": 0}:
        told.append(f"{restored} are restored of {freed} and {rest}")
    found = [first, train(engine, 2, seed=1)]
    return [*told, *filter(None, [first_difference(found, expected)])]


def asleep(work: Any) -> str:
    try:
        work()
    except RuntimeError as error:
        return "raises" if "Call engine.reload_states() first" in str(error) else str(error)
    return "is done"


SLEEPERS = [
    (0, "bf16", "net", "plain"), (1, "fp32", "adapted", "plain"), (2, "bf16", "adapted", "int8, split"),
    (2, "fp16", "net", "plain"), (3, "bf16", "net", "plain"), (3, "bf16", "adapted", "int8, split"),
    (3, "fp32", "adapted", "plain"), (1, "bf16", "net", "int8, split"), (3, "bf16", "net", "whole matrices"),
]  # fmt: skip


def all_sleepers() -> dict[Any, list[str]]:
    return {case: told for case in SLEEPERS if (told := slept(*case))}


def test_freed_bytes_are_reported_and_what_sleeps_says_so(on_ranks):
    for found in on_ranks(2, all_sleepers):
        assert found == {}


def gathered(stage: int) -> str:
    engine = start(net(), config(stage))
    try:
        with onefold.zero.GatheredParameters(engine.module.parameters()):
            engine.offload_states()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_a_program_has_gathered_do_not_sleep(on_ranks, stage):
    for told in on_ranks(2, gathered, stage):
        assert "offload_states inside GatheredParameters" in told


def evaluation_sleeps(stage: int) -> tuple[dict[str, int], int, bool, bool]:
    settings = config(stage, **precision("bf16"))
    del settings["optimizer"]
    engine = start(net(), settings)
    with torch.no_grad():
        before = engine(*batches(1)[0])
        size = held_for_evaluation(engine)
        freed = engine.offload_states()
        left = held_for_evaluation(engine)
        raises = asleep(lambda: engine(*batches(1)[0])) == "raises"
        engine.reload_states()
        after = engine(*batches(1)[0])
        engine.offload_states()
        model = engine.module
        engine.close()  # which wakes it
        with onefold.zero.GatheredParameters(model.parameters()):
            usable = all(bool(p.abs().sum() >= 0) and p.numel() > 0 for p in model.parameters())
    return freed, size - left, bool(torch.equal(before, after)) and raises, usable


def held_for_evaluation(engine: onefold.Engine) -> int:
    params = [param for unit in engine.state.schedule.units for param in unit.params]
    shards = [param.store.param.values if param.store.param is not None else param.full for param in params]
    return sum(shard.untyped_storage().size() for shard in shards)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_evaluation_engine_sleeps_too(on_ranks, stage):
    for freed, size, same, usable in on_ranks(2, evaluation_sleeps, stage):
        assert freed["lp_params"] == size > 0
        assert same
        assert usable


# -- states that a program moves by hand --------------------------------------------------------------------------


def by_hand(stage: int) -> dict[str, str]:
    """A CPU has nowhere to move to but the meta device. What each way of doing so says, and what may be done."""
    straight = deepspeed.initialize(model=net(), config={"log_level": "warning", **config(stage)})[0]
    expected = train(straight, 2), train(straight, 2, seed=1)
    engine = deepspeed.initialize(model=net(), config={"log_level": "warning", **config(stage)})[0]
    first = train(engine, 2)
    optimizer, told = engine.optimizer, {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
            told[name] = "is done"
        except (RuntimeError, TypeError) as error:
            told[name] = "names it" if "offload_states" in str(error) else str(error)

    held_here = [
        p for p in engine.module.parameters() if getattr(p, "ds_tensor", None) is not None and len(p.ds_tensor)
    ]
    if held_here:
        shard = held_here[0].ds_tensor
        attempt("data", lambda: setattr(shard, "data", shard.data.to("meta")))
        attempt("detached data", lambda: setattr(shard, "data", shard.detach().to("meta")))
        attempt("resize_", lambda: shard.resize_(0))
        attempt("data.resize_", lambda: shard.data.resize_(0))
        attempt("set_", lambda: shard.set_())
        attempt("storage", lambda: shard.untyped_storage().resize_(0))
        attempt("storage of data", lambda: shard.data.untyped_storage().resize_(0))
        attempt("other data", lambda: setattr(shard, "data", shard.data + 1))
        attempt("same data", lambda: setattr(shard, "data", shard.data.to("cpu").clone()))
        attempt("read", lambda: (shard.sum(), shard.clone(), shard.data.cpu().numpy(), shard.untyped_storage().size()))
    master, states = next(item for item in optimizer.state.items() if item[1])
    state = states["exp_avg"]
    attempt("state data", lambda: setattr(state, "data", state.data.to("meta")))
    attempt("state item", lambda: states.__setitem__("exp_avg", state.to("meta")))
    attempt("state resize_", lambda: state.resize_(0))
    attempt("state storage", lambda: state.untyped_storage().resize_(0))
    attempt("state same item", lambda: states.__setitem__("exp_avg", state.cpu()))
    attempt("state read", lambda: (state.sum(), state.clone(), torch.stack([state, state]).mean()))
    attempt("master data", lambda: setattr(master, "data", master.data.to("meta")))
    of_one = next(optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    attempt("item of a parameter", lambda: of_one.__setitem__("exp_avg", of_one["exp_avg"].to("meta")))
    told["training goes on"] = first_difference([first, train(engine, 2, seed=1)], list(expected)) or "is done"
    return told


@pytest.mark.parametrize("stage", [2, 3])
def test_moves_by_hand_are_refused_and_reads_are_not(on_ranks, stage):
    allowed = {"same data", "read", "state same item", "state read", "training goes on"}
    for found in on_ranks(2, by_hand, stage):
        assert len(found) > (17 if stage == 3 else 7)
        assert found == {name: "is done" if name in allowed else "names it" for name in found}


def read_from_the_host(stage: int, formats: str) -> list[str]:
    """What a move by hand leaves behind on a GPU (`test_gpu_offload.py` makes one): states are off the device, and
    the engine reloads them when it is used. A CPU can stand for both sides of that.
    """
    settings = {"log_level": "warning", **config(stage, **precision("bf16"), **FORMATS[formats])}
    straight = deepspeed.initialize(model=net(), config=settings)[0]
    expected = [train(straight, 2), train(straight, 2, seed=1)]
    engine, told = deepspeed.initialize(model=net(), config=settings)[0], []
    first = train(engine, 2)

    def looked_at() -> dict[str, Any]:
        parameters = list(engine.module.named_parameters())
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        states += [value for _, p in parameters for value in engine.optimizer.state[p].values()]
        shards = [p.ds_tensor.data.clone() for _, p in parameters if hasattr(p, "ds_tensor")]
        tensors = [value.clone() for value in states if isinstance(value, torch.Tensor)]
        return {"states": tensors, "shards": shards}

    before = looked_at()
    engine.offloaded_states.reload_on_use()
    engine.offload_states(include=["optim_states", "hp_params", "lp_params"])
    if held(engine):
        told.append(f"{held(engine)} bytes stay")
    told += filter(None, [first_difference(looked_at(), before)])
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = parameter.ds_tensor.data.to("cpu").clone()
    second = train(engine, 2, seed=1)
    if engine.offloaded_states or engine.offloaded_states.moved_by_hand:
        told.append("a use has not reloaded everything")
    told += filter(None, [first_difference([first, second], expected)])
    return told


@pytest.mark.parametrize(("stage", "formats"), [(2, "int8, split"), (3, "plain"), more(3, "int8, split")])
def test_states_that_were_moved_by_hand_are_read_and_come_back_when_used(on_ranks, stage, formats):
    assert on_ranks(2, read_from_the_host, stage, formats) == [[], []]


def emptied_behind_our_back() -> str:
    engine = start(net(), config(3))
    param = engine.state.schedule.units[0].sharded_params[0]
    param.store.param.values.untyped_storage().resize_(0)
    try:
        engine(*batches(1)[0])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_shard_that_was_emptied_is_noticed(on_ranks):
    assert "offload_states" in on_ranks(2, emptied_behind_our_back)[0]
