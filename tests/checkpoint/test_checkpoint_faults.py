"""What a crash, a full disk, a lost rank or damage leaves of checkpoints: real processes, real signals, real disks."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import xxhash
from covering import covering
from models import config, more, one_in, rank, start
from torch import nn

import onefold
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.checkpoint.saving import rank_shard_writer, save_coordinator
from onefold.checkpoint.saving.rank_shard_writer import Phase
from onefold.comm import Board
from onefold.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

OnRanks = Callable[..., list[Any]]

# What the slowest error may take: ranks that fall silent are given up after 15 seconds.
PATIENCE = 30.0


class Stack(nn.Module):
    """A few layers whose lines are cut inside their weights."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def engine_of(width: int, stage: int = 2, **more: Any) -> onefold.Engine:
    torch.manual_seed(rank())
    return start(Stack(width), config(stage, **more))


def learn(engine: onefold.Engine, seed: int) -> None:
    width = engine.module.layers[0].in_features
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x))
    engine.step()


def digest(engine: onefold.Engine) -> str:
    """Of everything that this rank keeps: masters and states."""
    found = xxhash.xxh3_64()
    for parameter in engine.module.parameters():
        for part in (
            safe_get_local_fp32_param(parameter),
            safe_get_local_optimizer_state(parameter, "exp_avg"),
            safe_get_local_optimizer_state(parameter, "exp_avg_sq"),
        ):
            assert part is not None
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the library logs, from warnings up."""
    words: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        yield words
    finally:
        logger.removeHandler(handler)


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """The result, or the kind and the words of the error."""
    try:
        return "", work()
    except Exception as error:
        return type(error).__name__, str(error)


def data_folders(folder: str | Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/data-*"))


def named_folders(folder: str | Path) -> list[str]:
    """The data that manifests name."""
    found = []
    for manifest in Path(folder).glob("*/manifest.json"):
        with CheckpointReader.open(manifest.parent) as checkpoint:
            found += [f"{manifest.parent.name}/{name}" for name in checkpoint.manifest.data_folders]
    return sorted(found)


# -- jobs that are killed ----------------------------------------------------------------------------------------


class Job:
    """Ranks of one job, each in a process of its own that may be killed."""

    def __init__(self, world: int, case: Callable[..., None], *args: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.pipes, self.ranks = [], []
        for number in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(number, world, port, there, case, args), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.ranks.append(process)

    def tell(self, number: int, timeout: float = 60.0) -> Any:
        """The next thing a rank says; None once it is gone."""
        try:
            assert self.pipes[number].poll(timeout), f"rank {number} says nothing"
            return self.pipes[number].recv()
        except EOFError:
            return None

    def kill(self, numbers: list[int]) -> None:
        for number in numbers:
            pid = self.ranks[number].pid
            assert pid is not None
            if self.ranks[number].is_alive():
                os.kill(pid, signal.SIGKILL)

    def end(self) -> list[int | None]:
        self.kill(list(range(len(self.ranks))))
        for process in self.ranks:
            process.join(20)
        return [process.exitcode for process in self.ranks]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def _run(number: int, world: int, port: int, pipe: Any, case: Callable[..., None], args: tuple[Any, ...]) -> None:
    environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # torch's threads say at length that the others were killed
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        case(pipe, *args)
    except BaseException:
        pipe.send(traceback.format_exc())


MODES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "a tag a step": (None, {"checkpoint": {"keep_last": 2}}),
    "one tag": ("last", {}),
    "in the background": ("last", {"checkpoint": {"async": True}}),
}


def save_for_ever(pipe: Any, folder: str, diary: str, job: int, mode: str) -> None:
    """Take up what is there, save at once, then step and save without end, and keep a diary of it."""
    tag, more = MODES[mode]
    engine = engine_of(400, **more)
    page = os.open(f"{diary}/{rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**words: Any) -> None:
        os.write(page, json.dumps({**words, "clock": time.monotonic()}).encode() + b"\n")

    path, found = engine.load_checkpoint(folder)
    note(job=job, loaded=found, digest=digest(engine) if path else None)
    for number in range(10_000):
        learn(engine, seed=1000 * job + number)
        at = [job, engine.global_steps]
        note(saving=at, digest=digest(engine))
        engine.save_checkpoint(folder, tag, client_state={"at": at})
        note(returned=at)
        if number == 0:
            engine.wait_for_checkpoint()
            note(published=at)
            left = sorted(set(data_folders(folder)) - set(named_folders(folder))) if rank() == 0 else []
            # What an earlier job left under another tag stays until that tag is used again.
            mine = tag or f"global_step{engine.global_steps}"
            pipe.send([path for path in left if path.startswith(f"{mine}/")])


def read_diary(diary: Path, number: int) -> list[dict[str, Any]]:
    lines = (diary / str(number)).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def check_diary(diary: Path, world: int, *, background: bool) -> None:
    """Every load gave exactly what some save had been given, and nothing older than the last one that was through."""
    for number in range(world):
        digests: dict[tuple[int, int], str] = {}
        order: list[tuple[int, int]] = []
        sure = -1
        for line in read_diary(diary, number):
            if "saving" in line:
                order.append(tuple(line["saving"]))
                digests[order[-1]] = line["digest"]
            elif "published" in line or ("returned" in line and not background):
                sure = len(order) - 1
            elif "returned" in line:
                sure = max(sure, len(order) - 2)  # this one may be under way, the one before is not
            elif "loaded" in line:
                if line["loaded"] is None:
                    assert sure == -1
                    continue
                at = tuple(line["loaded"]["at"])
                assert line["digest"] == digests[at]
                assert order.index(at) >= sure, f"{at} was loaded, {order[sure]} had been saved"


def length_of_a_save(diary: Path, job: int) -> float:
    """How long the first save of a job took here, from its call until it was published."""
    of_job = [line for line in read_diary(diary, 0) if job in (line.get("saving") or line.get("published") or [])[:1]]
    published = next(line["clock"] for line in of_job if "published" in line)
    return published - next(line["clock"] for line in of_job if "saving" in line)


def wait_for_save(diary: Path, job: int, number: int) -> None:
    """Until the job has come to its save of that number."""
    deadline = time.monotonic() + PATIENCE
    while sum(line.get("saving", [-1])[0] == job for line in read_diary(diary, 0)) <= number:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_at_random(folder: Path, mode: str, num_kills: int, seed: int) -> None:
    """So many kills, and more until some of them have interrupted a save, however long one takes on this disk."""
    instants = random.Random(seed)
    saved, diary = folder / "saved", folder / "diary"
    diary.mkdir()
    number, num_interrupted, known = 0, 0, set[str]()
    while number < num_kills or num_interrupted < 2:
        assert number < 4 * num_kills, "no save was ever interrupted"
        with Job(2, save_for_ever, str(saved), str(diary), number, mode) as job:
            assert job.tell(0) == []
            wait_for_save(diary, number, instants.randrange(1, 4))
            time.sleep(instants.random() * 1.2 * length_of_a_save(diary, number))
            # One of them goes first, or all at once; what remains is ended as a launcher would.
            first = instants.choice([[0], [1], [0, 1]])
            job.kill(first)
            if len(first) == 1:
                time.sleep(instants.random() * 0.1)
        check_diary(diary, 2, background="background" in mode)
        left = set(data_folders(saved)) - set(named_folders(saved))
        num_interrupted += bool(left - known)
        known |= left
        number += 1
    with Job(2, save_for_ever, str(saved), str(diary), number, mode) as job:
        assert job.tell(0) == []
    check_diary(diary, 2, background="background" in mode)


@pytest.mark.parametrize("mode", [mode if "background" in mode else more(mode) for mode in MODES])
def test_killed_at_any_instant_the_last_checkpoint_is_there(tmp_path: Path, mode: str) -> None:
    kill_at_random(tmp_path, mode, 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("mode", MODES)
def test_killed_again_and_again_the_last_checkpoint_is_there(tmp_path: Path, mode: str, seed: int) -> None:
    kill_at_random(tmp_path, mode, 12, seed)


# -- ranks that do not come --------------------------------------------------------------------------------------


def without_the_others(pipe: Any, folder: str, whose: str) -> None:
    engine = engine_of(40)
    learn(engine, 0)
    engine.save_checkpoint(folder, "good")
    if rank() == 1:
        pipe.send("good")
        if whose == "has ended":
            os._exit(0)
        if whose == "has no engine":
            engine.destroy()
        elif whose == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2 * PATIENCE)
    begun = time.monotonic()
    kind, words = attempt(lambda: engine.save_checkpoint(folder, "bad"))
    pipe.send((kind, words, time.monotonic() - begun))
    time.sleep(2 * PATIENCE)


@pytest.mark.slow  # it takes the whole of a rank's patience
@pytest.mark.parametrize("whose", ["has ended", "has no engine", "is stopped"])
def test_a_rank_that_does_not_come_is_named_on_rank_0(on_ranks: OnRanks, tmp_path: Path, whose: str) -> None:
    with Job(2, without_the_others, str(tmp_path), whose) as job:
        kind, words, seconds = job.tell(0)
    assert kind == "SaveError"
    assert "rank 1" in words
    assert seconds < PATIENCE
    assert on_ranks(2, takes_up, str(tmp_path)) == [f"{tmp_path}/good"] * 2


def takes_up(folder: str) -> str | None:
    """Load, step, save: whatever came before."""
    engine = engine_of(40)
    path, _ = engine.load_checkpoint(folder)
    learn(engine, 1)
    engine.save_checkpoint(folder, "next")
    dist.barrier()
    assert sorted(set(data_folders(f"{folder}")) & {f"next/{p.name}" for p in Path(folder, "next").glob("data-*")}) == [
        path for path in named_folders(folder) if path.startswith("next/")
    ]
    return path


# -- two jobs, one folder ----------------------------------------------------------------------------------------


def save_beside_another(pipe: Any, folder: str, job: int, num_saves: int) -> None:
    engine = engine_of(60)
    told = []
    for number in range(num_saves):
        learn(engine, seed=1000 * job + number)
        found = [None, None]
        dist.all_gather_object(found, digest(engine))
        tag = ("one", "two")[number % 2]
        told.append((attempt(lambda tag=tag, found=found: engine.save_checkpoint(folder, tag, {"of": found})), found))
    pipe.send(told)
    time.sleep(PATIENCE)


def loaded_by_tag(folder: str) -> Any:
    engine = engine_of(60)
    found = {}
    for tag in ("one", "two"):
        _, client_state = engine.load_checkpoint(folder, tag)
        found[tag] = (client_state["of"][rank()] == digest(engine), client_state["of"])
        dist.barrier()
        engine.save_checkpoint(folder, tag)
    dist.barrier()
    return found, sorted(set(data_folders(folder)) - set(named_folders(folder)))


@pytest.mark.parametrize("num_saves", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_two_jobs_may_save_to_one_folder_under_the_same_tags(on_ranks: OnRanks, tmp_path: Path, num_saves: int) -> None:
    with (
        Job(2, save_beside_another, str(tmp_path), 1, num_saves) as first,
        Job(2, save_beside_another, str(tmp_path), 2, num_saves) as second,
    ):
        told = [job.tell(0) for job in (first, second)]
    assert [outcome for outcomes in told for outcome, _ in outcomes if outcome != ("", True)] == []
    known = [found for outcomes in told for _, found in outcomes]
    for found, left in on_ranks(2, loaded_by_tag, str(tmp_path)):
        for is_whole, of in found.values():
            assert is_whole
            assert of in known
        assert left == []


# -- disks -------------------------------------------------------------------------------------------------------


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or not mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)):
        pytest.skip("mounting a small disk needs root on Linux")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(disk: Path, num_free_pages: int) -> None:
    """Leave so many pages of the disk."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bfree
    size = ballast.stat().st_size if ballast.exists() else 0
    with ballast.open("ab") as file:
        file.truncate(max(0, size + (min(0, free - num_free_pages)) * 4096))
        if free > num_free_pages:
            os.posix_fallocate(file.fileno(), 0, size + (free - num_free_pages) * 4096)
    assert os.statvfs(disk).f_bfree == num_free_pages


def save_on_full_disk(folder: str, tag: str | None, background: bool) -> Any:
    """However full the disk: saved, or refused on every rank with the reason; what was there stays loadable."""
    engine, other = engine_of(60), engine_of(60)
    save_dir = f"{folder}/saved"
    learn(engine, 0)
    engine.save_checkpoint(save_dir, tag, client_state={"of": digest_of_all(engine)})
    kinds, problems = [], []
    for number in range(70):
        if rank() == 0:
            fill_up(Path(folder), number)
        dist.barrier()
        learn(engine, number)
        now = digest_of_all(engine)

        def save(now: list[str] = now) -> None:
            engine.save_checkpoint(save_dir, tag, client_state={"of": now}, background=background)
            engine.wait_for_checkpoint()

        kind, words = attempt(save)
        kinds.append(kind)
        if kind and "No space left" not in words:
            problems.append(f"{number} pages: {kind}: {words}")
        dist.barrier()
        kind, found = attempt(lambda: other.load_checkpoint(save_dir))
        if kind:
            problems.append(f"{number} pages, load: {kind}: {found}")
        elif found[1]["of"][rank()] != digest(other):
            problems.append(f"{number} pages: other values")
        elif not kinds[-1] and found[1]["of"] != now:
            problems.append(f"{number} pages: saved, but not loaded")
        problems += [f"{number} pages: {words}" for words in incomplete(save_dir)]
    return kinds, problems


def incomplete(folder: str | Path) -> list[str]:
    """What is wrong with anything that was published."""
    tags = [manifest.parent.name for manifest in Path(folder).glob("*/manifest.json")]
    return [
        words for tag in tags for kind, words in [attempt(lambda tag=tag: CheckpointReader.open(folder, tag))] if kind
    ]


def digest_of_all(engine: onefold.Engine) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest(engine))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("tag", "background"), [more("last", False), (None, False), more("last", True)])
def test_however_full_the_disk_what_was_saved_stays(
    on_ranks: OnRanks, disk: Path, tag: str | None, background: bool
) -> None:
    first, second = on_ranks(2, save_on_full_disk, str(disk), tag, background)
    assert first[1] == []
    assert second[1] == []
    assert first[0] == second[0]
    assert set(first[0]) == {"SaveError", ""}  # some did not fit, some did


def save_without_latest(folder: str) -> Any:
    """`latest` cannot be written: the tag is the old checkpoint or the new one, and whole."""
    engine, other = engine_of(40), engine_of(40)
    known = []
    for number in range(2):
        learn(engine, number)
        known.append(digest_of_all(engine))
        outcome = attempt(lambda known=known: engine.save_checkpoint(folder, "last", {"of": known[-1]}))
        dist.barrier()
        if rank() == 0 and number == 0:
            Path(folder, "latest").unlink()
            Path(folder, "latest").mkdir()
        dist.barrier()
    problems = incomplete(folder)
    _, client_state = other.load_checkpoint(folder, "last")
    dist.barrier()
    if rank() == 0:
        Path(folder, "latest").rmdir()
    dist.barrier()
    fits = client_state["of"] in known and client_state["of"][rank()] == digest(other)
    engine.save_checkpoint(folder, "last")
    return outcome[0], problems, fits


def test_a_save_that_cannot_write_latest_leaves_the_tag_whole(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, save_without_latest, str(tmp_path)) == [("SaveError", [], True)] * 2


def save_read_only(folder: str) -> Any:
    engine = engine_of(40)
    save_dir = f"{folder}/saved"
    learn(engine, 0)
    engine.save_checkpoint(save_dir, "good")
    of = digest(engine)
    dist.barrier()
    if rank() == 0:
        assert mount("-o", "remount,ro", folder)
    dist.barrier()
    learn(engine, 1)
    begun = time.monotonic()
    refused = [attempt(lambda tag=tag: engine.save_checkpoint(save_dir, tag)) for tag in ("good", "bad")]
    seconds = time.monotonic() - begun
    dist.barrier()
    engine.load_checkpoint(save_dir)
    dist.barrier()
    if rank() == 0:
        assert mount("-o", "remount,rw", folder)
    dist.barrier()
    engine.save_checkpoint(save_dir, "next")
    return refused, seconds, digest(engine) == of


def test_a_read_only_folder_is_named_on_every_rank_and_still_read(on_ranks: OnRanks, disk: Path) -> None:
    for refused, seconds, is_good in on_ranks(2, save_read_only, str(disk)):
        for kind, words in refused:
            assert kind == "SaveError"
            assert "Read-only file system" in words
        assert seconds < PATIENCE
        assert is_good


# -- damage ------------------------------------------------------------------------------------------------------


def save_two(folder: str) -> None:
    """Two checkpoints: "one", and the newer "two"."""
    engine = engine_of(60)
    for number, tag in enumerate(("one", "two")):
        learn(engine, number)
        with torch.no_grad():
            engine.module.seen.fill_(number + rank() / 10)
        client_state = {"of": digest_of_all(engine), "tensor": torch.arange(9)}
        engine.save_checkpoint(folder, tag, client_state)


@pytest.fixture(scope="module")
def two(on_ranks: OnRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    on_ranks(2, save_two, str(folder))
    return folder


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "copy"))


def load_damaged(folder: str, steps: int, switches: dict[str, bool], trains: bool) -> Any:
    """Without a tag, then with it: what is loaded, what is said, whether the values are those that were saved."""
    settings = config(2)
    if not trains:
        del settings["optimizer"]
    torch.manual_seed(rank())
    engine = start(Stack(60), settings)
    for number in range(steps):
        learn(engine, 100 + number)
    before = digest(engine) if trains else ""
    kind, error = attempt(lambda: engine.load_checkpoint(folder, "two", **switches))
    kept = not kind or not steps or digest(engine) == before
    with heard() as words:
        other, found = attempt(lambda: engine.load_checkpoint(folder, **switches))
    if other:
        return (kind, error, kept), (other, found), words
    path, client_state = found
    full = trains and not switches
    fits = path is not None and (not full or client_state["of"][rank()] == digest(engine))
    if steps:
        learn(engine, 7)
    return (kind, error, kept), (path and Path(path).name, fits), words


def tensor_file(folder: Path, tag: str, name: str, of: int = 0) -> tuple[Path, int]:
    """The file and the place of a tensor's part."""
    with CheckpointReader.open(folder, tag) as checkpoint:
        part = checkpoint.manifest.tensors[name].parts[of]
        return folder / tag / checkpoint.manifest.files[part.file].name, part.offset


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


TENSORS = {
    "weight, first rank": ("model/layers.0.weight", 0),
    "weight, second rank": ("model/layers.0.weight", 1),
    "optimizer state": ("optimizer/layers.1.weight/exp_avg_sq", 1),
    "buffer": ("model/seen", 0),
    "second rank's buffer": ("buffer/1/seen", 0),
    "second rank's random numbers": ("rank/1/0", 0),
    "client state": ("state/0", 0),
}


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("which", one_in(4, TENSORS))
def test_a_flipped_bit_in_a_tensor_is_named_and_the_older_checkpoint_taken(
    on_ranks: OnRanks, copy: Path, which: str, steps: int
) -> None:
    name, part = TENSORS[which]
    path, offset = tensor_file(copy, "two", name, part)
    flip(path, offset)
    for number, ((kind, error, kept), taken, words) in enumerate(on_ranks(2, load_damaged, str(copy), steps, {}, True)):
        assert kind == "CheckpointError"
        assert str(path) in error
        assert name in error
        assert kept
        assert taken == ("one", True)
        assert number > 0 or any(str(path) in word and name in word for word in words)


SWITCHES = {
    "module only": ({"load_module_only": True}, True),
    "no optimizer states": ({"load_optimizer_states": False}, True),
    "evaluation": ({}, False),
}


@pytest.mark.parametrize("switch", ["evaluation", more("module only"), more("no optimizer states")])
@pytest.mark.parametrize("which", ["second rank's random numbers", "client state", "second rank's buffer"])
def test_damage_to_what_a_load_does_not_need_is_no_harm_or_the_same_on_every_rank(
    on_ranks: OnRanks, copy: Path, which: str, switch: str
) -> None:
    name, part = TENSORS[which]
    flip(*tensor_file(copy, "two", name, part))
    switches, trains = SWITCHES[switch]
    first, second = on_ranks(2, load_damaged, str(copy), 0, switches, trains)
    assert first[0][0] == second[0][0]
    assert first[1] == second[1]
    assert first[1][0] in ("one", "two")
    assert first[1][1]


def damage(folder: Path, kind: str, how: str) -> Path:
    """Damage one file of "two"."""
    path = {
        "manifest": folder / "two" / "manifest.json",
        "rank file": tensor_file(folder, "two", "model/layers.0.weight", 1)[0],
        "latest": folder / "latest",
    }[kind]
    size = path.stat().st_size
    match how:
        case "flipped early":
            flip(path, min(20, size - 1))
        case "flipped late":
            flip(path, size - 1)
        case "empty":
            os.truncate(path, 0)
        case "half":
            os.truncate(path, size // 2)
        case "a byte short":
            os.truncate(path, size - 1)
        case "longer":
            path.write_bytes(path.read_bytes() + b"\0")
        case "missing":
            path.unlink()
        case "a folder":
            path.unlink()
            path.mkdir()
    return path


WAYS = ("flipped early", "flipped late", "empty", "half", "a byte short", "longer", "missing", "a folder")


def load_each(folders: list[str], tag: str | None) -> list[Any]:
    engine = engine_of(60)
    found = []
    for folder in folders:
        with heard() as words:
            kind, result = attempt(lambda folder=folder: engine.load_checkpoint(folder, tag))
        if not kind and result[0] is not None:
            result = Path(result[0]).name, result[1]["of"][rank()] == digest(engine)
        found.append((kind, result, words))
        learn(engine, 5)
    return found


@pytest.mark.parametrize("kind", ["manifest", "rank file", "latest"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
    on_ranks: OnRanks, two: Path, tmp_path: Path, kind: str
) -> None:
    folders = [Path(shutil.copytree(two, tmp_path / how)) for how in WAYS]
    paths = [damage(folder, kind, how) for folder, how in zip(folders, WAYS, strict=True)]
    untagged = on_ranks(2, load_each, [str(folder) for folder in folders], None)
    tagged = on_ranks(2, load_each, [str(folder) for folder in folders], "two")
    for index, how in enumerate(WAYS):
        if kind == "latest":  # "two" is whole, and the newest
            for number in range(2):
                error, result, words = untagged[number][index]
                assert (error, result) == ("", ("two", True)), how
                assert how in ("missing", "longer") or number > 0 or words, how
                assert tagged[number][index][:2] == ("", ("two", True)), how
            continue
        for number in range(2):
            error, result, words = untagged[number][index]
            assert (error, result) == ("", ("one", True)), how
            assert number > 0 or any(str(paths[index].parent) in word for word in words), (how, words)
            error, text, _ = tagged[number][index]
            assert error == "CheckpointError", how
            assert str(paths[index].parent) in text, how


def resave(folder: str) -> Any:
    """After any damage the next save works, and is what is loaded."""
    engine = engine_of(60)
    learn(engine, 9)
    engine.save_checkpoint(folder, "two", {"of": digest_of_all(engine)})
    other = engine_of(60)
    with heard() as words:
        path, found = other.load_checkpoint(folder)
    assert found is not None
    return path, found["of"][rank()] == digest(other), words


@covering(kind=("manifest", "rank file", "latest"), how=("flipped early", "empty", "missing"), strength=1)
def test_a_save_over_a_damaged_checkpoint_works(on_ranks: OnRanks, copy: Path, kind: str, how: str) -> None:
    damage(copy, kind, how)
    assert on_ranks(2, resave, str(copy)) == [(f"{copy}/two", True, [])] * 2


def everything_damaged(folder: str) -> Any:
    engine = engine_of(60)
    learn(engine, 3)
    before = digest(engine)
    return *attempt(lambda: engine.load_checkpoint(folder)), digest(engine) == before


def test_where_no_checkpoint_is_whole_each_is_named_and_nothing_changes(on_ranks: OnRanks, copy: Path) -> None:
    paths = [tensor_file(copy, tag, "optimizer/layers.2.weight/exp_avg", 1) for tag in ("one", "two")]
    flip(*paths[0])
    os.truncate(paths[1][0], 1000)
    for kind, words, kept in on_ranks(2, everything_damaged, str(copy)):
        assert kind == "CheckpointError"
        assert str(paths[0][0]) in words
        assert kept


# -- a copy that fails beside training -----------------------------------------------------------------------------


def copy_fails(folder: str, whose: int, alone: bool) -> Any:
    """Optimizer states cannot be copied on one rank: all are told at a step, none waits, and the next save works."""
    engine = engine_of(60)
    learn(engine, 1)
    engine.save_checkpoint(folder, "good")
    works = rank_shard_writer.copy_slots

    def copy(pairs: Any) -> None:
        if any(slot.name.startswith("optimizer/") for slot, _ in pairs):
            raise MemoryError("no memory for a copy")
        works(pairs)

    told = []
    with mock.patch.object(rank_shard_writer, "copy_slots", copy) if rank() == whose else nullcontext():
        if rank() == 0 or not alone:
            told.append(attempt(lambda: engine.save_checkpoint(folder, "bad", background=True)))
        for number in range(4):
            time.sleep(0.3)
            told.append(attempt(lambda number=number: learn(engine, number)))
    errors = [(kind, words) for kind, words in told if kind]
    dist.barrier()
    left = data_folders(folder), Path(folder, "latest").read_text()
    steps = engine.global_steps
    dist.barrier()  # nobody saves before everybody has looked
    engine.zero_grad()
    engine.save_checkpoint(folder, "next")
    other = engine_of(60)
    other.load_checkpoint(folder)
    return errors, left, steps, digest(other) == digest(engine)


@pytest.mark.parametrize(("world", "whose"), [(2, 1), more(1, 0), more(2, 0)])
@pytest.mark.parametrize("alone", [False, more(True)])
def test_a_copy_in_the_background_that_fails_is_told_and_nothing_waits(
    on_ranks: OnRanks, tmp_path: Path, world: int, whose: int, alone: bool
) -> None:
    for index, found in enumerate(on_ranks(world, copy_fails, str(tmp_path), whose, alone)):
        errors, (data, latest), steps, same = found
        # By the call itself where the copy had failed by then, or by the step, at which all ranks are told. A rank that
        # has not called hears nothing of what the call told rank 0.
        if errors or not (alone and index):
            assert 1 <= len(errors) <= 2, errors
            assert {kind for kind, _ in errors} <= {"SaveError", "MemoryError"}, errors
            assert "no memory for a copy" in errors[0][1] or "See the error of that rank" in errors[0][1]
        assert [name.partition("/")[0] for name in data] == ["good"]
        assert (latest, same) == ("good", True)
        assert steps >= 3


def write_fails_at_once(folder: str) -> Any:
    """Rank 1 fails to write before rank 0 has looked whether it has copied its weights."""
    engine = engine_of(60)
    learn(engine, 1)
    awaits = save_coordinator.SavePublisher.await_phase

    def await_failure(publisher: Any, request: Any, phase: Any) -> None:
        def has_failed() -> bool:
            return (publisher._board.read("part/1") or {}).get("phase") == Phase.FAILED

        publisher._board.wait(has_failed, lambda: [1], "a failure")
        awaits(publisher, request, phase)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    patched = (save_coordinator.SavePublisher, "await_phase", await_failure)
    if rank() == 1:
        patched = (rank_shard_writer, "write_shard", fails)
    with mock.patch.object(*patched):
        told = [attempt(lambda: engine.save_checkpoint(folder, "bad", background=True))]
        for number in range(200):  # until rank 0 has published its verdict
            told.append(attempt(lambda number=number: learn(engine, number)))
            if told[-1][0]:
                break
            time.sleep(0.01)
    engine.zero_grad()
    return told, engine.global_steps


def test_a_write_in_the_background_that_fails_at_once_is_raised_by_the_same_step_on_all_ranks(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    """Rank 0 must not raise in `save_checkpoint` when the others raise in the next step: a program may catch it."""
    (told, steps), (theirs, their_steps) = on_ranks(2, write_fails_at_once, str(tmp_path))
    assert told[0] == theirs[0] == ("", True)
    assert steps == their_steps
    assert told[-1][0] == theirs[-1][0] == "SaveError"
    assert "rank 1: OSError: [Errno 28] No space left on device" in told[-1][1]


# -- whatever phase fails ------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As KeyboardInterrupt: no Exception."""


# What fails, where it is looked up, and the kinds of errors.
FAULTS: dict[str, tuple[Any, str]] = {
    "collecting": (rank_shard_writer.RankShardWriter, "prepare"),
    "writing": (rank_shard_writer, "write_shard"),
    "telling of it": (rank_shard_writer, "replace_file"),
    "starting a thread": (save_coordinator.SaveCoordinator, "_start_thread"),
    "publishing": (save_coordinator.SavePublisher, "_publish"),
}


def phase_fails(folder: str, fault: str, kind: type[BaseException], whose: int, background: bool, alone: bool) -> Any:
    """One rank fails in one phase: nobody waits for ever, nothing is published, and the next save works."""
    engine = engine_of(60)
    learn(engine, 1)
    engine.save_checkpoint(folder, "good")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise kind("it went wrong")

    told: list[tuple[str, str]] = []

    def attempt_all(work: Callable[[], Any]) -> None:
        try:
            work()
        except (Exception, Interrupted) as error:
            told.append((type(error).__name__, str(error)))

    begun = time.monotonic()
    with mock.patch.object(*FAULTS[fault], fails) if rank() == whose else nullcontext():
        if rank() == 0 or not alone:
            attempt_all(lambda: engine.save_checkpoint(folder, "bad", background=background))
            attempt_all(engine.wait_for_checkpoint)
        seconds = time.monotonic() - begun
        dist.barrier()  # a rank that only joins is still the one that fails
    left = [name.partition("/")[0] for name in data_folders(folder)], Path(folder, "latest").read_text()
    dist.barrier()
    for number in range(2):
        attempt_all(lambda number=number: learn(engine, number))
    engine.zero_grad()
    engine.save_checkpoint(folder, "next")
    other = engine_of(60)
    other.load_checkpoint(folder)
    return told, left, seconds, digest(other) == digest(engine)


def can_happen(fault: str, whose: int, kind: type[BaseException], background: bool) -> bool:
    if fault == "starting a thread":
        return background  # no other save starts one
    if kind is Interrupted and background:
        return fault == "collecting"  # a user interrupts the program's own thread alone
    return fault != "publishing" or whose == 0


@covering(
    fault=("collecting", "writing", "publishing", "telling of it", "starting a thread"),
    whose=(0, 1),
    kind=(ValueError, Interrupted),
    background=(False, True),
    where=can_happen,
    strength=1,
)
def test_whatever_phase_fails_every_rank_is_told_and_none_waits(
    on_ranks: OnRanks, tmp_path: Path, fault: str, whose: int, kind: type[BaseException], background: bool
) -> None:
    found = on_ranks(2, phase_fails, str(tmp_path), fault, kind, whose, background, False)
    for number, (told, left, seconds, same) in enumerate(found):
        assert told, "an error is told on every rank"
        kinds = {told[0][0]} - {"Interrupted" if number == whose else ""}
        assert kinds <= {"SaveError"}
        assert number == whose or "it went wrong" in told[0][1]
        assert left == (["good"], "good")
        assert seconds < 10
        assert same


@covering(fault=("collecting", "starting a thread", more("writing")), background=(False, True), strength=1)
def test_a_rank_that_fails_to_join_is_named_on_rank_0(
    on_ranks: OnRanks, tmp_path: Path, fault: str, background: bool
) -> None:
    first, second = on_ranks(2, phase_fails, str(tmp_path), fault, ValueError, 1, background, True)
    assert first[0][0][0] == "SaveError"
    assert "rank 1: ValueError: it went wrong" in first[0][0][1]
    for _, left, seconds, same in (first, second):
        assert left == (["good"], "good")
        assert seconds < 10
        assert same


def foreground_after_background(folder: str) -> float:
    engine = engine_of(60)
    learn(engine, 1)
    engine.save_checkpoint(folder, "one", background=True)
    engine.save_checkpoint(folder, "two")
    begun = time.monotonic()
    learn(engine, 2)
    return time.monotonic() - begun


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_does_not_wait_for_a_save_that_is_over(on_ranks: OnRanks, tmp_path: Path, world: int) -> None:
    assert max(on_ranks(world, foreground_after_background, str(tmp_path))) < 10


# -- engines that go -----------------------------------------------------------------------------------------------


def engines_go() -> Any:
    """By the garbage collector, by `destroy`, by `del`: what is left to do at exit, and what was waited for."""
    waits: list[str] = []
    left: list[weakref.ref[Any]] = []
    works, registers = Board.wait, atexit.register

    def wait(board: Board, ready: Any, whom: Any, what: str) -> None:
        waits.append(what)
        works(board, ready, whom, what)

    def register(function: Any, *args: Any) -> Any:
        left.append(weakref.ref(function))
        return registers(function, *args)

    engine_of(60).destroy()  # what a process registers once, it has registered now
    gc.collect()
    gc.disable()
    found = []
    with mock.patch.object(Board, "wait", wait), mock.patch.object(atexit, "register", register):
        for how in ("garbage", "destroy", "del"):
            engine = engine_of(60)
            learn(engine, 1)
            dist.barrier()
            there = len([entry for entry in left if entry() is not None])
            if how == "garbage":
                circle: list[Any] = [engine]
                circle.append(circle)
                waits.clear()
                del engine, circle
                if rank() == 1:  # rank 0's is there still
                    gc.collect()
                    found.append((how, list(waits)))
                dist.barrier()
                gc.collect()
            elif how == "destroy":
                engine.destroy()
            else:
                del engine
            dist.barrier()
            found.append((how, there, len([entry for entry in left if entry() is not None])))
    gc.enable()
    return found


def test_an_engine_that_goes_leaves_nothing_for_the_exit_and_keeps_no_collector_waiting(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, engines_go)
    assert first == [("garbage", 1, 0), ("destroy", 1, 0), ("del", 1, 0)]
    assert second == [("garbage", []), *first]


# -- pickles -----------------------------------------------------------------------------------------------------


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_a_trap_springs_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("how", ["pickle", more("torch")])
def test_no_file_is_unpickled(on_ranks: OnRanks, two: Path, tmp_path: Path, how: str) -> None:
    mark = tmp_path / "mark"
    files = sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    assert len(files) >= 2 * 3 + 2
    folders = []
    for index, name in enumerate([*files, Path("two/mp_rank_00_model_states.pt"), Path("two/data.pt")]):
        folder = Path(shutil.copytree(two, tmp_path / str(index)))
        trap = io.BytesIO()
        (torch.save if how == "torch" else pickle.dump)({"module": Trap(mark)}, trap)
        (folder / name).write_bytes(trap.getvalue())
        folders.append(str(folder))
    for tag in (None, "two"):
        for outcomes in on_ranks(2, load_each, folders, tag):
            for kind, result, _ in outcomes:
                assert kind == "CheckpointError" if kind else result[1]
    assert not mark.exists()
