"""Peer copies of an engine: which load uses them, what they need, and what they are made of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, first_difference, flip, net, start, train

from onefold import Engine
from onefold.checkpoint.format import folder as checkpoint_folder
from onefold.checkpoint.format.peer_copy import (
    FOLDER_VARIABLE,
    PROBLEM_VARIABLE,
    RESUME_VARIABLE,
    join_copy,
    list_copies,
    read_complete,
    read_rejected,
)
from onefold.checkpoint.saving import rank_shard_writer
from onefold.checkpoint.saving.rank_shard_writer import SaveError
from onefold.compat import deepspeed
from onefold.engine.peer_copies import PeerCopies
from onefold.errors import ConfigError
from onefold.recovery.refused_step import ReplicaError
from onefold.tools.train.loop import start_engine


@contextmanager
def launched(folder: str, resume: list[str]) -> Iterator[None]:
    """Act as a rank that a launcher has started, in a process without engines of its own."""
    before, PeerCopies._num_engines, PeerCopies._num_copies = dict(os.environ), 0, 0
    os.environ |= {FOLDER_VARIABLE: folder, RESUME_VARIABLE: ",".join(resume), "ONEFOLD_RESTARTS": str(len(resume))}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def settings(stage: int = 2, every: int = 2, **more: Any) -> dict[str, Any]:
    return config(stage, onefold={"peer_copies": {"every": every}}, **more)


def make_copies(folder: str, stage: int, saves_at: int | None = None, **options: Any) -> list[Any]:
    """Train for 5 steps with copies after steps 2 and 4; return the rest of the run as well."""
    with launched(folder, []):
        engine = start(net(), settings(stage))
        if options.get("gives_state"):
            engine.set_client_state_of_copies(lambda: {"seen": engine.global_steps})
        for step in range(1, 6):
            train(engine, 1, seed=step)
            engine.wait_for_checkpoint()
            if step == saves_at:
                engine.save_checkpoint(f"{folder}/saved", client_state=options.get("client_state"))
        engine._copies._every = None  # the ranks end here; what follows is for comparison
        straight = train(engine, 2, seed=9)
        engine.destroy()
    if dist.get_rank() == 0:
        for name in list_copies(Path(folder)):
            join_copy(Path(folder, name))
    dist.barrier()
    return [straight]


def load(folder: str, stage: int = 2, tag: str | None = None, **options: Any) -> dict[str, Any]:
    """Load as a restarted program does; which checkpoint it was, and the engine's state after it."""
    copies = list_copies(Path(folder))
    with launched(folder, copies):
        engine = start(net(seed=8), settings(stage, every=100))
        if options.pop("steps_first", False):
            train(engine, 1)
        path, client_state = engine.load_checkpoint(f"{folder}/saved", tag=tag, **options)
        name = Path(path).name if path is not None else None
        found = {"name": name, "steps": engine.global_steps, "client_state": client_state, "last": engine._saver.last}
        return {**found, "engine": engine, "copies": copies}


def resumes_bit_for_bit(folder: str, stage: int) -> list[Any]:
    (straight,) = make_copies(folder, stage)
    found = load(folder, stage)
    engine: Engine = found["engine"]
    with launched(folder, []):
        again = train(engine, 1, seed=5), train(engine, 2, seed=9)
        text = engine.describe()
        engine.destroy()
    return [
        (found["name"], found["steps"], found["client_state"], found["last"]),
        first_difference(again[1], straight),
        found["copies"],
        "peer copies       every 100 steps, in the memory of this node" in text,
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_resumes_the_run_bit_for_bit(on_ranks: Any, tmp_path: Path, stage: int) -> None:
    newest, older = "copy-000000-00000002-0000-000002", "copy-000000-00000001-0000-000002"
    for found in on_ranks(2, resumes_bit_for_bit, str(tmp_path), stage):
        assert found == [(newest, 4, {}, None), None, [newest, older], True]
    assert read_complete(tmp_path) == newest
    for path in tmp_path.glob("copy-*/**/*"):
        assert path.stat().st_mode & 0o077 == 0, path


def loads_the_newest(folder: str) -> list[Any]:
    """Return what is loaded if the disk is older, newer, named, or asked for weights only, or after a step."""
    found = []

    def note(where: str, **options: Any) -> None:
        got = load(f"{folder}/{where}", **options)
        found.append((where, got["name"], got["steps"], got["client_state"], str(got["last"] or "").rpartition("/")[2]))
        got["engine"].destroy()

    make_copies(f"{folder}/older", 2, saves_at=3)
    for options in ({}, {"tag": "global_step3"}, {"load_module_only": True}, {"steps_first": True}):
        note("older", **options)
    make_copies(f"{folder}/newer", 2, saves_at=5)
    note("newer")
    make_copies(f"{folder}/stateful", 2, saves_at=3, client_state={"seen": 3})
    note("stateful")
    make_copies(f"{folder}/provided", 2, saves_at=3, client_state={"seen": 3}, gives_state=True)
    note("provided")
    return found


def test_the_newest_state_is_loaded(on_ranks: Any, tmp_path: Path) -> None:
    for name in ("older", "newer", "stateful", "provided"):
        (tmp_path / name).mkdir()
    copy = "copy-000000-00000002-0000-000002"
    assert on_ranks(2, loads_the_newest, str(tmp_path))[0] == [
        ("older", copy, 4, {}, "global_step3"),
        ("older", "global_step3", 3, {}, "global_step3"),
        ("older", "global_step3", 0, {}, ""),
        ("older", "global_step3", 3, {}, "global_step3"),
        ("newer", "global_step5", 5, {}, "global_step5"),
        ("stateful", "global_step3", 3, {"seen": 3}, "global_step3"),
        ("provided", copy, 4, {"seen": 4}, "global_step3"),
    ]


def skips_damage(folder: str) -> list[Any]:
    """Damage the data of one copy after the other, then their manifests."""
    make_copies(folder, 2, saves_at=1)
    names, found = list_copies(Path(folder)), []
    for damaged in names:
        if dist.get_rank() == 0:
            (path,) = Path(folder, damaged).glob("data-*/rank-00001.safetensors")
            flip(path, path.stat().st_size - 3)
        dist.barrier()
        got = load(folder)
        found.append((got["name"], got["steps"]))
        got["engine"].destroy()
    if dist.get_rank() == 0:
        for name in names:
            flip(Path(folder, name, "manifest.json"), 40)
    dist.barrier()
    got = load(folder)
    found.append((got["name"], got["steps"]))
    got["engine"].destroy()
    return [names, found]


def test_damaged_copies_are_skipped(on_ranks: Any, tmp_path: Path) -> None:
    names, found = on_ranks(2, skips_damage, str(tmp_path))[1]
    assert found == [(names[1], 2), ("global_step1", 1), ("global_step1", 1)]


def loads_from_another_program(folder: str) -> tuple[str, int]:
    make_copies(folder, 2, saves_at=1)
    before, sys.argv = sys.argv, [*sys.argv, "--other"]
    try:
        found = load(folder)
    finally:
        sys.argv = before
    found["engine"].destroy()
    return found["name"], found["steps"]


def test_a_copy_of_a_program_with_other_arguments_is_not_loaded(on_ranks: Any, tmp_path: Path) -> None:
    assert on_ranks(2, loads_from_another_program, str(tmp_path)) == [("global_step1", 1)] * 2


def goes_on_after_failures(folder: str, failing: int) -> list[Any]:
    """The second of three copies fails on one rank, and its folder is there again, as a mirror may make it."""
    write, failed = rank_shard_writer.write_shard, []

    def write_or_fail(path: Path, *arguments: Any) -> Any:
        if "-00000002-" in str(path) and dist.get_rank() == failing:
            failed.append(path)
            raise OSError("no space left")
        return write(path, *arguments)

    with launched(folder, []):
        engine, names = start(net(), settings(every=1)), []
        rank_shard_writer.write_shard = write_or_fail
        try:
            for step in range(3):
                train(engine, 1, seed=step)
                engine.wait_for_checkpoint()
                dist.barrier()
                names.append(read_complete(Path(folder)))
                if step == 1 and dist.get_rank() == 0:
                    Path(folder, "copy-000000-00000002-0000-000002").mkdir()
                dist.barrier()
        finally:
            rank_shard_writer.write_shard = write
        engine.destroy()
    return [names, len(failed)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_follows_one_that_has_failed(on_ranks: Any, tmp_path: Path, rank: int) -> None:
    first, third = (f"copy-000000-{number:08}-0000-000002" for number in (1, 3))
    found = on_ranks(2, goes_on_after_failures, str(tmp_path), rank)
    assert [names for names, _ in found] == [[first, first, third]] * 2
    assert [number for _, number in found] == [int(rank == 0), int(rank == 1)]


def goes_on_after_a_declined_start(folder: str) -> list[str]:
    """The second copy fails, and the third one cannot begin. Return the numbers of the complete copies after steps."""
    write, make = rank_shard_writer.write_shard, checkpoint_folder.new_data_folder

    def write_or_fail(path: Path, *arguments: Any) -> Any:
        if "-00000002-" in str(path):
            raise OSError("no space left")
        return write(path, *arguments)

    def make_or_fail(path: Any, **options: Any) -> Any:
        if "-00000003-" in str(path):
            raise OSError("no space left")
        return make(path, **options)

    with launched(folder, []):
        engine, numbers = start(net(), settings(every=1)), []
        rank_shard_writer.write_shard, checkpoint_folder.new_data_folder = write_or_fail, make_or_fail
        try:
            for step in range(5):
                train(engine, 1, seed=step)
                engine.wait_for_checkpoint()
                dist.barrier()
                numbers.append((read_complete(Path(folder)) or "")[12:20])
                dist.barrier()
        finally:
            rank_shard_writer.write_shard, checkpoint_folder.new_data_folder = write, make
        engine.destroy()
    return numbers


def test_copies_follow_a_failure_and_a_start_that_was_declined(on_ranks: Any, tmp_path: Path) -> None:
    expected = [f"{number:08}" for number in (1, 1, 1, 4, 5)]
    assert on_ranks(2, goes_on_after_a_declined_start, str(tmp_path)) == [expected] * 2


def raises_in_client_state(folder: str) -> str:
    def fail() -> dict[str, Any]:
        raise OSError("the position cannot be read")

    with launched(folder, []):
        engine = start(net(), settings(every=1))
        engine.set_client_state_of_copies(fail)
        with pytest.raises((OSError, SaveError)) as caught:
            train(engine, 1)
        engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_client_state_is_raised_on_all_ranks(on_ranks: Any, tmp_path: Path) -> None:
    """It is no lack of space, for which a copy would be declined."""
    own = "OSError: the position cannot be read"
    assert on_ranks(2, raises_in_client_state, str(tmp_path)) == [own, f"SaveError: rank 0 cannot save: {own}"]


def copies_of_two_engines(folder: str) -> list[str]:
    with launched(folder, []):
        for _ in range(2):
            engine = start(net(), settings(every=1))
            if dist.get_rank() == 0:  # other ranks need no client state
                engine.set_client_state_of_copies(lambda: {"seen": 1})
            else:
                engine.set_client_state_of_copies(lambda: 1 / 0)
            train(engine, 1)
            engine.wait_for_checkpoint()
            engine.destroy()
    return list_copies(Path(folder))


def test_copies_of_later_engines_have_later_names(on_ranks: Any, tmp_path: Path) -> None:
    newest = on_ranks(2, copies_of_two_engines, str(tmp_path))[0][0]
    assert newest == "copy-000000-00000002-0001-000002"


def goes_back(folder: str) -> list[Any]:
    """Return the rejected copy after a load in the middle of a run, and after replicas were found to differ."""
    found: list[Any] = []
    with launched(folder, []):
        engine = start(net(), config(0, onefold={"peer_copies": {"every": 2}, "replica_check_every": 1}))
        engine.save_checkpoint(f"{folder}/saved", tag="start")
        train(engine, 2)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(f"{folder}/saved", tag="start")
        found.append(read_rejected(Path(folder)))
        train(engine, 2)
        engine.wait_for_checkpoint()
        if dist.get_rank() == 1:  # a flipped bit, which no version counter shows
            next(engine.module.parameters()).detach().view(-1).view(torch.uint8).numpy()[0] ^= 4
        with pytest.raises(ReplicaError):
            train(engine, 1)
        found.append(read_rejected(Path(folder)))
        engine.destroy()
    dist.barrier()
    return found


def test_copies_of_a_discarded_state_are_rejected(on_ranks: Any, tmp_path: Path) -> None:
    names = [f"copy-000000-{number:08}-0000-000002" for number in (1, 2)]
    assert on_ranks(2, goes_back, str(tmp_path))[0] == names


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusals(folder: str) -> list[str]:
    texts = []

    def refused(make: Any, **environment: str) -> None:
        os.environ |= environment
        with pytest.raises((ConfigError, ValueError)) as caught:
            make()
        texts.append(str(caught.value))

    refused(lambda: start(net(), settings()))
    refused(lambda: start(net(), settings()), **{PROBLEM_VARIABLE: "Node 1 (b) has none: no space"})
    del os.environ[PROBLEM_VARIABLE]
    with launched(folder, []):
        refused(lambda: start_engine(None, SimpleNamespace(document=settings())))  # type: ignore[arg-type]
        refused(lambda: deepspeed.initialize(model=net(), config=settings()))
        engine = start(net(), settings())
        refused(lambda: start(net(), settings()))
        engine.destroy()
        start(net(), settings()).destroy()
        refused(lambda: start(net(), settings()), GROUP_WORLD_SIZE="2", GROUP_RANK="0")
    return texts


def test_what_copies_need_is_named(on_ranks: Any, tmp_path: Path) -> None:
    told = ["This rank has no launcher. Start all nodes by `onefold launch --max-restarts N`"]
    told += [
        "launcher. Node 1 (b) has none: no space. Start",
        "set --save-every",
        "behind DeepSpeed's names",
        "another engine",
    ]
    told.append("ONEFOLD_JOB_SECRET_FILE")
    for texts in on_ranks(2, refusals, str(tmp_path)):
        assert len(texts) == len(told)
        for text, part in zip(texts, told, strict=True):
            assert "onefold.peer_copies" in text
            assert part in text


def too_small(folder: str) -> str:
    with launched(folder, []), pytest.raises(ConfigError) as caught:
        start(net(), settings())
    return str(caught.value)


def test_too_little_shared_memory_is_an_error_before_training(on_ranks: Any, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        for text in on_ranks(2, too_small, str(tmp_path)):
            assert text.startswith("onefold.peer_copies: node 0 needs ")
            assert "32.8 kB are free. Enlarge it" in text
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
