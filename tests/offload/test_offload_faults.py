"""Offload when something is wrong: drives that are full, read-only or failing, crashes, hosts that are too small."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import covering
from models import batches, config, more, net, precision, rank, start, train, weights_of
from test_offload import CPU, nvme
from test_offload_cases import everything_of, files_in, one_step, our_threads, same

import onefold
from onefold.offload import host_memory as host
from onefold.offload.drive import SwapError
from onefold.offload.host_memory import HostShortage
from onefold.pool import Pool

KEYS: dict[str, Callable[[str], tuple[int, dict[str, Any]]]] = {
    "1 disk": lambda folder: (1, {"offload_optimizer": nvme(folder)}),
    "2 disk": lambda folder: (2, {"offload_optimizer": nvme(folder, buffer_count=1, buffer_size=2048)}),
    "3 disk": lambda folder: (3, {"offload_optimizer": nvme(folder)}),
    "3 disk cpu": lambda folder: (3, {"offload_optimizer": nvme(folder), "offload_param": CPU}),
    "3 disk disk": lambda folder: (3, {"offload_optimizer": nvme(folder), "offload_param": nvme(folder)}),
    "3 cpu disk": lambda folder: (3, {"offload_optimizer": CPU, "offload_param": nvme(folder)}),
}


def make(kind: str, folder: str, *, overlap: bool | None = None, **settings: Any) -> onefold.Engine:
    stage, keys = KEYS[kind](folder)
    zero = {**keys, "overlap_comm": overlap}
    return start(net(), config(stage, zero_optimization=zero, **{**precision("bf16"), **settings}))


# -- what initialize refuses ------------------------------------------------------------------------------------


def refused(kind: str, folder: str) -> dict[str, Any]:
    """The error of initialize, whether the ranks can still talk, and what is left."""
    gc.collect()
    before = our_threads()
    told = None
    try:
        make(kind, folder).destroy()
    except Exception as error:
        told = type(error).__name__, str(error)
    gc.collect()
    # Nobody hangs, and the same process may try again, here without offload.
    engine = start(net(), config(2))
    losses = train(engine, 2).losses
    engine.destroy()
    dist.barrier()
    threads = [name for name in our_threads() if name not in before]
    return {"told": told, "losses": losses, "threads": threads}


def check_refused(results: list[dict[str, Any]], *words: str) -> None:
    """At least one rank says it all; the others say at least which rank does."""
    assert all(result["told"] is not None for result in results)
    whole = [result["told"][1] for result in results if result["told"][0] == "ConfigError"]
    assert whole
    for text in whole:
        assert all(word in text for word in words), text
    for result in results:
        if result["told"][0] != "ConfigError":
            assert "See the error of that rank" in result["told"][1]
        assert result["threads"] == []


@pytest.mark.parametrize("world", [more(1), 2])
@pytest.mark.parametrize("kind", ["2 disk", more("3 disk disk"), more("3 cpu disk")])
def test_a_drive_that_is_too_small_is_refused_on_all_ranks_with_the_arithmetic(on_ranks, mounted, world, kind):
    folder = mounted("tmpfs", "size=8k")
    check_refused(on_ranks(world, refused, kind, str(folder)), str(folder), "needs", "8192", "are free")
    assert list(folder.rglob("*")) == []


@pytest.mark.parametrize("kind", [more("2 disk"), "3 disk disk"])
def test_a_drive_with_room_for_one_rank_of_two_is_refused_on_both(on_ranks, mounted, kind):
    """Each rank counts its own bytes, so only making the files shows it."""
    folder = mounted("tmpfs", "size=200k" if kind == "3 disk disk" else "size=140k")
    results = on_ranks(2, refused, kind, str(folder))
    check_refused(results, str(folder), "needs", "are free")
    assert files_in(folder) == []


@pytest.mark.parametrize("world", [more(1), 2])
def test_a_read_only_drive_is_refused(on_ranks, mounted, world):
    folder = mounted("tmpfs", "ro")
    check_refused(on_ranks(world, refused, "2 disk", str(folder)), str(folder), "Read-only")


@pytest.mark.parametrize("world", [more(1), 2])
def test_a_file_in_place_of_the_folder_is_refused_and_kept(on_ranks, tmp_path, world):
    path = tmp_path / "swap"
    path.write_text("mine")
    check_refused(on_ranks(world, refused, "2 disk", str(path)), str(path), "folder")
    assert path.read_text() == "mine"


def refused_second(good: str, bad: str) -> tuple[dict[str, Any], list[str]]:
    keys = {"offload_optimizer": nvme(good), "offload_param": nvme(bad)}
    with mock.patch.dict(KEYS, {"both": lambda folder: (3, keys)}):
        return refused("both", ""), files_in(Path(good))


def test_a_bad_second_drive_leaves_nothing_on_the_first(on_ranks, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    bad.write_text("mine")
    results = on_ranks(1, refused_second, str(good), str(bad))
    check_refused([result for result, _ in results], str(bad))
    assert [left for _, left in results] == [[]]


def one_rank_refused(kind: str, good: str, bad: str) -> dict[str, Any]:
    return refused(kind, bad if rank() == 1 else good)


@covering(kind=("2 disk", "3 disk disk"))
def test_what_one_rank_lacks_all_ranks_hear_of(on_ranks, tmp_path, kind):
    bad = tmp_path / "bad"
    bad.write_text("mine")
    first, second = on_ranks(2, one_rank_refused, kind, str(tmp_path / "good"), str(bad))
    assert second["told"][0] == "ConfigError"
    assert str(bad) in second["told"][1]
    assert first["told"] is not None
    assert "rank 1" in first["told"][1]
    assert files_in(tmp_path / "good") == []
    assert first["threads"] == second["threads"] == []


def too_small(on: list[int]) -> dict[str, Any]:
    stage, keys = 2, {"offload_optimizer": CPU}
    there = mock.patch.object(host, "available_bytes", return_value=1000 if rank() in on else 1 << 40)
    with mock.patch.dict(KEYS, {"host": lambda folder: (stage, keys)}), there:
        return refused("host", "")


@pytest.mark.parametrize(("world", "on"), [(2, [0, 1]), (2, [1]), more(1, [0])])
def test_a_host_that_is_too_small_is_refused_with_the_arithmetic(on_ranks, world, on):
    for number, result in enumerate(on_ranks(world, too_small, on)):
        kind, text = result["told"]
        if number in on:
            assert kind == HostShortage.__name__
            for word in ("needs", "available", "masters", "states", "gradients", "ratio"):
                assert word in text
            assert world == 1 or f"{world} ranks" in text
        else:
            assert "rank 1" in text
        assert result["threads"] == []


# -- errors in the middle of a step -----------------------------------------------------------------------------


@contextmanager
def failing(call: str, after: int = 0, times: int = 1) -> Iterator[list[int]]:
    """`os.preadv` or `os.pwritev` fails some times, after some that work."""
    works, lock, seen = getattr(os, call), threading.Lock(), [0]

    def fails(*args: Any) -> int:
        with lock:
            seen[0] += 1
            bad = after < seen[0] <= after + times
        if bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(works(*args))

    with mock.patch.object(os, call, fails):
        yield seen


def within(seconds: float, work: Callable[[], Any]) -> tuple[str, str]:
    """The error of some work; ("hang", "") where it does not come back."""
    told: list[tuple[str, str]] = []

    def run() -> None:
        try:
            work()
            told.append(("", ""))
        except BaseException as error:
            told.append((type(error).__name__, str(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return told[0] if told else ("hang", "")


def step_that_fails(kind: str, folder: str, saves: str, call: str, after: int, overlap: bool) -> dict[str, Any]:
    engine = make(kind, folder, overlap=overlap)
    train(engine, 2)
    engine.save_checkpoint(saves)
    data = batches(4, seed=1)
    found: dict[str, Any] = {"path": folder, "told": []}
    with failing(call, after):
        for _ in range(2):  # in the step itself, or at the latest in the next forward
            found["told"].append(within(20, lambda: one_step(engine, *data[0])))
    for x, y in data[:3]:
        found["told"].append(within(20, lambda x=x, y=y: one_step(engine, x, y)))
    found["state"] = within(20, lambda: everything_of(engine))
    within(20, engine.zero_grad)
    found["save"] = within(20, lambda: engine.save_checkpoint(str(Path(saves, "bad"))))
    found["saved"] = Path(saves, "bad", "latest").exists()
    found["destroy"] = within(20, engine.destroy)
    gc.collect()
    found["files"], found["threads"] = files_in(Path(folder)), our_threads()
    # A new engine takes the last checkpoint up.
    again = make(kind, folder, overlap=overlap)
    again.load_checkpoint(saves)
    found["resumed"] = train(again, 3, seed=8).losses
    again.destroy()
    reference = start(net(), config(2, **precision("bf16")))
    train(reference, 2)
    found["expected"] = train(reference, 3, seed=8).losses
    reference.destroy()
    return found


@pytest.mark.parametrize("kind", ["1 disk", more("2 disk"), more("3 disk"), more("3 disk cpu"), "3 disk disk"])
@pytest.mark.parametrize(("call", "after"), [("pwritev", 0), more("pwritev", 5), more("preadv", 0), more("preadv", 5)])
@pytest.mark.parametrize("overlap", [True, more(False)])
def test_an_io_error_in_a_step_is_told_and_a_new_engine_goes_on(on_ranks, tmp_path, kind, call, after, overlap):
    swap, saves = str(tmp_path / "swap"), str(tmp_path / "saves")
    got = on_ranks(1, step_that_fails, kind, swap, saves, call, after, overlap)[0]
    errors = [told for told in got["told"] if told[0]]
    assert errors[0][0] == SwapError.__name__, got["told"]
    assert swap in errors[0][1]
    assert "Input/output error" in errors[0][1]
    assert "checkpoint" in errors[0][1]
    # Whatever is tried later says the same, or that a checkpoint must be loaded; nothing hangs, nothing is saved.
    for name, text in errors[1:]:
        assert "checkpoint" in text, (name, text)
    if call == "pwritev":
        assert len(errors) >= 4, got["told"]
        assert not got["saved"], "states of which some are stepped and some are not were published as a checkpoint"
        for name in ("save", "state"):
            assert "checkpoint" in got[name][1], (name, got[name])
    assert got["destroy"][0] != "hang"
    assert (got["files"], got["threads"]) == ([], [])
    assert got["resumed"] == got["expected"]


def retire_after_error(kind: str, folder: str) -> tuple[str, str]:
    engine = make(kind, folder)
    model = engine.module
    with failing("pwritev"):
        within(20, lambda: [one_step(engine, x, y) for x, y in batches(2)])
    stage, keys = KEYS[kind](folder)
    settings = config(stage, zero_optimization=keys, **precision("bf16"))
    return within(20, lambda: start(model, settings).destroy())


@pytest.mark.parametrize("kind", ["2 disk", "3 disk disk"])
def test_the_same_model_may_have_a_new_engine_after_an_io_error(on_ranks, tmp_path, kind):
    assert on_ranks(1, retire_after_error, kind, str(tmp_path)) == [("", "")]


class Raises(torch.optim.RMSprop):
    """From some step on it raises what no library expects, on whichever thread steps it."""

    elementwise = True
    raising = False

    def step(self, closure: Any = None) -> Any:
        if Raises.raising:
            raise ZeroDivisionError("my own optimizer")
        return super().step(closure)


def optimizer_raises(kind: str, folder: str, saves: str, leave: str, num_steps: int, late: bool) -> dict[str, Any]:
    stage, keys = KEYS[kind](folder)
    more = {"onefold": {"delayed_host_step": True}} if late else {}
    settings = config(stage, zero_optimization={**keys, "overlap_comm": True}, **precision("bf16"), **more)
    settings.pop("optimizer")

    def engine_of(model: torch.nn.Module) -> onefold.Engine:
        return start(model, settings, optimizer=Raises(model.parameters(), lr=0.01))

    engine = engine_of(net())
    model = engine.module
    train(engine, 2)
    engine.save_checkpoint(saves)
    Raises.raising = True
    x, y = batches(1)[0]
    found: dict[str, Any] = {"told": [within(20, lambda: one_step(engine, x, y)) for _ in range(num_steps)]}
    if num_steps > 1:
        within(20, engine.zero_grad)
        found["save"] = within(20, lambda: engine.save_checkpoint(str(Path(saves, "bad"))))
    found["saved"] = Path(saves, "bad", "latest").exists()
    engine.state.schedule.memory.worker.submit(int).result()  # the host has done what it was asked, and failed
    Raises.raising = False
    if leave == "destroy":
        found["destroy"] = within(20, engine.destroy)
        again = engine_of(model)
    else:  # the next `initialize` retires it
        made: list[onefold.Engine] = []
        found["destroy"] = within(20, lambda: made.append(engine_of(model)))
        if not made:
            return found
        again = made[0]
    again.load_checkpoint(saves)
    found["resumed"] = train(again, 2, seed=8).losses
    again.destroy()
    reference = engine_of(net())
    train(reference, 2)
    found["expected"] = train(reference, 2, seed=8).losses
    reference.destroy()
    return found


def interrupted(kind: str, folder: str) -> dict[str, Any]:
    """The user interrupts between two units of a step: whether another one is refused, and whether the engine goes."""
    stage, keys = KEYS[kind](folder)
    engine = start(net(), config(stage, zero_optimization={**keys, "overlap_comm": True}, **precision("bf16")))
    train(engine, 1)
    host, calls = engine.state.step._host, []
    submit = host._submit

    def interrupt(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return submit(*given)

    host._submit = interrupt
    x, y = batches(1)[0]
    found: dict[str, Any] = {}
    try:
        one_step(engine, x, y)
    except KeyboardInterrupt:
        found["raised"] = True
    host._submit = submit
    found["later"] = within(20, lambda: one_step(engine, x, y))
    found["destroy"] = within(20, engine.destroy)
    return found


@pytest.mark.parametrize("kind", ["2 disk", "3 cpu disk"])
def test_an_interrupted_step_is_refused_later_and_the_engine_goes(on_ranks, tmp_path, kind):
    (found,) = on_ranks(1, interrupted, kind, str(tmp_path))
    assert found["raised"]
    assert "KeyboardInterrupt interrupted a step" in found["later"][1]
    assert found["destroy"] == ("", "")


@pytest.mark.parametrize(
    ("world", "kind", "leave", "num_steps", "late"),
    [
        (1, "2 disk", "destroy", 3, False),
        (2, "3 disk disk", "initialize", 1, False),
        (1, "2 disk", "destroy", 1, True),
        more(1, "3 disk", "destroy", 3, False),
        more(1, "1 disk", "destroy", 1, False),
        more(1, "3 disk disk", "initialize", 1, True),
    ],
)
def test_an_engine_whose_optimizer_raised_on_the_host_can_be_left(
    on_ranks, tmp_path, world, kind, leave, num_steps, late
):
    for got in on_ranks(world, optimizer_raises, kind, str(tmp_path), str(tmp_path / "saves"), leave, num_steps, late):
        errors = [told for told in got["told"] if told[0]]
        assert all("my own optimizer" in text for _, text in errors), got["told"]
        if num_steps > 1:
            assert errors, got
            assert "my own optimizer" in got["save"][1] or "the last step failed half-way" in got["save"][1]
        assert not got["saved"]
        assert got["destroy"] == ("", "")
        assert late or got["resumed"] == got["expected"]  # a delayed step is not exact


def lost_disk(folder: str) -> tuple[Any, ...]:
    engine = make("3 disk disk", folder)
    model = engine.module
    train(engine, 1)
    engine.wait_for_step()
    with failing("preadv", times=10**9):
        told = within(20, engine.destroy)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    read = within(20, lambda: weights_of(model))
    return told, sum(hooks), files_in(Path(folder)), our_threads(), read[0]


def test_an_engine_whose_disk_is_gone_can_be_left(on_ranks, tmp_path):
    told, hooks, files, threads, read = on_ranks(1, lost_disk, str(tmp_path))[0]
    assert (told, hooks, files, threads) == (("", ""), 0, [], [])
    assert read not in ("", "hang"), "weights that could not be read were handed out"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_pool_counts_what_is_out_when_it_is_cleared(device):
    """On "meta", as on a GPU, it keeps nothing that is given back."""
    pool = Pool(torch.device(device))
    one, other = pool.take(8, torch.float32), pool.take(4, torch.float32)
    pool.give_back(other)
    assert pool.num_bytes == (48 if device == "cpu" else 32)
    pool.clear()
    assert pool.num_bytes == 32
    pool.give_back(one)
    assert pool.num_bytes == (32 if device == "cpu" else 0)
    pool.clear()
    assert pool.num_bytes == 0


def read_again(kind: str, folder: str, after: int) -> list[tuple[str, str]]:
    """A read that fails in a forward takes nothing away: it is told, and the next try does not hang."""
    stage, keys = KEYS[kind](folder)
    few = {**keys, "offload_param": nvme(folder, buffer_count=1, buffer_size=1024)}
    engine = start(net(), config(stage, zero_optimization=few, **precision("bf16")))
    train(engine, 2)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))  # gradients overwrite the weights that the step has left in memory
    engine.eval()
    found = []
    with failing("preadv", after), torch.no_grad():
        found += [within(5, lambda: engine(x, y)) for _ in range(3)]
    if ("hang", "") not in found:
        found.append(within(20, engine.destroy))
    return found


@covering(kind=("3 cpu disk", "3 disk disk"), after=(0, 1, 2), strength=1)
def test_a_failed_read_of_parameters_is_told_and_nothing_hangs(on_ranks, tmp_path, kind, after):
    first, *later = on_ranks(1, read_again, kind, str(tmp_path), after)[0]
    assert first[0] == SwapError.__name__
    assert str(tmp_path) in first[1]
    assert "hang" not in [name for name, _ in later]


def one_rank_fails(kind: str, folder: str, saves: str) -> tuple[str, str]:
    engine = make(kind, folder)
    train(engine, 2)
    data = batches(3)

    def work() -> None:
        for x, y in data:
            one_step(engine, x, y)

    if rank() == 1:
        with failing("pwritev"):
            found = within(40, work)
            if found[0]:
                os._exit(1)  # as a program ends that an error ends
        return found
    return within(40, work)


@pytest.mark.parametrize("kind", [more("2 disk"), "3 disk disk"])
def test_an_io_error_on_one_rank_ends_the_others_too(on_ranks, tmp_path, kind):
    """The pool tells that rank 1 died; rank 0 must have come back by then."""
    with pytest.raises(AssertionError, match="rank 1 died"):
        on_ranks(2, one_rank_fails, kind, str(tmp_path / "swap"), str(tmp_path / "saves"))


# -- crashes and folders that go --------------------------------------------------------------------------------

TRAINS = textwrap.dedent(
    """
    import sys, time
    sys.path[:0] = sys.argv[2:]
    import torch
    torch.set_num_threads(1)
    import onefold
    onefold.init_distributed("gloo")
    from models import batches, net
    from test_offload_faults import make
    engine = make("3 disk disk", sys.argv[1])
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step()
    print("trains", flush=True)
    while True:
        for x, y in batches(2):
            engine.backward(engine(x, y))
            engine.step()
    """
)


def next_start(folder: str) -> tuple[list[str], list[float]]:
    engine = make("3 disk disk", folder)
    found = sorted(os.listdir(Path(folder, "onefold-swap")))
    losses = train(engine, 2).losses
    engine.destroy()
    return found, losses


@pytest.mark.program
@pytest.mark.slow
def test_what_a_killed_job_left_is_removed_by_the_next(on_ranks, tmp_path):
    folders = [str(Path(onefold.__file__).parents[1]), *map(str, Path(__file__).parents[:2])]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(tmp_path), *folders],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "trains\n"
    living = sorted(os.listdir(tmp_path / "onefold-swap"))
    assert living
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sorted(os.listdir(tmp_path / "onefold-swap")) == living
    found, losses = on_ranks(1, next_start, str(tmp_path))[0]
    assert found
    assert not set(found) & set(living)
    assert len(losses) == 2
    assert list(tmp_path.rglob("*")) == []


def folder_goes(kind: str, folder: str, saves: str) -> tuple[Any, Any]:
    engine = make(kind, folder)
    losses = train(engine, 2).losses
    shutil.rmtree(folder)
    losses += train(engine, 3, seed=1).losses
    engine.save_checkpoint(saves)
    found = losses, everything_of(engine)
    engine.destroy()
    # A second engine makes its folder again.
    again = make(kind, folder)
    again.load_checkpoint(saves)
    assert same(found[1], everything_of(again))
    again.destroy()
    reference = start(net(), config(2, **precision("bf16")))
    expected = train(reference, 2).losses + train(reference, 3, seed=1).losses
    found_there = expected, everything_of(reference)
    reference.destroy()
    return found, found_there


@covering(kind=("1 disk", "3 disk disk", "3 cpu disk"), world=(1, 2), strength=1)
def test_training_goes_on_where_the_user_removes_the_folder(on_ranks, tmp_path, world, kind):
    folders = str(tmp_path / "swap")
    for found, expected in on_ranks(world, folder_goes_for_rank, kind, folders, str(tmp_path / "saves")):
        assert same(found, expected)
    assert files_in(tmp_path / "swap") == []


def folder_goes_for_rank(kind: str, folder: str, saves: str) -> tuple[Any, Any]:
    return folder_goes(kind, str(Path(folder, f"rank{rank()}")), saves)


def file_cut_short(kind: str, folder: str) -> list[tuple[str, str]]:
    engine = make(kind, folder)
    train(engine, 2)
    engine.wait_for_step()
    for path in files_in(Path(folder)):
        if path.endswith("/data"):
            os.truncate(path, 0)
    told = [within(20, lambda: [one_step(engine, x, y) for x, y in batches(3)])]
    told.append(within(20, engine.destroy))
    return told


@covering(kind=("1 disk", "3 disk disk"))
def test_a_file_cut_short_is_an_error_and_never_zeros(on_ranks, tmp_path, kind):
    first, last = on_ranks(1, file_cut_short, kind, str(tmp_path))[0]
    assert first[0] == SwapError.__name__
    assert str(tmp_path) in first[1]
    assert last[0] != "hang"


def weights_survive(kind: str, folder: str) -> bool:
    """What a failed engine leaves of the model: the weights of the last whole step, or nothing at all."""
    engine = make(kind, folder)
    train(engine, 2)
    engine.wait_for_step()
    before, model = weights_of(engine.module), engine.module
    with failing("pwritev", times=10**9):
        within(20, lambda: [one_step(engine, x, y) for x, y in batches(2)])
    within(20, engine.destroy)
    after: list[Any] = []
    told = within(20, lambda: after.append(weights_of(model)))
    return told[0] != "hang" and (told[0] != "" or before.keys() == after[0].keys())


@covering(kind=("2 disk", "3 disk disk"))
def test_a_model_can_be_asked_for_its_weights_after_an_io_error(on_ranks, tmp_path, kind):
    assert on_ranks(1, weights_survive, kind, str(tmp_path)) == [True]
