"""Wires beside everything else that an engine does: overflows, clipping, accumulation, writes from outside,
checkpoints, frozen weights, tiers, odd shapes and worlds. Second shards are never old, and no rank computes with other
weights than the rest.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import (
    VOCABULARY,
    Net,
    batches,
    config,
    first_difference,
    more,
    net,
    one_in,
    precision,
    rank,
    start,
    train,
    weights_of,
)
from test_cases import CASES as OTHER_CASES
from test_memory import storages_alive
from test_stage3 import CASES, LIMITS, differing, fit
from torch import nn

import onefold
from onefold.comm import ErrorFeedback, Ledger, Wires, data_group, make_collective
from onefold.comm.codec import Codec
from onefold.comm.collective import Reduction
from onefold.config import ConfigError
from onefold.plan import Feedback, Tier
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

CPU = {"device": "cpu"}
HPZ = {"zero_hpz_partition_size": 2}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
KEYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": HPZ,
    "qwZ": QWZ,
    "qgZ": QGZ,
    "LoCo": {**QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64}},
    "all": {**HPZ, **QWZ, **QGZ},
    "all and LoCo": {**HPZ, **QWZ, **QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64}},
    "frozen": {"zero_quantized_nontrainable_weights": True},
}
NOTHING_KEPT = LIMITS["none"]
SGD = {"type": "SGD", "params": {"lr": 0.5}}

Weights = dict[str, torch.Tensor]


def wired(name: str, *, dtype: str = "bf16", node: int = 2, stage: int = 3, **more: Any) -> dict[str, Any]:
    """The config of a job on hosts of `node` ranks. Nothing is kept whole, so that every use gathers."""
    zero = {**NOTHING_KEPT, **KEYS[name], **more.pop("zero", {})}
    extra = {"node_size": node, **more.pop("onefold", {})}
    return config(stage, zero_optimization=zero, onefold=extra, **{**precision(dtype), **more})


def small(**shape: Any) -> Net:
    return net(depth=2, **shape)


def masters_of(engine: Any) -> Weights:
    """What is trained, in full precision."""
    pairs = ((name, safe_get_full_fp32_param(p)) for name, p in engine.module.named_parameters())
    return {name: master for name, master in pairs if master is not None}


def own_masters(engine: Any) -> list[torch.Tensor]:
    """This rank's part of what is trained."""
    runs = [run for unit in engine.state.schedule.units for run in unit.trained_params]
    return [run.store.master.tensor.clone() for run in runs]


def evaluate(engine: Any, seed: int = 9) -> float:
    x, y = batches(1, seed=seed)[0]
    engine.eval()
    with torch.no_grad():
        loss = engine(x, y).item()
    engine.train()
    return loss


def evaluate_alike(engine: Any) -> list[float]:
    """What comes out of one batch that all ranks have: they differ where weights do."""
    x = torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    engine.eval()
    with torch.no_grad():
        out: list[float] = engine.module.logits(x).flatten().tolist()
    engine.train()
    return out


def step(engine: Any, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> float:
    loss = engine(x, y)
    engine.backward(loss * factor)
    engine.step()
    return loss.item()


def adapted(**shape: Any) -> Net:
    """A frozen base: linear layers; what else there is is trained, so that units hold both kinds."""
    model = small(**shape)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" not in name and "down" not in name)
    return model


def agree(found: list[Weights]) -> bool:
    """Whether every rank computes with the same weights."""
    return all(differing(found[0], other) == [] for other in found[1:])


# -- overflow ---------------------------------------------------------------------------------------------------


def overflow_on_one_rank(name: str, stage: int, accumulation: int) -> tuple[list[tuple[Any, ...]], list[float]]:
    scaling = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    settings = wired(name, dtype="fp32", fp16=scaling, stage=stage, gradient_accumulation_steps=accumulation)
    engine = start(small(), settings)
    found = []
    for number in range(5):
        before, scale = own_masters(engine), engine.optimizer.loss_scale
        for x, y in batches(accumulation, seed=number):
            # The last rank alone; what the others reduce is finite.
            loss = step(engine, x, y, 1e7 if number == 2 and rank() == 3 else 1.0)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, own_masters(engine), strict=True))
        found.append(
            (engine.was_step_applied(), engine.skipped_steps, engine.optimizer.loss_scale / scale, unchanged, loss)
        )
    alike = evaluate_alike(engine)
    engine.destroy()
    return found, alike


@covering(
    name=("qgZ", "all and LoCo", more("LoCo"), more("all")),
    stage=(2, 3, more(0), more(1)),
    accumulation=(1, 2),
    where=lambda name, stage, **_: stage == 3 or not name.startswith("all"),
    strength=1,
)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_over_with_the_step(on_ranks, name, stage, accumulation):
    found = on_ranks(4, overflow_on_one_rank, name, stage, accumulation)
    plain = on_ranks(4, overflow_on_one_rank, "stage 3", stage, accumulation)
    for (steps, alike), (reference, _) in zip(found, plain, strict=True):
        assert alike == found[0][1]
        assert [applied for applied, *_ in steps] == [True, True, False, True, True]
        assert [skipped for _, skipped, *_ in steps] == [0, 0, 1, 1, 1]
        assert [ratio for _, _, ratio, *_ in steps] == [1, 1, 0.5, 1, 1]
        if any(not unchanged for *_, unchanged, _ in steps):  # a rank may hold nothing but padding
            assert [unchanged for *_, unchanged, _ in steps] == [False, False, True, False, False]
        assert [loss for *_, loss in steps] == pytest.approx([loss for *_, loss in reference], rel=2e-2)


def scale_comes_down(name: str) -> tuple[int, float, float]:
    """One batch again and again, until the scale is one that its gradients fit: skipped steps, scale, norm."""
    scaling = {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}
    engine = start(small(), wired(name, dtype="fp32", fp16=scaling))
    x, y = batches(1)[0]
    while not engine.was_step_applied():
        step(engine, x, y)
        assert engine.skipped_steps < 24
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return engine.skipped_steps, engine.optimizer.loss_scale, norm


@covering(name=("LoCo", more("qgZ")))
def test_skipped_steps_leave_nothing_behind(on_ranks, name):
    """Errors that are fed back must not be those of a gradient that nobody used, at another scale."""
    plain, coded = on_ranks(4, scale_comes_down, "stage 3"), on_ranks(4, scale_comes_down, name)
    for (skipped, scale, norm), (others, other, found) in zip(plain, coded, strict=True):
        assert skipped > 2
        assert (others, other) == (skipped, scale)
        assert found == pytest.approx(norm, rel=2e-2)


# -- norm and clipping ------------------------------------------------------------------------------------------


def clipped(name: str) -> dict[str, Any]:
    """Plain SGD: what a step changes is the rate times the clipped gradient."""
    engine = start(small(), wired(name, gradient_clipping=0.1, optimizer=SGD))
    found: dict[str, Any] = {"norms": [], "by hand": [], "far": []}
    for x, y in batches(1):
        engine.backward(engine(x, y))
        gradients = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
        before = masters_of(engine)
        engine.step()
        after = masters_of(engine)
        found["norms"].append(engine.get_global_grad_norm())
        found["by hand"].append(norm)
        for key in before:
            expected = before[key] - 0.5 * min(1.0, 0.1 / (norm + 1e-6)) * gradients[key]
            found["far"].append((after[key] - expected).abs().max().item())
    found["alike"] = evaluate_alike(engine)
    engine.destroy()
    return found


@covering(name=("all", "LoCo", more("qgZ")))
def test_the_norm_is_that_of_the_decoded_sum(on_ranks, name):
    found = on_ranks(4, clipped, name)
    for each in found:
        assert each["alike"] == found[0]["alike"]
        assert each["norms"] == found[0]["norms"]
        assert each["norms"] == pytest.approx(each["by hand"], rel=1e-5)
        assert min(each["norms"]) > 0.1
        assert max(each["far"]) < 1e-6


# -- accumulation -----------------------------------------------------------------------------------------------


def accumulated(name: str, how: str) -> dict[str, Any]:
    """Two windows of three micro-steps; beside losses of training, those of what is evaluated in between."""
    counts = {} if how == "no_sync" else {"gradient_accumulation_steps": 3}
    engine = start(small(), wired(name, dtype="fp32", **counts))
    losses, between = [], []
    for number, (x, y) in enumerate(batches(6)):
        if how == "evaluated" and number % 3:
            between.append(evaluate(engine, seed=number))
        loss = engine(x, y)
        losses.append(loss.item())
        if how == "no_sync" and number % 3 < 2:
            with engine.no_sync():
                engine.backward(loss / 3)
        else:
            engine.backward(loss / 3 if how == "no_sync" else loss)
            engine.step()
    found = {
        "losses": losses,
        "between": between,
        "alike": evaluate_alike(engine),
        "weights": weights_of(engine.module),
    }
    engine.destroy()
    return found


def accumulated_all(names: list[str], hows: list[str]) -> dict[tuple[str, str], Any]:
    return {(name, how): accumulated(name, how) for name in names for how in hows}


@pytest.mark.parametrize(
    ("names", "hows"),
    [
        (["stage 3", "all"], ["plain", "evaluated"]),
        more(["stage 3", "hpZ"], ["plain", "evaluated"]),
        more(["stage 3", "hpZ", "all"], ["plain", "no_sync"]),
        more(["stage 3", "qwZ", "qgZ"], ["plain", "evaluated", "no_sync"]),
        more(["stage 3", "LoCo", "all and LoCo"], ["plain", "evaluated", "no_sync"]),
    ],
)
def test_micro_steps_add_up_whatever_happens_between_them(on_ranks, names, hows):
    found = on_ranks(4, accumulated_all, names, hows)
    for each in found:
        for (name, how), run in each.items():
            plain, exact = each[name, "plain"], each["stage 3", how]
            assert run["alike"] == found[0][name, how]["alike"], (name, how)
            assert run["losses"] == plain["losses"], (name, how)
            assert differing(run["weights"], plain["weights"]) == [], (name, how)
            assert run["losses"] == pytest.approx(exact["losses"], rel=2e-2)
            assert run["between"] == pytest.approx(exact["between"], rel=2e-2)
            if name == "hpZ":
                assert run["losses"] + run["between"] == exact["losses"] + exact["between"]
                assert differing(run["weights"], exact["weights"]) == []


# -- writes from outside: no second shard is old ----------------------------------------------------------------


def halve(engine: Any) -> None:
    with onefold.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        if rank() == 0:
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)


def write_gathered(engine: Any, folder: str) -> None:
    halve(engine)


def write_state_dict(engine: Any, folder: str) -> None:
    engine.module.load_state_dict({name: weight * 0.5 for name, weight in weights_of(engine.module).items()})


def write_masters(engine: Any, folder: str) -> None:
    for parameter in engine.module.parameters():
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            safe_set_full_fp32_param(parameter, master * 0.5)


def write_own_masters(engine: Any, folder: str) -> None:
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 0.5)


def write_checkpoint(engine: Any, folder: str) -> None:
    engine.load_checkpoint(folder, tag="first")


def write_checkpoint_by_hand(engine: Any, folder: str) -> None:
    engine.load_checkpoint(folder, tag="first", custom_load_fn=lambda src, dst: dst.load_state_dict(src, strict=False))


def write_safetensors(engine: Any, folder: str) -> None:
    onefold.zero.load_safetensors(engine.module, f"{folder}/weights")


WAYS: dict[str, Callable[[Any, str], None]] = {
    "GatheredParameters": write_gathered,
    "load_state_dict": write_state_dict,
    "safe_set_full_fp32_param": write_masters,
    "safe_set_local_fp32_param": write_own_masters,
    "load_checkpoint": write_checkpoint,
    "load_checkpoint by hand": write_checkpoint_by_hand,
    "load_safetensors": write_safetensors,
}


def written(names: list[str], way: str, folder: str) -> dict[str, Any]:
    found = {}
    for name in names:
        engine = start(adapted(), wired(name))
        engine.save_checkpoint(f"{folder}/{name}", tag="first")
        engine.save_16bit_model(f"{folder}/{name}/weights")
        halve(engine)  # frozen ones too, so that what was saved is not what is there
        losses = [step(engine, x, y) for x, y in batches(1)]
        losses.append(evaluate(engine))  # whatever is gathered once has a second shard now
        WAYS[way](engine, f"{folder}/{name}")
        losses.append(evaluate(engine))
        losses += [step(engine, x, y) for x, y in batches(1, seed=3)]
        found[name] = losses, evaluate_alike(engine), weights_of(engine.module)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "way",
    [
        more("GatheredParameters"),
        "safe_set_local_fp32_param",
        more("load_checkpoint"),
        more("load_safetensors"),
        more("load_state_dict"),
        more("safe_set_full_fp32_param"),
        more("load_checkpoint by hand"),
    ],
)
def test_what_is_written_from_outside_is_what_is_gathered_next(on_ranks, tmp_path, way):
    found = on_ranks(4, written, ["stage 3", "hpZ"], way, str(tmp_path))
    for each in found:
        assert each["hpZ"][:2] == each["stage 3"][:2]
        assert differing(each["hpZ"][2], each["stage 3"][2]) == []


@pytest.mark.parametrize("way", one_in(8, WAYS))
def test_what_is_written_from_outside_is_gathered_next_with_all_wires(on_ranks, tmp_path, way):
    found = on_ranks(4, written, ["stage 3", "all"], way, str(tmp_path))
    for each in found:
        assert each["all"][1] == found[0]["all"][1]
        assert each["all"][0] == pytest.approx(each["stage 3"][0], rel=2e-2)


def written_by_one_rank(name: str) -> tuple[list[float], Weights]:
    """Functions that say `local` need no other rank."""
    engine = start(small(), wired(name))
    losses = [step(engine, x, y) for x, y in batches(1)]
    losses.append(evaluate(engine))
    if rank() == 0:
        parameter = engine.module.embed.weight
        safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 0.5)
    losses.append(evaluate(engine))
    losses += [step(engine, x, y) for x, y in batches(1, seed=3)]
    weights = weights_of(engine.module)
    engine.destroy()
    return losses, weights


def test_one_rank_may_write_its_own_part_alone(on_ranks):
    plain, second = on_ranks(4, written_by_one_rank, "stage 3"), on_ranks(4, written_by_one_rank, "hpZ")
    for (losses, weights), (others, found) in zip(plain, second, strict=True):
        assert others == losses
        assert differing(weights, found) == []


def written_without_optimizer(names: list[str], folder: str) -> dict[str, list[float]]:
    """An engine that only evaluates."""
    saver = start(small(seed=50), wired("stage 3"))
    saver.save_checkpoint(folder, tag="other")
    saver.destroy()
    found = {}
    for name in names:
        settings = wired(name)
        del settings["optimizer"]
        engine = start(small(), settings)
        found[name] = [evaluate(engine)]
        engine.load_checkpoint(folder, tag="other", load_optimizer_states=False)
        found[name].append(evaluate(engine))
        engine.destroy()
    return found


def test_an_engine_that_only_evaluates_takes_a_checkpoint_up(on_ranks, tmp_path):
    for found in on_ranks(4, written_without_optimizer, ["stage 3", "hpZ"], str(tmp_path)):
        assert found["hpZ"] == found["stage 3"]
        assert found["hpZ"][0] != found["hpZ"][1]


def failed_and_went_on(name: str) -> list[Any]:
    """One gather of the third pass cannot be started, on any rank; the step is tried again."""
    engine = start(small(), wired(name, dtype="fp32"))
    data = batches(4)
    for x, y in data[:2]:
        step(engine, x, y)
    collective, calls = engine.state.schedule.in_flight.collective, iter(range(10**6))
    starts = collective.start_gather

    def once_not(gatherings: Any) -> Any:
        if next(calls) == 1:
            raise OSError("the disk is gone")
        return starts(gatherings)

    with mock.patch.object(collective, "start_gather", once_not), pytest.raises(OSError, match="the disk is gone"):
        step(engine, *data[2])
    found = [step(engine, x, y) for x, y in data[2:]] + [evaluate(engine)]
    engine.destroy()
    return found


def test_a_gather_that_could_not_be_started_leaves_no_old_second_shard_behind(on_ranks):
    plain, second = on_ranks(4, failed_and_went_on, "stage 3"), on_ranks(4, failed_and_went_on, "hpZ")
    assert second == plain


# -- what leaves the engine is exact ----------------------------------------------------------------------------


def handed_out(name: str, folder: str) -> dict[str, list[str]]:
    """Names of the weights that are not the masters, rounded as they compute; frozen ones as they were built."""
    model = adapted()
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    built = {key: parameter.detach().bfloat16() for key, parameter in model.named_parameters()}
    engine = start(model, wired(name))
    for x, y in batches(2):
        step(engine, x, y)
    expected = built | {key: master.bfloat16() for key, master in masters_of(engine).items()}

    def wrong(found: Weights) -> list[str]:
        return [key for key in expected if found and not torch.equal(found[key], expected[key])]

    found = {"module_state_dict": wrong(engine.module_state_dict())}
    engine.save_16bit_model(folder)
    if rank() == 0:
        from safetensors.torch import load_file

        found["save_16bit_model"] = wrong(load_file(f"{folder}/model.safetensors"))
    found["GatheredParameters"] = wrong(weights_of(engine.module))
    engine.destroy()
    found["destroyed"] = wrong(weights_of(model))
    again = start(model, wired("stage 3"))
    found["a new engine"] = wrong(weights_of(again.module))
    again.destroy()
    return found


@covering(name=("all", "frozen", more("qwZ"), more("hpZ")))
def test_what_leaves_the_engine_was_never_rounded(on_ranks, tmp_path, name):
    for found in on_ranks(4, handed_out, name, str(tmp_path)):
        assert {way: names for way, names in found.items() if names} == {}


def written_in_part(name: str) -> tuple[list[str], list[str]]:
    """Masters that a write to other parameters has changed, and resting frozen shards that it has changed."""
    engine = start(adapted(), wired(name, dtype="fp32"))
    for x, y in batches(2):
        step(engine, x, y)
    before, frozen = masters_of(engine), frozen_shards(engine)
    with onefold.zero.GatheredParameters([engine.module.blocks[0].norm.weight], modifier_rank=0), torch.no_grad():
        engine.module.blocks[0].norm.weight.zero_()
    engine.module.load_state_dict({"blocks.1.norm.weight": torch.zeros(21)}, strict=False)
    after, frozen_after = masters_of(engine), frozen_shards(engine)
    changed = set(differing(before, after)) - {"blocks.0.norm.weight", "blocks.1.norm.weight"}
    moved = [number for number, shard in enumerate(frozen) if not torch.equal(shard, frozen_after[number])]
    engine.destroy()
    return sorted(changed), [str(number) for number in moved]


def frozen_shards(engine: Any) -> list[torch.Tensor]:
    runs = [
        run
        for unit in engine.state.schedule.units
        for run in unit.params
        if not run.trainable and run.store.param is not None
    ]
    return [run.store.param.values.clone() for run in runs]


@covering(name=("all", "hpZ", more("frozen"), more("qwZ"), more("stage 3")))
def test_writing_some_weights_rounds_no_others(on_ranks, name):
    for changed, moved in on_ranks(4, written_in_part, name):
        assert changed == []
        assert moved == []


# -- checkpoints ------------------------------------------------------------------------------------------------


def resumed(name: str, folder: str) -> dict[str, Any]:
    settings = wired(name, gradient_clipping=0.3)
    straight = start(small(), settings)
    train(straight, 2)
    straight.save_checkpoint(folder)
    found = {"straight": train(straight, 2, seed=1)}
    # It has gone on since, and goes back.
    straight.load_checkpoint(folder)
    found["taken back"] = train(straight, 2, seed=1)
    straight.destroy()
    other = start(small(seed=77), settings)
    other.load_checkpoint(folder)
    found["taken up"] = train(other, 2, seed=1)
    other.destroy()
    return found


@covering(name=("all", more("qgZ"), more("hpZ"), more("qwZ")))
def test_a_resumed_run_equals_the_uninterrupted_one(on_ranks, tmp_path, name):
    for found in on_ranks(4, resumed, name, str(tmp_path)):
        assert first_difference(found["taken up"], found["straight"]) is None
        assert first_difference(found["taken back"], found["straight"]) is None


def test_error_feedback_starts_over_with_a_checkpoint(on_ranks, tmp_path):
    """Errors are not saved; those of another run must not come in either."""
    for found in on_ranks(4, resumed, "LoCo", str(tmp_path)):
        assert first_difference(found["taken back"], found["taken up"]) is None
        assert found["taken up"].losses == pytest.approx(found["straight"].losses, rel=2e-2)


# -- frozen weights ---------------------------------------------------------------------------------------------


def frozen_base(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        engine = start(adapted(), wired(name))
        resting = frozen_shards(engine)
        losses = [step(engine, x, y) for x, y in batches(2)]
        before = engine.ledger.copy()
        losses += [step(engine, x, y) for x, y in batches(1, seed=4)]
        rows = engine.ledger.since(before).rows()
        sent = {row.group: row.bytes for row in rows if row.operation == "gather"}
        totals = [
            (run.layout.total, run.trainable) for unit in engine.state.schedule.units for run in unit.sharded_params
        ]
        same = all(torch.equal(a, b) for a, b in zip(resting, frozen_shards(engine), strict=True))
        before = engine.ledger.copy()
        losses.append(evaluate(engine))
        rows = engine.ledger.since(before).rows()
        evaluated = {row.group: row.bytes for row in rows if row.operation == "gather"}
        found[name] = losses, sent, totals, same and len(resting) > 0, evaluate_alike(engine), evaluated
        engine.destroy()
    return found


def test_frozen_weights_alone_travel_as_integers(on_ranks):
    found = on_ranks(4, frozen_base, ["stage 3", "frozen"])
    for each in found:
        losses, sent, totals, rests, alike, _ = each["frozen"]
        assert alike == found[0]["frozen"][4]
        assert rests
        assert losses == pytest.approx(each["stage 3"][0], rel=2e-2)
        assert losses != each["stage 3"][0]
        # Gathered twice in a step: once to the other host, and both hosts' slices to the neighbour.
        row = sum(2 * total // 4 if trained else Codec(8).row_bytes(total // 4) for total, trained in totals)
        assert sent == {"data": 4 * row, "across": 2 * row}
        plain = sum(2 * total // 4 for total, _ in totals)
        assert each["stage 3"][1] == {"data": 4 * plain, "across": 2 * plain}


def test_frozen_weights_keep_their_second_shard_from_step_to_step(on_ranks):
    """Nothing changes them, so after the first gather they never cross hosts again, in training or evaluation."""
    for each in on_ranks(4, frozen_base, ["stage 3", "hpZ"]):
        losses, sent, totals, rests, alike, evaluated = each["hpZ"]
        assert rests
        assert losses == each["stage 3"][0]
        assert alike == each["stage 3"][4]
        assert sent["across"] == evaluated["across"] == sum(2 * total // 4 for total, trained in totals if trained)


# -- worlds and shapes ------------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """A unit without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Odd(Net):
    """Tied, empty, scalar, frozen, and longer than a shard by one."""

    def __init__(self) -> None:
        super().__init__(depth=2, tied=True)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.gain = nn.Parameter(torch.ones(()))
        self.long = nn.Parameter(torch.randn(4099) * 0.01)
        self.nothing = nn.ModuleList([Nothing(), Nothing()])
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y) * self.gain + self.empty.sum() + self.long.float().square().sum()
        for module in self.nothing:
            loss = module(loss)
        return loss


def odd_model(names: list[str], node: int, second: int, dtype: str) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(5 + rank())
        zero = {"zero_hpz_partition_size": second} if "zero_hpz_partition_size" in KEYS[name] else {}
        engine = start(Odd(), wired(name, node=node, zero=zero, dtype=dtype, gradient_clipping=0.5))
        trace, alike = train(engine, 3), evaluate_alike(engine)
        held = engine.model_memory.held_bytes().parameters == engine.model_memory.planned_bytes().parameters
        found[name] = trace, alike, held and engine.module.head.weight is engine.module.embed.weight
        engine.destroy()
    return found


WORLDS = [
    (3, 3, 3),
    more(4, 2, 2),
    more(3, 1, 3),
    more(4, 1, 2),
    more(4, 4, 2),
    more(2, 2, 2),
    more(2, 1, 2),
    more(4, 2, 4),
]


@pytest.mark.parametrize(("world", "node", "second"), WORLDS)
def test_odd_shapes_train_in_every_world(on_ranks, world, node, second):
    names = ["stage 3", "hpZ", "all and LoCo"]
    found = on_ranks(world, odd_model, names, node, second, "bf16")
    for each in found:
        exact = each["stage 3"][0]
        assert first_difference(each["hpZ"][0], exact) is None
        for name in names:
            trace, alike, well = each[name]
            assert alike == found[0][name][1], name
            assert trace.norms == found[0][name][0].norms
            assert trace.losses == pytest.approx(exact.losses, rel=2e-2), name
            assert well, name


@pytest.mark.parametrize("dtype", ["bf16", more("fp32")])
def test_wires_are_nothing_on_one_rank(on_ranks, dtype):
    names = ["stage 3", "qwZ", "qgZ", "LoCo"]
    for found in on_ranks(1, odd_model, names, 1, 1, dtype):
        for name in names[1:]:
            assert first_difference(found[name][0], found["stage 3"][0]) is None, name


@pytest.mark.parametrize("dtype", [more("fp32"), more("fp16")])
def test_odd_shapes_train_in_other_dtypes(on_ranks, dtype):
    names = ["stage 3", "hpZ", "all"]
    found = on_ranks(4, odd_model, names, 2, 2, dtype)
    for each in found:
        assert each["all"][1] == found[0]["all"][1]
        assert first_difference(each["hpZ"][0], each["stage 3"][0]) is None
        assert each["all"][0].losses == pytest.approx(each["stage 3"][0].losses, rel=2e-2)


# -- ways of running a model ------------------------------------------------------------------------------------


def beside_plain_wires(case: str, label: str) -> dict[str, Weights]:
    build, loss_of, options = EVERY_CASE[case]
    options = {**options, "onefold": {**options.get("onefold", {}), "node_size": 2}}
    return {
        name: fit(build, loss_of, 3, {**LIMITS[label], **KEYS[name]}, **options) for name in ("stage 3", "hpZ", "all")
    }


EVERY_CASE: dict[str, Any] = {**{f"{name}, again": (*case, {}) for name, case in OTHER_CASES.items()}, **CASES}
FIRST = ["two heads on one rank, later"]
# Ranks part from their program in the middle of a pass: gradients come late, and sums may round in another order.
PARTING = {
    "tower that no rank used at first",
    "layer that no rank used at first",
    "two heads on one rank, later",
    "rank-divergent, again",
}


@pytest.mark.parametrize(
    ("case", "label"),
    [
        *((case, "kept") for case in FIRST),
        *(more(case, "none" if case.endswith(", again") else "kept") for case in EVERY_CASE if case not in FIRST),
    ],
)
def test_no_way_of_running_a_model_parts_the_ranks(on_ranks, case, label):
    found = on_ranks(4, beside_plain_wires, case, label)
    for name in ("hpZ", "all"):
        assert agree([each[name] for each in found])
    for each in found:
        if case in PARTING:
            for name, weight in each["stage 3"].items():
                torch.testing.assert_close(each["hpZ"][name], weight, rtol=1e-4, atol=1e-5)
        else:
            assert differing(each["hpZ"], each["stage 3"]) == []


class Detour(Net):
    """One rank comes to a block that no program foresees, late: the others are through with their forward by then."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleList([nn.Linear(21, 21), nn.Linear(21, 21)])
        self.turns = False
        self.store = dist.distributed_c10d._get_default_store()
        self.token = ""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.embed(x))
        if self.turns:
            others = [f"{self.token}/{other}" for other in range(1, dist.get_world_size())]
            self.store.wait(others, timedelta(seconds=60))
            h = h + self.extra[0](h)
        for block in self.blocks[1:]:
            h = block(h)
        h = self.head(h)
        self.store.set(f"{self.token}/{rank()}", "is through")
        return h


def detour(token: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(5 + rank())
        zero = {**LIMITS["ahead"], "stage3_prefetch_bucket_size": 10**9}
        engine = start(Detour(), wired(name, dtype="fp32", zero=zero, onefold={"units": ["Block", "Linear"]}))
        losses, meetings = [], []
        for number, (x, y) in enumerate(batches(4)):
            engine.module.turns = number == 1 and rank() == 0
            engine.module.token = f"{token}/{name}/{number}"
            before = engine.ledger.calls("synchronize")
            losses.append(step(engine, x, y))
            meetings.append(engine.ledger.calls("synchronize") - before)
        engine.module.turns = False
        # The pass that was left is negotiated from there on; the last one is followed again.
        assert meetings[1] > meetings[3], meetings
        found[name] = losses, evaluate_alike(engine)
        engine.destroy()
    return found


@pytest.mark.slow
def test_a_rank_that_parts_late_catches_up_with_second_shards(on_ranks, tmp_path):
    found = on_ranks(4, detour, f"{tmp_path}", ["stage 3", "hpZ", "all"])
    for each in found:
        assert each["hpZ"][1] == found[0]["hpZ"][1]
        assert each["all"][1] == found[0]["all"][1]
        assert each["hpZ"][0] == pytest.approx(each["stage 3"][0], rel=1e-3)
        assert each["all"][0] == pytest.approx(each["stage 3"][0], rel=2e-2)


# -- tiers ------------------------------------------------------------------------------------------------------


def tiers(folder: str) -> dict[str, dict[str, Any]]:
    disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return {
        "device": {},
        "optimizer": {"offload_optimizer": CPU},
        "parameters": {"offload_param": CPU},
        "both": {"offload_optimizer": CPU, "offload_param": CPU},
        "disk": {"offload_optimizer": CPU, "offload_param": {**disk, "buffer_count": 2, "buffer_size": 4096}},
        "all on disk": {"offload_optimizer": disk, "offload_param": disk},
    }


def offloaded(names: list[str], tier: str, extra: dict[str, Any], folder: str) -> dict[str, Any]:
    found = {}
    for name in names:
        zero = tiers(f"{folder}/rank{rank()}")[tier]
        engine = start(small(), wired(name, zero=zero, onefold=extra, gradient_clipping=0.3))
        losses = [step(engine, x, y) for x, y in batches(2)]
        losses.append(evaluate(engine))
        if extra:
            engine.module_state_dict()  # the weights of a delayed step are used from here on
            losses.append(evaluate(engine))
        losses += [step(engine, x, y) for x, y in batches(1, seed=6)]
        engine.wait_for_step()
        before = engine.ledger.copy()
        losses += [step(engine, x, y) for x, y in batches(1, seed=8)]
        engine.wait_for_step()
        memory = engine.model_memory
        since, crossing = engine.ledger.since(before), memory.planned_offload_traffic()
        found[name] = {
            "losses": losses,
            "alike": evaluate_alike(engine),
            "weights": weights_of(engine.module),
            "held": all(
                engine.model_memory.held_bytes(t).parameters == engine.model_memory.planned_bytes(t).parameters
                for t in Tier
            ),
            "counted": (since.bytes("up"), since.bytes("read")),
            "planned": (crossing.up, crossing.read),
        }
        engine.destroy()
    return found


DELAYED = {"delayed_host_step": True}


@pytest.fixture(scope="module")
def in_tier(
    on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Each tier's runs, once."""
    kept: dict[str, list[dict[str, Any]]] = {}

    def get(tier: str, extra: dict[str, Any]) -> list[dict[str, Any]]:
        key = f"{tier} {extra}"
        if key not in kept:
            names = ["all"] if tier == "device" else ["stage 3", "hpZ", "all"]
            kept[key] = on_ranks(4, offloaded, names, tier, extra, str(tmp_path_factory.mktemp("tier")))
        return kept[key]

    return get


@pytest.mark.parametrize(
    ("tier", "extra"),
    [
        more("both", {}),
        ("disk", {}),
        more("optimizer", {}),
        more("parameters", {}),
        more("all on disk", {}),
        more("optimizer", DELAYED),
        more("both", DELAYED),
        more("disk", DELAYED),
    ],
)
def test_wires_go_with_every_tier(in_tier, tier, extra):
    """A second shard moves no bit, and where weights rest moves none of what travels."""
    found = in_tier(tier, extra)
    device = found if extra else in_tier("device", {})
    for each, reference in zip(found, device, strict=True):
        plain, second, coded = each["stage 3"], each["hpZ"], each["all"]
        assert second["losses"] == plain["losses"]
        assert differing(second["weights"], plain["weights"]) == []
        assert coded["losses"] == pytest.approx(plain["losses"], rel=2e-2)
        assert coded["losses"] == reference["all"]["losses"]
        assert differing(coded["weights"], reference["all"]["weights"]) == []
        for name in each:
            assert each[name]["alike"] == found[0][name]["alike"], name
            assert each[name]["held"], name


@pytest.mark.parametrize("tier", ["both", "disk", more("parameters"), more("optimizer")])
def test_what_crosses_between_tiers_is_what_was_planned(in_tier, tier):
    """A second shard is on the device: what is gathered from it comes from no lower tier."""
    for found in in_tier(tier, {}):
        for name in ("stage 3", "hpZ", "all"):
            assert found[name]["counted"] == found[name]["planned"], name


# -- other stages -----------------------------------------------------------------------------------------------


def staged(names: list[str], stage: int, accumulation: int) -> dict[str, Any]:
    found = {}
    for name in names:
        engine = start(
            small(), wired(name, stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.3)
        )
        trace = train(engine, 3 * accumulation)
        totals = [run.layout.total for unit in engine.state.schedule.units for run in unit.trained_params]
        before = engine.ledger.copy()
        for x, y in batches(accumulation, seed=8):
            step(engine, x, y)
        engine.wait_for_step()
        rows = engine.ledger.since(before).rows()
        found[name] = trace, {(row.operation, row.group): row.bytes for row in rows if row.bytes}, totals
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "accumulation", "coded"),
    [
        more(1, 1, ["qgZ"]),
        (2, 1, ["qgZ"]),
        more(0, 1, ["qgZ", "LoCo"]),
        *(more(stage, 2, ["qgZ", "LoCo"]) for stage in (0, 1, 2)),
    ],
)
def test_gradients_travel_as_integers_in_every_stage(on_ranks, stage, accumulation, coded):
    found = on_ranks(4, staged, ["stage 3", *coded], stage, accumulation)
    for name in coded:
        assert agree([each[name][0].weights for each in found])
    for each in found:
        exact, wide, totals = each["stage 3"]
        reductions = accumulation if stage == 2 else 1
        inside = reductions * sum(Codec(8).row_bytes(total // 2) for total in totals)
        across = reductions * sum(Codec(4).row_bytes(total // 4) for total in totals)
        for name in coded:
            trace, narrow, _ = each[name]
            assert trace.losses == pytest.approx(exact.losses, rel=2e-2)
            assert trace.losses != exact.losses
            assert narrow["reduce inside", "data"] == inside
            assert narrow["reduce across", "across"] == across
            assert not any(operation == "reduce-scatter" for operation, _ in narrow)
            assert across < wide["reduce-scatter", "across"] / 7
            assert narrow["gather", "across"] == wide["gather", "across"]


def ignored(names: list[str]) -> dict[str, Any]:
    """Keys that only stage 3 reads, in stage 2."""
    found = {}
    for name in names:
        engine = start(small(), wired(name, stage=2))
        found[name] = train(engine, 2), engine.describe()
        engine.destroy()
    return found


def test_what_only_sharded_parameters_have_does_nothing_elsewhere(on_ranks):
    for found in on_ranks(2, ignored, ["stage 3", "hpZ", "qwZ"]):
        for name in ("hpZ", "qwZ"):
            assert first_difference(found[name][0], found["stage 3"][0]) is None, name
            assert found["stage 3"][1] == found[name][1], name


# -- errors, words and bytes ------------------------------------------------------------------------------------


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        start(net(), settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "keys", "words"),
    [
        (3, {"zero": {"zero_hpz_partition_size": 2}, "node": 3}, ["zero_hpz_partition_size = 2", "3 ranks", "1, 3"]),
        (4, {"zero": {"zero_hpz_partition_size": 3}}, ["zero_hpz_partition_size = 3", "4 ranks", "1, 2, 4"]),
        (4, {"zero": {"zero_hpz_partition_size": 8}}, ["zero_hpz_partition_size = 8", "4 ranks", "1, 2, 4"]),
        (
            1,
            {"zero": {"zero_hpz_partition_size": 2}, "node": 1},
            ["zero_hpz_partition_size = 2", "1 ranks", "Use one of 1"],
        ),
        (4, {"node": 3}, ["onefold.node_size = 3", "4 ranks", "1, 2, 4"]),
        (3, {"node": 2}, ["onefold.node_size = 2", "3 ranks", "1, 3"]),
    ],
)
def test_groups_that_do_not_divide_the_ranks_are_an_error(on_ranks, world, keys, words):
    for text in on_ranks(world, refused, wired("stage 3", **keys)):
        for word in words:
            assert word in text


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"err_beta": 0.8, "reset_T": 0}, "reset_T"),
        ({"err_beta": 0.8, "reset_T": -3}, "reset_T"),
        ({"err_beta": 1.5, "reset_T": 4}, "err_beta"),
        ({"err_beta": -0.1, "reset_T": 4}, "err_beta"),
    ],
)
def test_error_feedback_that_cannot_be_is_an_error(on_ranks, keys, word):
    for text in on_ranks(2, refused, wired("qgZ", zero={"zeropp_loco_param": keys})):
        assert word in text


def described(name: str, dtype: str, accumulation: int) -> dict[str, Any]:
    engine = start(adapted(), wired(name, dtype=dtype, gradient_accumulation_steps=accumulation))
    held = []
    for x, y in batches(2 * accumulation):
        engine.backward(engine(x, y))
        if engine.is_gradient_accumulation_boundary():
            held.append(engine.model_memory.held_bytes())
        engine.step()
    runs = [run for unit in engine.state.schedule.units for run in unit.sharded_params]
    found = {
        "text": engine.describe(),
        "held": held,
        "planned": engine.model_memory.planned_bytes(),
        "by stage": engine.model_memory.planned_bytes_by_stage(),
        "elements": sum(run.layout.total for run in runs),
        "frozen": sum(run.layout.shard_size for run in runs if not run.trainable),
    }
    engine.destroy()
    return found


WORDS = {
    "stage 3": [],
    "hpZ": ["a secondary shard among every 2 ranks"],
    "qwZ": ["communicated as int8"],
    "qgZ": ["communicated as int4"],
    "all": ["a secondary shard among every 2 ranks", "communicated as int8", "communicated as int4"],
    "frozen": ["frozen", "int8"],
}


@pytest.mark.parametrize("name", [name if name in ("hpZ", "all", "frozen") else more(name) for name in WORDS])
@pytest.mark.parametrize(("dtype", "accumulation"), [("bf16", 1), more("fp32", 2)])
def test_the_plan_speaks_of_its_wires_and_counts_their_bytes(on_ranks, name, dtype, accumulation):
    for found in on_ranks(4, described, name, dtype, accumulation):
        for word in WORDS[name]:
            assert word in found["text"]
        if not WORDS[name]:
            assert "communicated as" not in found["text"]
            assert "second" not in found["text"]
        planned, size = found["planned"], 4 if dtype == "fp32" else 2
        second = found["elements"] * size // 2 if "zero_hpz_partition_size" in KEYS[name] else 0
        assert planned.parameters == second + found["frozen"] * size
        for held in found["held"]:
            assert (held.parameters, held.gradients) == (planned.parameters, planned.gradients)
            assert (held.masters, held.states) == (planned.masters, planned.states)
        assert found["by stage"]["stage 3"].total == planned.total


# -- memory -----------------------------------------------------------------------------------------------------


@contextmanager
def only_new_objects() -> Iterator[None]:
    """What was there before is left out of account."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Bytes of all storages that new tensors of this process hold."""
    gc.collect()
    return sum(storages_alive().values())


@only_new_objects()
def growth(name: str) -> list[int]:
    engine = start(adapted(), wired(name, dtype="fp32", gradient_accumulation_steps=2))
    counts = []
    for number in range(6):
        for x, y in batches(2, seed=number):
            step(engine, x, y)
        evaluate(engine)
        engine.module  # noqa: B018 - waits for what is in flight
        engine.empty_partition_cache()
        if number in (1, 3, 5):
            counts.append(live_bytes())
    engine.destroy()
    return counts


@pytest.mark.parametrize("name", [more("all"), more("all and LoCo")])
def test_nothing_grows_from_step_to_step(on_ranks, name):
    for counts in on_ranks(4, growth, name):
        assert counts == counts[:1] * 3


@only_new_objects()
def bytes_of(names: list[str]) -> dict[str, Any]:
    """Beside what was there before: bytes that tensors hold after some steps, those that the engine speaks of, and
    bytes that a model holds once its engine is gone; and threads that are left then.
    """
    found = {}
    for name in [names[0], *names]:  # the first run leaves behind what every process keeps
        before = live_bytes()
        model = adapted()
        engine = start(model, wired(name))
        for x, y in batches(2):
            step(engine, x, y)
        evaluate(engine)
        engine.empty_partition_cache()
        held, told = live_bytes() - before, engine.model_memory.held_bytes().total
        engine.destroy()
        del engine
        found[name] = held, told, live_bytes() - before
        deadline = time.monotonic() + 2
        while threads := [thread.name for thread in threading.enumerate() if "onefold-wires" in thread.name]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        found[f"{name}, threads"] = threads
        del model
    return found


@pytest.fixture(scope="module")
def memory(on_ranks: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return on_ranks(4, bytes_of, ["stage 3", "hpZ", "qgZ", "LoCo"])


@pytest.mark.parametrize(("name", "beside"), [("hpZ", "stage 3"), ("LoCo", "qgZ")])
def test_a_destroyed_engine_leaves_no_second_shard_and_no_errors_behind(memory, name, beside):
    for found in memory:
        assert found[name][2] == pytest.approx(found[beside][2], abs=4096)


def test_a_destroyed_engine_leaves_no_thread_behind(memory):
    for found in memory:
        assert found["qgZ, threads"] == []


@pytest.mark.parametrize(("name", "beside"), [("hpZ", "stage 3"), ("LoCo", "qgZ")])
def test_every_byte_that_a_wire_holds_is_spoken_of(memory, name, beside):
    """Second shards, and what was lost. Beside them there are small tensors that nobody counts."""
    for found in memory:
        held, told = found[name][0] - found[beside][0], found[name][1] - found[beside][1]
        assert held > 4096
        assert told == pytest.approx(held, abs=4096)


def parked(name: str) -> tuple[list[float], int, list[float]]:
    straight = start(small(), wired(name))
    expected = train(straight, 2).losses + train(straight, 2, seed=1).losses
    straight.destroy()
    engine = start(small(), wired(name))
    losses = train(engine, 2).losses
    engine.offload_states()
    seconds = [
        run.secondary for unit in engine.state.schedule.units for run in unit.params if run.secondary is not None
    ]
    left = sum(second.untyped_storage().nbytes() for second in seconds)
    engine.reload_states()
    losses += train(engine, 2, seed=1).losses
    engine.destroy()
    return losses, left, expected


@pytest.mark.parametrize("name", ["hpZ", more("all and LoCo")])
def test_second_shards_leave_the_device_with_the_rest(on_ranks, name):
    for losses, left, expected in on_ranks(4, parked, name):
        assert losses == expected
        assert left == 0


# -- collectives ------------------------------------------------------------------------------------------------


def own_kind(names: list[str], kind: str) -> dict[str, Any]:
    found = {}
    for name in names:
        engine = start(small(), wired(name, onefold={"collective": kind}))
        trace = train(engine, 2)
        operations = {row.operation for row in engine.ledger.rows()}
        found[name] = trace, {operation: engine.ledger.bytes(operation) for operation in operations}
        engine.destroy()
    return found


@pytest.mark.slow
def test_wires_go_round_the_backends_own_collectives(on_ranks):
    """The same bytes as by the exchange."""
    names = ["stage 3", "hpZ", "all"]
    native, exchange = on_ranks(4, own_kind, names, "native"), on_ranks(4, own_kind, names, "exchange")
    for each, other in zip(native, exchange, strict=True):
        assert first_difference(each["hpZ"][0], each["stage 3"][0]) is None
        for name in names:
            assert each[name][0].losses == pytest.approx(other[name][0].losses, rel=1e-2)
            assert each[name][1] == other[name][1], name


def sums_of_constant_gradients(node: int, rounds: int) -> dict[str, float]:
    """How far the mean of many reductions of one gradient is from the truth, with and without feedback."""
    group, device = data_group(node), torch.device("cpu")
    size = group.size * 2048
    sources = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(group.size)]
    mine = slice(group.rank * 2048, (group.rank + 1) * 2048)
    truth = torch.stack(sources).double().sum(0)[mine]
    found = {}
    for name, feedback in (("none", None), ("feedback", Feedback(0.5, 1 << 20)), ("reset", Feedback(0.5, 1))):
        wires = Wires(inside=Codec(8), across=Codec(4), feedback=feedback)
        collective = make_collective("exchange", group, Ledger(), device, wires)
        mean = torch.zeros(2048, dtype=torch.float64)
        lost = ErrorFeedback()
        for _ in range(rounds):
            target = torch.zeros(2048)
            source = sources[group.rank].clone()
            collective.start_reduce_scatter([Reduction(source, target, torch.float32, False, error=lost)]).finish()
            mean += target.double() / rounds
        found[name] = (mean - truth).abs().mean().item()
    return found


@pytest.mark.parametrize(("world", "node"), [(4, 2), more(4, 1), more(4, 4), more(3, 1), more(2, 2)])
def test_error_feedback_makes_up_for_what_was_lost(on_ranks, world, node):
    """Whether the loss is inside a host or across."""
    for found in on_ranks(world, sums_of_constant_gradients, node, 20):
        assert found["feedback"] < 0.25 * found["none"]
        assert found["reset"] == found["none"]
