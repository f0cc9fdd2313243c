"""Optimizers of the user's own: what they write beside parameters, their hooks and methods, and who may be sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import Net, batches, config, first_difference, more, net, rank, start, tiers_of, train, weights_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import onefold
from onefold.optim.choose import choose, for_disk
from onefold.plan import Tier
from onefold.utils import safe_set_full_fp32_param

pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")

from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree, AdamWScheduleFreeClosure, SGDScheduleFree

Weights = dict[str, torch.Tensor]


class Counting(torch.optim.Optimizer):
    """Keeps a counter in its groups, one on itself and a list of what it did, and makes its rate smaller."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = 0
        self.rates: list[float] = []
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.rates.append(self.param_groups[0]["lr"])
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = f"step {group['k']}"
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", torch.zeros_like(p))
                    last.mul_(0.5).add_(p.grad)
                    p.add_(last, alpha=-group["lr"] / group["k"])
            group["lr"] *= 0.9


class Adapting(torch.optim.Optimizer):
    """As D-Adaptation: a step size `d` made of sums over all parameters. `fsdp_in_use`: over all ranks."""

    def __init__(self, params: Any, lr: float = 1.0, fsdp_in_use: bool = False) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "fsdp_in_use": fsdp_in_use})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        sums = torch.zeros(2)
        for p in every:
            start = self.state[p].setdefault("start", p.clone())
            sums += torch.stack([p.grad.square().sum(), (p - start).square().sum()])
        if self.param_groups[0]["fsdp_in_use"]:
            dist.all_reduce(sums)
        for group in self.param_groups:
            group["d"] = max(group["d"], float(sums[1].sqrt() / (sums[0].sqrt() + 1e-8)))
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (group["d"] + 1e-3))


class Faster(torch.optim.AdamW):
    """A subclass of torch's own that changes its rate, and calls a step that torch has put hooks around."""

    elementwise = True

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 1.5


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "counting": Counting,
    "faster AdamW": partial(Faster, lr=1e-2),
    "schedule-free AdamW": partial(AdamWScheduleFree, lr=1e-2, warmup_steps=3, weight_decay=0.1),
    "schedule-free SGD": partial(SGDScheduleFree, lr=0.5),
    "Prodigy": partial(Prodigy, lr=1.0, weight_decay=0.1),
    "D-Adaptation": Adapting,
}
OFFLOAD = {
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "half": {"offload_optimizer": {"device": "nvme", "ratio": 0.5}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two of them: one has no element on the last ranks, which hold the ends of lines."""
    plain = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    return [{"params": [p for p in model.parameters() if all(p is not q for q in plain)]}, {"params": plain}]


def settings_of(stage: int, tier: str, folder: str, **extra: Any) -> dict[str, Any]:
    zero: dict[str, Any] = copy.deepcopy(OFFLOAD.get(tier, {}))
    for section in zero.values():
        if section["device"] == "nvme":
            section["nvme_path"] = str(Path(folder, f"rank{rank()}"))
            section["buffer_size"] = 2048  # several windows
    settings = config(stage, zero_optimization=zero, **extra)
    del settings["optimizer"]
    return settings


def all_batches(num: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of every rank, by step."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, batches(num))
    return [list(step) for step in zip(*found, strict=True)]


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
    """Plain torch on the mean of the ranks' losses."""
    for step in steps:
        (sum(model(x, y) for x, y in step) / len(step)).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        optimizer.zero_grad()


def train_engine(engine: onefold.Engine, steps: Any) -> None:
    for step in steps:
        x, y = step[rank()]
        engine.backward(engine(x, y))
        engine.step()


def values_of(groups: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def mode(optimizer: Any, name: str) -> None:
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def close(one: Weights, other: Weights, atol: float = 1e-6) -> bool:
    for name in other:
        say = partial("{}: {}".format, name)
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=atol, msg=say)
    return True


# -- beside plain torch ------------------------------------------------------------------------------------------------


def beside(kind: str, stage: int, tier: str, folder: str) -> None:
    model = net(width=53, depth=1)
    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](groups_of(model))
    engine = start(model, settings_of(stage, tier, folder), optimizer=optimizer)
    plain.load_state_dict(weights_of(engine.module))
    theirs = OPTIMIZERS[kind](groups_of(plain))
    outer: Any = engine.optimizer
    scheduler, other = (torch.optim.lr_scheduler.StepLR(of, 2, 0.8) for of in (outer, theirs))
    steps = all_batches(5)
    for number, step in enumerate(steps):
        if number in (0, 3):
            mode(outer, "train")
            mode(theirs, "train")
        train_engine(engine, [step])
        scheduler.step()
        train_plain(plain, theirs, [step])
        other.step()
        close_values(values_of(outer.param_groups), values_of(theirs.param_groups))
        if number in (2, 4):
            mode(outer, "eval")
            mode(theirs, "eval")
            close(weights_of(engine.module), plain.state_dict())
    assert optimizer.param_groups is outer.param_groups
    assert [p for group in optimizer.param_groups for p in group["params"]] == [
        p for group in groups_of(model) for p in group["params"]
    ]
    if kind == "counting":
        assert (optimizer.calls, optimizer.rates) == (theirs.calls, theirs.rates)
        assert outer.calls == 5


def close_values(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


ELEMENTWISE = ["counting", "schedule-free AdamW", more("faster AdamW"), more("schedule-free SGD")]


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize(
    ("stage", "tier"),
    [(0, ""), (2, ""), (3, ""), (2, "cpu"), (3, "nvme"), more(1, ""), more(3, "params"), more(2, "half")],
)
def test_what_an_optimizer_writes_stays_and_weights_are_those_of_torch(on_ranks, tmp_path, kind, stage, tier):
    on_ranks(2, beside, kind, stage, tier, str(tmp_path))


@pytest.mark.parametrize("kind", ["Prodigy", "D-Adaptation"])
@pytest.mark.parametrize(("world", "stage", "tier"), [(2, 0, ""), (1, 3, ""), (1, 2, "cpu"), more(1, 0, "")])
def test_a_step_size_made_of_all_parameters_where_nothing_is_sharded(on_ranks, tmp_path, kind, world, stage, tier):
    on_ranks(world, beside, kind, stage, tier, str(tmp_path))


def adding_up(kind: str, stage: int, tier: str) -> None:
    """The optimizer reduces over ranks inside its step."""
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]  # Prodigy reduces on a GPU
    model = net(width=53, depth=1)
    plain = copy.deepcopy(model)
    settings = settings_of(stage, tier, "", zero_allow_untested_optimizer=True)
    engine = start(model, settings, optimizer=OPTIMIZERS[kind](model.parameters(), fsdp_in_use=True))
    plain.load_state_dict(weights_of(engine.module))
    steps = all_batches(1) * 8
    train_engine(engine, steps)
    theirs = OPTIMIZERS[kind](plain.parameters())
    train_plain(plain, theirs, steps)
    mine = engine.optimizer.param_groups[0]["d"]
    assert float(mine) == pytest.approx(float(theirs.param_groups[0]["d"]), rel=1e-4)
    assert float(mine) > (1e-3 if kind == "D-Adaptation" else 1e-6)
    close(weights_of(engine.module), plain.state_dict(), atol=1e-5)


@pytest.mark.parametrize("kind", ["Prodigy", "D-Adaptation"])
@pytest.mark.parametrize(("stage", "tier"), [(3, ""), (1, ""), more(2, "cpu")])
def test_an_optimizer_that_reduces_in_its_step_runs_on_shards(on_ranks, kind, stage, tier):
    on_ranks(2, adding_up, kind, stage, tier)


class Renamed(Prodigy):
    """Nobody knows it by its name."""


def differing(stage: int) -> list[str]:
    said = []
    for build in (Renamed, Adapting):
        model = net(width=53, depth=1)
        settings = settings_of(stage, "", "", zero_allow_untested_optimizer=True)
        engine = start(model, settings, optimizer=build(model.parameters()))
        with pytest.raises(RuntimeError) as caught:
            train_engine(engine, all_batches(3))
        said.append(str(caught.value))
        engine.destroy()
    return said


@covering(stage=(3, more(1), more(2)))
def test_an_optimizer_that_differs_between_ranks_is_named_on_all_of_them(on_ranks, stage):
    first, second = on_ranks(2, differing, stage)
    assert first == second
    for text, name, key in zip(first, ("Renamed", "Adapting"), ("d_denom", "d"), strict=True):
        assert name in text
        assert f"param_groups[0]['{key}'] is " in text
        assert "on rank 0" in text
        assert "on rank 1" in text
        assert "stage 0" in text


class Summing(Counting):
    """Says that it is elementwise, and is not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["sum"] = float(sum(p.grad.sum() for p in group["params"]))


class Late(Counting):
    """Makes a state that its first step did not make."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"] if group["k"] > 1 else ():
                self.state[p]["late"] = p.clone()


def differing_tiles(build: Any, folder: str) -> str:
    model = net(width=53, depth=1)
    engine = start(model, settings_of(2, "nvme", folder), optimizer=build(model.parameters()))
    with pytest.raises(RuntimeError) as caught:
        train_engine(engine, all_batches(2))
    with pytest.raises(RuntimeError, match=f"{build.__name__}|failed on the host"):
        train_engine(engine, all_batches(1))
    return str(caught.value.__cause__ or caught.value)


@pytest.mark.parametrize(("build", "says"), [(Summing, "'sum'.*param_groups.*cpu"), (Late, "'late'.*first step.*cpu")])
def test_what_cannot_be_stepped_tile_by_tile_is_named(on_ranks, tmp_path, build, says):
    (text,) = on_ranks(1, differing_tiles, build, str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{build.__name__}.*{says}"):
        raise RuntimeError(text)


class Moody(Counting):
    """Refuses to be evaluated."""

    def eval(self) -> None:
        raise ValueError("not now")


def after_a_refusal(refuses: bool, folder: str) -> Weights:
    """Masters that are written two steps after a method was refused are what the third is taken from."""
    model = net(width=53, depth=1)
    optimizer = Moody(model.parameters())
    engine = start(model, settings_of(2, "nvme", folder), optimizer=optimizer)
    steps = all_batches(4)
    train_engine(engine, steps[:1])
    if refuses:
        with pytest.raises(ValueError, match="not now"):
            optimizer.eval()
    train_engine(engine, steps[1:3])
    for parameter in engine.module.parameters():
        safe_set_full_fp32_param(parameter, torch.zeros_like(parameter))
    train_engine(engine, steps[3:])
    found = weights_of(engine.module)
    engine.destroy()
    return found


def test_a_refused_method_leaves_states_on_disk_as_they_are(on_ranks, tmp_path):
    (plain,), (refused,) = (on_ranks(1, after_a_refusal, refuses, str(tmp_path)) for refuses in (False, True))
    assert all(torch.equal(plain[name], refused[name]) for name in plain)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumed(kind: str, stage: int, tier: str, folder: str, other: tuple[int, str]) -> bool:
    steps = all_batches(5)

    def begin(stage: int, tier: str) -> tuple[onefold.Engine, Any]:
        model = net(width=53, depth=1)
        optimizer = OPTIMIZERS[kind](groups_of(model))
        engine = start(model, settings_of(stage, tier, folder, bf16={"enabled": True}), optimizer=optimizer)
        mode(optimizer, "train")
        return engine, optimizer

    engine, optimizer = begin(stage, tier)
    train_engine(engine, steps[:3])
    engine.save_checkpoint(folder)
    kept = copy.deepcopy(values_of(optimizer.param_groups)), getattr(optimizer, "calls", None)
    train_engine(engine, steps[3:])
    engine.save_checkpoint(folder, tag="later")
    whole = weights_of(engine.module)
    engine, optimizer = begin(*other)
    engine.load_checkpoint(folder, tag="global_step3")
    assert (values_of(optimizer.param_groups), getattr(optimizer, "calls", None)) == kept
    train_engine(engine, steps[3:])
    mine = weights_of(engine.module)
    return all(torch.equal(mine[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", ["counting", "schedule-free AdamW", "Prodigy"])
@pytest.mark.parametrize(
    ("stage", "tier", "other"),
    [
        more(0, "", (0, "")),
        (3, "cpu", (3, "cpu")),
        more(2, "nvme", (2, "nvme")),
        (3, "", (2, "nvme")),
        more(1, "", (3, "")),
    ],
)
def test_a_resumed_run_goes_on_with_what_was_written(on_ranks, tmp_path, kind, stage, tier, other):
    if kind == "Prodigy" and stage:
        pytest.skip("not where states are sharded")
    assert all(on_ranks(2, resumed, kind, stage, tier, str(tmp_path), other))


class Keeping(Counting):
    """Keeps what a checkpoint does not hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.average = torch.full((3,), float(self.calls))


def unsaved(folder: str) -> list[str]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    model = net()
    engine = start(model, settings_of(0, "", ""), optimizer=Keeping(model.parameters()))
    train_engine(engine, all_batches(1))
    engine.save_checkpoint(folder)
    logging.getLogger("onefold").removeHandler(handler)
    return said


def test_an_attribute_that_a_checkpoint_cannot_hold_is_said(on_ranks, tmp_path):
    (said,) = on_ranks(1, unsaved, str(tmp_path))
    assert any("'average'" in text for text in said)
    assert not any("'calls'" in text for text in said)


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(kind: str, stage: int, tier: str, folder: str) -> None:
    model = net(width=53, depth=1)
    build = {**OPTIMIZERS, "AdamW": partial(torch.optim.AdamW, lr=0.0), "RMSprop": partial(torch.optim.RMSprop, lr=0.0)}
    torch.optim.AdamW([torch.zeros(1)])  # from now on torch has hooks around the step of this class too
    optimizer = build[kind](model.parameters())
    engine = start(model, settings_of(stage, tier, folder, gradient_accumulation_steps=2), optimizer=optimizer)
    outer: Any = engine.optimizer
    calls: list[tuple[str, Any]] = []
    rates: list[float] = []

    def note(name: str) -> Callable[..., None]:
        return lambda of, args, kwargs: calls.append((name, of))

    def faster(of: Any, args: Any, kwargs: Any) -> None:
        assert args == (of,)
        assert kwargs == {}
        of.param_groups[0]["lr"] = 0.5

    def look(of: Any, args: Any, kwargs: Any) -> None:
        rates.append(of.param_groups[0]["lr"])

    before = weights_of(engine.module)
    handles = [
        register_optimizer_step_pre_hook(note("all, before")),
        register_optimizer_step_post_hook(note("all, after")),
        optimizer.register_step_pre_hook(note("instance, before")),
        optimizer.register_step_post_hook(note("instance, after")),
        outer.register_step_pre_hook(note("outer, before")),
        outer.register_step_post_hook(note("outer, after")),
        outer.register_step_pre_hook(faster),
        outer.register_step_post_hook(look),
    ]
    try:
        for step in all_batches(4):
            train_engine(engine, [step])
    finally:
        for handle in handles:
            handle.remove()
    each = [
        ("all, before", outer),
        ("instance, before", optimizer),
        ("outer, before", outer),
        ("instance, after", optimizer),
        ("outer, after", outer),
        ("all, after", outer),
    ]
    assert [name for name, _ in calls] == [name for name, _ in each] * 2
    assert all(of is expected for (_, of), (_, expected) in zip(calls, each * 2, strict=True))
    assert rates == [0.75, 0.75] if kind == "faster AdamW" else rates == [0.5, 0.5]
    after = weights_of(engine.module)
    assert max((after[name] - before[name]).abs().max() for name in after) > 0.1
    train_engine(engine, all_batches(2))
    assert len(calls) == 12


@pytest.mark.parametrize(
    ("kind", "stage", "tier"),
    [
        ("AdamW", 2, ""),
        ("faster AdamW", 3, ""),
        ("faster AdamW", 2, "nvme"),
        more("RMSprop", 2, "nvme"),
        more("AdamW", 3, "cpu"),
        more("RMSprop", 0, ""),
    ],
)
def test_hooks_of_a_step_run_once_and_may_set_the_rate(on_ranks, tmp_path, kind, stage, tier):
    on_ranks(2, hooked, kind, stage, tier, str(tmp_path))


def hooks_and_overflow() -> list[str]:
    model = nn.Linear(8, 8, bias=False)
    engine = start(model, config(1, fp16={"enabled": True, "initial_scale_power": 4}))
    calls: list[str] = []
    engine.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        factor = float("inf") if step == 1 and rank() == 0 else 1.0
        engine.backward(engine(torch.ones(2, 8).half()).float().sum() * factor)
        engine.step()
    engine.optimizer.register_step_pre_hook(lambda of, args, kwargs: ((of, None), {}))
    before = weights_of(model)
    engine.backward(engine(torch.ones(2, 8).half()).float().sum())
    with pytest.raises(RuntimeError, match="pre-hook"):
        engine.step()
    assert torch.equal(before["weight"], weights_of(model)["weight"])
    return calls


def test_a_skipped_step_calls_no_hooks_and_new_arguments_are_refused(on_ranks):
    for calls in on_ranks(2, hooks_and_overflow):
        assert calls == ["before", "after", "before", "after", "before"]


def reading_hook(overlap: bool) -> None:
    """A list of parameters made before the step, read in a hook: what a moving average does."""
    model = net()
    engine = start(model, config(2, zero_optimization={"overlap_comm": overlap}))
    every = list(model.parameters())
    seen: list[list[torch.Tensor]] = []
    engine.optimizer.register_step_post_hook(lambda *_: seen.append([p.detach().clone() for p in every]))
    for step in all_batches(2):
        train_engine(engine, [step])
        assert all(torch.equal(a, b) for a, b in zip(seen[-1], engine.module.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_hook_after_the_step_reads_the_new_weights(on_ranks, overlap):
    on_ranks(2, reading_hook, overlap)


# -- the instance that the user holds ----------------------------------------------------------------------------------


def held_by_the_user() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = start(model, settings_of(2, "", ""), optimizer=optimizer)
    outer: Any = engine.optimizer
    for refused in (optimizer.step, optimizer.state_dict, partial(optimizer.add_param_group, {"params": []})):
        with pytest.raises(RuntimeError, match=r"engine\.|cannot be added after initialize"):
            refused()
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()
    assert not hasattr(outer, "train")
    assert not hasattr(outer, "nothing_like_it")
    # Schedulers made before and after count steps as ever.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    again = net()
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    earlier = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    second = start(again, settings_of(2, "", ""), optimizer=other)
    for trained, rate in ((engine, scheduler), (second, earlier)):
        train_engine(trained, all_batches(1))
        rate.step()
        assert trained.get_lr() == [0.05]
    engine.destroy()
    # Nobody is there to answer: the instance is torch's again, and may have another engine.
    del engine, outer
    third = start(model, settings_of(2, "", ""), optimizer=optimizer)
    train_engine(third, all_batches(1))


def test_the_users_instance_answers_as_the_engines_optimizer(on_ranks):
    on_ranks(2, held_by_the_user)


def without_train_mode(tier: str, folder: str) -> None:
    """What the class refuses has changed nothing."""
    found = []
    for forgets in (True, False):
        model = net()
        optimizer = AdamWScheduleFree(model.parameters(), lr=0.1)
        engine = start(model, settings_of(2, tier, folder), optimizer=optimizer)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        if forgets:
            with pytest.raises(Exception, match="not in train mode"):
                engine.step()
        optimizer.train()
        engine.step()
        train_engine(engine, all_batches(2))
        found.append(weights_of(engine.module))
        assert engine.global_steps == 3
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("tier", ["", "nvme"])
def test_schedule_free_says_what_it_says_in_torch(on_ranks, tmp_path, tier):
    on_ranks(2, without_train_mode, tier, str(tmp_path))


class Perturbing(Counting):
    def first_step(self) -> None:
        raise AssertionError("never called")


def other_methods() -> None:
    model = net()
    engine = start(model, settings_of(2, "", ""), optimizer=Perturbing(model.parameters()))
    with pytest.raises(AttributeError, match=r"Perturbing.*first_step\(\) is not supported"):
        engine.optimizer.first_step()
    assert engine.optimizer.calls == 0


def test_methods_that_would_see_no_weights_are_refused(on_ranks):
    on_ranks(1, other_methods)


def apart() -> str:
    model = net()
    engine = start(model, settings_of(2, "", ""), optimizer=AdamWScheduleFree(model.parameters()))
    engine.optimizer.train()
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    with pytest.raises(RuntimeError) as caught:
        engine.step() if rank() else engine.optimizer.eval()
    return str(caught.value)


def test_a_rank_that_steps_while_another_calls_a_method_is_named(on_ranks):
    for text in on_ranks(2, apart):
        assert "rank 1 calls engine.step(), but rank 0 calls optimizer.eval()" in text


# -- refused -----------------------------------------------------------------------------------------------------------


class Eager(Counting):
    """Makes its states in the constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = torch.zeros_like(p)


class Summed(torch.optim.Adagrad):
    """Its base class makes states in the constructor."""


def patched(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.step = lambda closure=None: None  # type: ignore[method-assign]
    return made


def refused() -> None:
    for build, says in (
        (partial(Prodigy, lr=1.0), r"Prodigy cannot run.*step size from all parameters.*stage 0.*fsdp_in_use"),
        (AdamWScheduleFreeClosure, "AdamWScheduleFreeClosure.*closure"),
        (Eager, "Eager.*constructor"),
        (partial(Summed, lr=0.1), "Summed.*constructor"),
        (patched, "SGD.*`step`"),
    ):
        with pytest.raises(ValueError, match=says):
            start(Net(), settings_of(2, "", "", zero_allow_untested_optimizer=True), optimizer=build)


def test_what_cannot_be_stepped_is_refused_by_name(on_ranks):
    on_ranks(2, refused)


def rates_that_part(stage: int, way: str) -> str:
    model = net(width=53, depth=1)

    def by_step(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step * (1 + rank())))

    def by_metric(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    schedule = {"lambda": by_step, "plateau": by_metric}.get(way)
    engine = start(model, config(stage, log_level="warning"), lr_scheduler=schedule)
    said = ""
    for step, (x, y) in enumerate(batches(4)):
        if way == "by hand" and step == 1:
            engine.optimizer.param_groups[0]["lr"] *= 1 + rank()
        engine.backward(engine(x, y))
        try:
            # A metric of this rank's own: it gets worse on one of them.
            engine.step(lr_kwargs={"metrics": float(step * (2 * rank() - 1))} if way == "plateau" else None)
        except RuntimeError as error:
            said = str(error)
            break
    assert engine.global_steps < 4
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("stage", "way"),
    [(3, "plateau"), (2, "lambda"), (0, "by hand"), more(0, "plateau"), more(3, "lambda"), more(3, "by hand")],
)
def test_rates_that_part_between_ranks_are_named_before_the_step(on_ranks, stage, way):
    first, second = on_ranks(2, rates_that_part, stage, way)
    assert first == second
    assert "param_groups[0]['lr'] of the optimizer is" in first
    assert "on rank 0 and" in first
    assert "on rank 1 before a step" in first


def test_a_users_own_class_is_known_by_its_states_on_any_tier():
    """What it steps never passes through a GPU by itself."""
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    own = choose(torch.optim.NAdam(parameters), None, parameters, model)
    assert [kept.by_own_class for chosen in (own, for_disk(own)) for kept in chosen.states_of_groups()] == [True, True]
    ours = choose(torch.optim.AdamW(parameters), None, parameters, model)
    assert not any(kept.by_own_class for kept in ours.states_of_groups())


# -- values that are written during the run ----------------------------------------------------------------------------


MOMENTA = [0.0, 0.0, 0.9, 0.9, 0.0, 0.5, 0.5, 0.5]


def raise_momentum(folder: str, settings: dict[str, Any], hyper: dict[str, Any], momenta: list[float]) -> list[Any]:
    """SGD whose momentum is written to one of its groups step by step, as plain torch does it. In the middle an engine
    that begins without momentum goes on from a checkpoint.
    """
    torch.manual_seed(3)
    model, plain = Net(width=32), Net(width=32)  # whole vectors: torch's kernels round what is left over otherwise
    plain.load_state_dict(model.state_dict())
    halves = {id(of): [list(of.parameters())[:3], list(of.parameters())[3:]] for of in (model, plain)}
    given = [{"params": half, "lr": 0.05} for half in halves[id(model)]]
    optimizer = torch.optim.SGD([{"params": half} for half in halves[id(plain)]], lr=0.05, fused=True, **hyper)
    begin = {"type": "SGD", "params": {"lr": 0.05, **hyper}}
    engine = start(model, config(2, optimizer=begin, **settings), model_parameters=given)
    generator, told = torch.Generator().manual_seed(0), []
    for step, momentum in enumerate(momenta):
        if step == 5:
            engine.save_checkpoint(folder)
            engine.destroy()
            model = Net(width=32)
            half = [list(model.parameters())[:3], list(model.parameters())[3:]]
            engine = start(
                model, config(2, optimizer=begin, **settings), model_parameters=[{"params": h} for h in half]
            )
            engine.load_checkpoint(folder)
        for group in (engine.optimizer.param_groups[1], optimizer.param_groups[1]):
            group["momentum"] = momentum
        x = torch.randint(0, 31, (4, 7), generator=generator)
        engine.backward(engine(x, x))
        engine.step()
        plain(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if first_difference(weights_of(engine.module), weights_of(plain)) is not None:
            told.append(step)
    held, planned = (
        {tier: of(tier).states for tier in Tier}
        for of in (engine.model_memory.held_bytes, engine.model_memory.planned_bytes)
    )
    return [told, held == planned, sum(held.values()) > 0, bool(engine.describe())]


@pytest.mark.parametrize("hyper", [{}, more({"dampening": 0.3, "weight_decay": 0.01})])
@pytest.mark.parametrize("tier", ["device", "disk", more("host"), more("half"), more("all on disk")])
@pytest.mark.parametrize("world", [1, more(2)])
def test_momentum_may_be_raised_during_the_run_as_in_torch(on_ranks, tmp_path, world, tier, hyper):
    zero = {"zero_optimization": tiers_of(str(tmp_path))[tier]}
    for found in on_ranks(world, raise_momentum, str(tmp_path / "saved"), zero, hyper, MOMENTA):
        assert found == [[], True, True, True]


@pytest.mark.parametrize("stage", [3, more(0), more(1)])
def test_momentum_may_be_raised_in_every_stage(on_ranks, tmp_path, stage):
    zero = {"zero_optimization": {"stage": stage}}
    for hyper in ({"dampening": 0.3}, {"nesterov": True, "momentum": 0.9}):
        for found in on_ranks(2, raise_momentum, str(tmp_path / str(len(hyper))), zero, hyper, MOMENTA):
            assert found == [[], True, True, True]


def write_value(optimizer: Any, key: str, value: Any, stage: int, is_only_here: bool) -> list[Any]:
    """What the next step raises; whether anything has changed; and whether the run goes on with the old value."""
    model = net()
    given = {"optimizer": optimizer} if isinstance(optimizer, dict) else {"optimizer": None}
    instance = {} if isinstance(optimizer, dict) else {"optimizer": optimizer(model)}
    engine = start(model, config(stage, **given), **instance)
    train(engine, 1)
    group, before = engine.optimizer.param_groups[0], weights_of(model)
    old = dict(group)
    if not is_only_here or rank() == 1:
        group[key] = value
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    told = ""
    for _ in range(1 if is_only_here else 2):  # it is not accepted the second time either
        try:
            engine.step()
            told = ""
        except (ValueError, RuntimeError) as error:
            told = str(error)
    same = first_difference(weights_of(model), before) is None
    group.pop(key, None)
    group.update(old)
    engine.step()
    return [told, same, first_difference(weights_of(model), before) is not None]


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
MUON = {"type": "Muon", "params": {}}


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters())


@pytest.mark.parametrize(("optimizer", "key", "value", "told"), [
    (ADAMW, "lr", -1, "optimizer.param_groups[0].lr = -1: expected at least 0"),
    (ADAMW, "lr", "x", "optimizer.param_groups[0].lr = 'x': expected a number"),
    (ADAMW, "lr", float("nan"), "optimizer.param_groups[0].lr = nan: expected a number"),
    (ADAMW, "lr", torch.tensor(-1.0), "optimizer.param_groups[0].lr = -1.0: expected at least 0"),
    (ADAMW, "lr", None, "optimizer.param_groups[0].lr = None: expected a number"),
    (ADAMW, "betas", (0.9, 0.9, 0.9), "optimizer.param_groups[0].betas = [0.9, 0.9, 0.9]: expected a list of 2"),
    (ADAMW, "betas", (0.9, 1.0), "optimizer.param_groups[0].betas[1] = 1.0: expected"),
    (ADAMW, "amsgrad", True, "optimizer.param_groups[0]: amsgrad needs the state max_exp_avg_sq"),
    (ADAMW, "learning_rate", 0.1, "optimizer.param_groups[0].learning_rate: no optimizer reads it. Did you mean"),
    (ADAMW, "momentum", 0.1, "optimizer.param_groups[0].momentum: optimizer AdamW does not use it"),
    (MUON, "adjust_lr_fn", "nonsense", "optimizer.param_groups[0].adjust_lr_fn = 'nonsense': expected one of"),
    (MUON, "use_muon", False, "optimizer.param_groups[0].use_muon was True at initialize and is False now"),
    (MUON, "muon_lr", 0.1, "optimizer.param_groups[0].muon_lr: optimizer Muon does not use it"),
    (MUON, "ns_steps", 0, "optimizer.param_groups[0].ns_steps = 0: expected"),
    (nadam, "lr", "x", "optimizer.param_groups[0].lr = 'x': expected a number"),
    (nadam, "lr", -1, "optimizer.param_groups[0].lr = -1: expected at least 0"),
    (nadam, "betas", (0.9,), "optimizer.param_groups[0].betas = (0.9,): expected a list of 2 numbers"),
])  # fmt: skip
def test_a_value_that_is_written_during_the_run_is_checked(on_ranks, optimizer, key, value, told):
    for found in on_ranks(2, write_value, optimizer, key, value, 2, False):
        assert found[0].startswith(told), found[0]
        assert found[1:] == [True, True]


def test_a_value_that_one_rank_alone_writes_is_told_on_all(on_ranks):
    for found in on_ranks(2, write_value, ADAMW, "lr", -1, 2, True):
        assert "param_groups[0]['lr'] of the optimizer is 0.001 on rank 0 and -1 on rank 1" in found[0]
        assert found[1:] == [True, True]


def write_in_hook() -> str:
    engine = start(net(), config(2, optimizer=ADAMW))
    engine.optimizer.register_step_pre_hook(lambda of, *_: of.param_groups[0].update(lr=-1.0))
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr = -1.0: expected at least 0"):
        train(engine, 1)
    return "raised"


def test_a_value_that_a_hook_writes_is_checked(on_ranks):
    assert on_ranks(2, write_in_hook) == ["raised"] * 2
