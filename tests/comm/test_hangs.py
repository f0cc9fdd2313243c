"""Hangs around engines: each rank hears within seconds who waits where, also of calls of the program's own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import config, more, net, rank, start
from test_alike import heard, layers
from torch import nn

import onefold
from onefold.comm import hang_detector
from onefold.comm.connections import is_backend_error
from onefold.comm.wait_notes import WaitNote, is_ahead, is_stuck

Heard = tuple[str, str, float, str]


def engine_of(stage: int, model: nn.Module | None = None) -> onefold.Engine:
    return start(model or layers(), config(stage, log_level="warning"))


def step(engine: onefold.Engine, model_input: torch.Tensor | None = None) -> None:
    x = torch.randn(4, 16) if model_input is None else model_input
    engine.backward(engine(x).pow(2).mean())
    engine.step()


def stuck(kind: str, stage: int) -> Heard:
    odd = rank() == 1

    def act() -> None:
        engine = engine_of(stage)
        step(engine)
        if kind == "engines" and not odd:
            engine_of(stage)
        elif kind == "barrier" and odd:
            dist.barrier()
        elif kind == "all_reduce" and odd:
            dist.all_reduce(torch.zeros(3))
        elif kind == "objects" and odd:
            dist.all_gather_object([None, None], {"samples": 3})
        elif kind == "like a meeting" and odd:  # as many bytes as ranks exchange in one
            dist.all_gather([torch.zeros(16, dtype=torch.int64) for _ in range(2)], torch.zeros(16, dtype=torch.int64))
        elif kind == "asynchronous" and odd:
            work = dist.all_reduce(torch.zeros(3), async_op=True)
            work.wait()
        elif kind == "another group":
            group = dist.new_group([0, 1])
            if odd:
                dist.barrier(group)
        elif kind == "evaluation":
            total = torch.zeros(())
            with torch.no_grad():
                for _ in range(3 - rank()):
                    total += engine(torch.randn(4, 16)).mean()
            dist.all_reduce(total)
        elif kind == "save" and odd:
            dist.barrier()
        elif kind == "save":
            engine.load_checkpoint("/nonexistent")
        step(engine)

    return heard(act)


AT_PASS = "rank 0 at the beginning of a pass"
AT_REDUCTION = "rank 0 at reduction of"
HANGS = [
    ("engines", 2, ["rank 0 at onefold.initialize, engine 2", "rank 1 at reduction of", "the same engines"]),
    ("barrier", 3, ["rank 1 at its own torch.distributed.barrier()", AT_PASS]),
    ("objects", 3, ["rank 1 at its own torch.distributed.all_gather_object()", AT_PASS]),
    ("like a meeting", 3, ["rank 1 at its own torch.distributed.all_gather()", AT_PASS]),
    ("asynchronous", 3, ["rank 1 at its own wait()", "test_hangs.py:"]),
    ("evaluation", 3, ["rank 1 at its own torch.distributed.all_reduce()", "rank 0 at", "the same number of batches"]),
    ("save", 3, ["rank 1 at its own torch.distributed.barrier()", "rank 0 at load_checkpoint"]),
]
MORE_HANGS = [
    ("engines", 3, ["rank 0 at onefold.initialize, engine 2", "rank 1 at the beginning of a pass"]),
    ("barrier", 2, ["rank 1 at its own torch.distributed.barrier()", "test_hangs.py:", AT_REDUCTION]),
    ("all_reduce", 3, ["rank 1 at its own torch.distributed.all_reduce()", "test_hangs.py:"]),
    ("like a meeting", 2, ["rank 1 at its own torch.distributed.all_gather()", AT_REDUCTION]),
    ("another group", 3, ["rank 1 at its own torch.distributed.barrier()", AT_PASS]),
]


@pytest.mark.parametrize("hangs", [HANGS, more(MORE_HANGS)])
def test_a_hang_is_named_on_every_rank(side_by_side, hangs):
    for (kind, stage, words), found in zip(
        hangs, side_by_side(2, stuck, [(kind, stage) for kind, stage, _ in hangs]), strict=True
    ):
        for name, text, seconds, said in found:
            # A call of the program's own has the backend's error.
            assert name in ("Disagreement", "RuntimeError"), (kind, stage, found)
            told = text if name == "Disagreement" else said
            assert [word for word in words if word not in told] == [], (kind, stage, name, text, said)
            assert seconds < 15, (kind, stage)  # on a busy machine; the thread finds it within 5
        assert "Disagreement" in {name for name, _, _, _ in found}, (kind, stage, found)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        x = self.first(x)
        if bad:
            raise ValueError("a bad sample")
        return self.second(x)


def tries_again(at: int) -> Heard:
    def act() -> None:
        engine = engine_of(3, Fragile())
        for number in range(3):
            try:
                loss = engine(torch.randn(4, 16), number == at and rank() == 1).pow(2).mean()
            except ValueError:
                loss = engine(torch.randn(4, 16)).pow(2).mean()
            engine.backward(loss)
            engine.step()

    return heard(act)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
def test_a_retry_on_one_rank_gets_advice_that_fits(own_ranks, at):
    for name, text, seconds, _ in own_ranks(2, tries_again, at):
        assert name == "Disagreement", text
        assert "Rank 1 began a new forward while others were still in the backward" in text
        assert "skip the batch on all ranks" in text
        assert "leaf_module" not in text
        assert seconds < 15


def busy(kind: str) -> Heard:
    """Rank 0 waits for much longer than the detector's patience, but nothing is stuck."""
    hang_detector.PATIENCE = 0.5

    def act() -> None:
        engine = engine_of(3)
        step(engine)
        others = dist.new_group([1, 2])
        until = time.monotonic() + 3
        if rank() and kind == "sleep":
            time.sleep(3)
        while rank() and kind == "computes" and time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
        if rank() and kind == "a slow collective":
            time.sleep(3 if rank() == 1 else 0)
            dist.all_reduce(torch.zeros(3), group=others)
        going = torch.ones(())
        while rank() and kind == "collectives" and going:
            going.fill_(time.monotonic() < until)
            dist.all_reduce(going, dist.ReduceOp.MIN, group=others)
        step(engine)

    return heard(act)


def test_slow_ranks_are_not_stuck(side_by_side):
    kinds = ["sleep", "computes", "collectives", "a slow collective"]
    for kind, found in zip(kinds, side_by_side(3, busy, [(kind,) for kind in kinds]), strict=True):
        for name, text, seconds, said in found:
            assert (name, said) == ("", ""), (kind, text)
            assert seconds > 2.5, kind  # others were waited for


def ours(what: str, *, lasts: bool = True) -> WaitNote:
    return WaitNote(1, what, lasts=lasts)


def theirs(*ranks: int) -> WaitNote:
    return WaitNote(0, "its own all_reduce()", ours=False, ranks=ranks or None, lasts=True)


def test_what_counts_as_stuck():
    assert is_stuck({0: ours("a"), 1: ours("b")})
    assert not is_stuck({0: ours("a"), 1: ours("a")})
    assert not is_stuck({0: ours("a"), 1: ours("b", lasts=False)})
    assert is_stuck({0: ours("a"), 1: theirs()})
    assert not is_stuck({0: theirs(), 1: theirs()})
    assert not is_stuck({0: ours("a"), 1: theirs(1, 2), 2: theirs(1, 2)})
    assert is_stuck({0: ours("a"), 1: theirs(0, 1), 2: theirs()})


def test_who_has_launched_more_will_not_come_to_a_meeting():
    """Where devices wait and hosts do not."""
    meets, computes = ours("the step"), WaitNote(1, "its own computation", ours=False, lasts=True, computes=True)
    assert is_ahead({0: replace(meets, launched=4), 1: replace(computes, launched=5)})
    assert is_ahead({0: replace(meets, launched=4), 1: replace(meets, launched=5)})
    # It may still come: it has launched as much, or less, or has only just launched more.
    assert not is_ahead({0: replace(meets, launched=4), 1: replace(computes, launched=4)})
    assert not is_ahead({0: replace(meets, launched=4), 1: replace(computes, launched=3)})
    assert not is_ahead({0: replace(meets, launched=4), 1: replace(computes, launched=5, lasts=False)})
    # Nobody waits for anybody, as far as is known.
    assert not is_ahead({0: replace(computes, launched=4), 1: replace(computes, launched=5)})
    assert not is_stuck({0: meets, 1: computes})


def passes_through() -> list[str]:
    """Errors of a published wait that are not the network's; and afterwards the detector has no verdict."""
    detector = hang_detector.world_detector()
    found = []
    for error in (torch.OutOfMemoryError("no memory"), RuntimeError("can't allocate memory"), KeyboardInterrupt()):
        try:
            with detector.waiting_for("a wait"):
                raise error
        except BaseException as caught:
            found.append(caught is error)
    return [*map(str, found), str(detector.verdict)]


def test_only_the_networks_errors_become_a_disagreement(on_ranks):
    assert on_ranks(2, passes_through) == [["True", "True", "True", "None"]] * 2
    assert is_backend_error(
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")
    )
    assert not is_backend_error(ValueError("Connection closed by peer"))


def threads_of_engines() -> list[list[str]]:
    def named() -> list[str]:
        ours = "onefold-watch"
        return sorted(thread.name for thread in threading.enumerate() if thread.name == ours or thread not in before)

    def named_at_the_end() -> list[str]:
        deadline = time.monotonic() + 20  # a thread that was told to end needs a moment
        while named() and time.monotonic() < deadline:
            time.sleep(0.02)
        return named()

    counts = []
    before = threading.enumerate()
    engines = [start(net(), config(3)) for _ in range(2)]
    counts.append([name for name in named() if name == "onefold-watch"])
    engines[0].destroy()
    del engines[0]
    counts.append([name for name in named() if name == "onefold-watch"])
    engines.clear()
    counts.append(named_at_the_end())
    engine = start(net(), config(2))
    engine.destroy()
    counts.append(named_at_the_end())
    return counts


def test_one_thread_watches_all_engines_and_none_is_left(own_ranks):
    """On new processes: engines that earlier cases have left are watched by the same thread."""
    one = ["onefold-watch"]
    for found in own_ranks(2, threads_of_engines):
        assert found == [one, one, [], []]
