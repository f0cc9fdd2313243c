"""Tensors on disk: what is stored comes back, neighbours stay, nothing of the user's is touched, nothing is left."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from onefold.config import Aio, ConfigError
from onefold.offload import swap_folder
from onefold.offload.drive import SwapError
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import SwapFiles

MIB = 1 << 20
SMALL = Aio(block_size=8192, queue_depth=4)
fork = multiprocessing.get_context("fork")


@pytest.fixture
def swap_on(mounted):
    """`swap_on(*paths)` is a swap, not yet open; closed when the test ends, before anything is unmounted."""
    made = []

    def make(*paths, aio=SMALL, count=lambda operation, num_bytes: None):
        made.append(SwapFiles([str(path) for path in paths], aio=aio, rank=3, count=count))
        return made[-1]

    yield make
    for swap in made:
        swap.close()


def values(numel, dtype=torch.float32, shift=0):
    """Random bytes; with a shift, off the page and off everything."""
    num_bytes = numel * dtype.itemsize
    memory = page_aligned(num_bytes + 64)[shift : shift + num_bytes].view(dtype)
    memory.view(torch.uint8).random_(0, 256)
    return memory


def same(left, right):
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def rank_folders(path):
    shelf = path / "onefold-swap"
    return sorted(shelf.iterdir()) if shelf.exists() else []


class Calls:
    """Stands between a swap and one system call: sees each request, and how many are in flight."""

    def __init__(self, monkeypatch, name, seconds=0.0, act=None):
        self.sizes, self.in_flight, self.most = [], 0, 0
        self._real, self._lock, self._seconds, self._act = getattr(os, name), threading.Lock(), seconds, act
        monkeypatch.setattr(os, name, self)

    def __call__(self, fd, buffers, offset):
        with self._lock:
            number = len(self.sizes)
            self.sizes.append(len(buffers[0]))
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        try:
            time.sleep(self._seconds)
            return self._act(self._real, number, fd, buffers, offset) if self._act else self._real(fd, buffers, offset)
        finally:
            with self._lock:
                self.in_flight -= 1


# -- bytes


@pytest.mark.parametrize("kind", ["direct", "buffered"])
@pytest.mark.parametrize("aio", [SMALL, Aio(), Aio(block_size=1, queue_depth=200)], ids=["small", "default", "odd"])
def test_any_range_of_any_dtype_round_trips_and_neighbours_stay(swap_on, tmp_path, mounted, kind, aio):
    path = tmp_path if kind == "direct" else mounted("ramfs")
    swap = swap_on(path / "a", path / "b", aio=aio)
    sizes = [
        (50_001, torch.float32),
        (3, torch.bfloat16),
        (0, torch.float32),
        (12_345, torch.uint8),
        (8192, torch.half),
    ]
    disks = [swap.reserve(numel, dtype) for numel, dtype in sizes]
    swap.open()
    mirrors = [torch.zeros(numel, dtype=dtype) for numel, dtype in sizes]
    chance = random.Random(0)
    for _ in range(60):
        disk, mirror = chance.choice(list(zip(disks, mirrors, strict=True)))
        begin, end = sorted(chance.randrange(disk.numel() + 1) for _ in range(2))
        given = values(end - begin, disk.dtype, shift=chance.choice([0, 4]))
        disk[begin:end].store(given)
        mirror[begin:end] = given
        begin, end = sorted(chance.randrange(disk.numel() + 1) for _ in range(2))
        taken = values(end - begin, disk.dtype, shift=chance.choice([0, 4]))
        assert disk[begin:end].load(taken) is taken
        assert same(taken, mirror[begin:end])
    for disk, mirror in zip(disks, mirrors, strict=True):
        assert same(disk.load(), mirror)


def test_a_slice_is_a_tensor_on_disk(swap_on, tmp_path):
    swap = swap_on(tmp_path)
    disk = swap.reserve(10_000, torch.bfloat16)
    swap.open()
    given = values(10_000, torch.bfloat16)
    disk.store(given)
    part = disk[1000:9000][-500:]
    assert (part.numel(), part.nbytes, part.itemsize, part.dtype) == (500, 1000, 2, torch.bfloat16)
    assert same(part.load(), given[8500:9000])
    assert [piece.numel() for piece in disk.split(4000)] == [4000, 4000, 2000]
    assert same(torch.cat([piece.load() for piece in disk.split(4000)]), given)
    assert disk[9000:8000].load().numel() == 0
    with pytest.raises(ValueError, match="step 2"):
        disk[::2]


def test_slices_that_meet_within_a_page_are_stored_at_once(swap_on, tmp_path):
    swap = swap_on(tmp_path, aio=Aio())
    disk = swap.reserve(4000, torch.uint8)
    swap.open()
    for _ in range(30):
        given = values(4000, torch.uint8)
        pairs = zip(disk.split(500), given.split(500), strict=True)
        for transfer in [piece.start_store(part) for piece, part in pairs]:
            transfer.wait()
        assert same(disk.load(), given)


@pytest.mark.parametrize("target", [torch.empty(8), torch.empty(7, dtype=torch.int32), torch.empty(14)[::2]])
def test_a_host_tensor_that_does_not_fit_is_refused(swap_on, tmp_path, target):
    swap = swap_on(tmp_path)
    disk = swap.reserve(7, torch.float32)
    swap.open()
    with pytest.raises(ValueError, match=r"7 torch\.float32"):
        disk.start_load(target)


def test_aligned_memory_begins_at_a_page():
    for num_bytes in (1, 4096, 5 * MIB):
        memory = page_aligned(num_bytes)
        assert memory.data_ptr() % 4096 == 0
        assert memory.numel() == memory.fill_(1).sum() == num_bytes
    assert page_aligned(0).numel() == 0


# -- requests


@pytest.mark.parametrize("shift", [0, 4], ids=["straight", "bounced"])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_requests_are_blocks_and_no_more_than_the_queue_is_deep(swap_on, tmp_path, monkeypatch, name, shift):
    counted = []
    swap = swap_on(tmp_path, count=lambda *args: counted.append(args))
    disk = swap.reserve(40 * 8192 // 4, torch.float32)
    swap.open()
    host = values(disk.numel(), shift=shift)
    calls = Calls(monkeypatch, name, seconds=0.002)
    (disk.store if name == "pwritev" else disk.load)(host)
    assert calls.sizes == [8192] * 40
    assert calls.most == 4
    assert counted == [("write" if name == "pwritev" else "read", disk.nbytes)]


def test_single_submit_has_one_request_in_flight(swap_on, tmp_path, monkeypatch):
    swap = swap_on(tmp_path, aio=Aio(block_size=4096, single_submit=True))
    disk = swap.reserve(10 * 1024, torch.float32)
    swap.open()
    calls = Calls(monkeypatch, "pwritev", seconds=0.002)
    disk.store(values(disk.numel()))
    assert (calls.most, len(calls.sizes)) == (1, 10)


@pytest.mark.parametrize("overlaps", [True, False])
def test_without_overlap_a_transfer_has_ended_when_start_returns(swap_on, tmp_path, monkeypatch, overlaps):
    swap = swap_on(tmp_path, aio=Aio(block_size=4096, overlap_events=overlaps))
    disk = swap.reserve(16 * 1024, torch.float32)
    swap.open()
    calls = Calls(monkeypatch, "pwritev", seconds=0.05)
    transfer = disk.start_store(values(disk.numel()))
    assert (len(calls.sizes) == 16 and calls.in_flight == 0) is not overlaps
    transfer.wait()


def test_the_kernel_may_stop_half_way(swap_on, tmp_path, monkeypatch):
    swap = swap_on(tmp_path, aio=Aio(block_size=65536))
    disk = swap.reserve(100_000, torch.float32)
    swap.open()
    inside = []

    def half(real, number, fd, buffers, offset):
        """Half of it, and a part of the next page: of that nothing may be relied on."""
        moved = real(fd, [buffers[0][: max(4096, len(buffers[0]) // 2 & -4096)]], offset)
        if len(buffers[0]) > moved + 4096:
            inside.append(moved)
            return moved + 1000
        return moved

    Calls(monkeypatch, "pwritev", act=half)
    Calls(monkeypatch, "preadv", act=half)
    given = values(disk.numel())
    disk.store(given)
    assert same(disk.load(), given)
    assert inside


def test_tensors_take_turns_on_the_drives(swap_on, tmp_path):
    swap = swap_on(tmp_path / "a", tmp_path / "b")
    disks = [swap.reserve(1025, torch.float32) for _ in range(5)]
    swap.open()
    assert swap.num_bytes == 5 * 8192
    for name, num_tensors in (("a", 3), ("b", 2)):
        [folder] = rank_folders(tmp_path / name)
        assert folder.name.endswith("-rank3")
        data = folder / "data"
        assert data.stat().st_size == num_tensors * 8192
        assert data.stat().st_blocks * 512 >= num_tensors * 8192  # Allocated, not only promised.
    assert all(not disk.load().any() for disk in disks)


# -- drives that will not do


def test_a_file_system_without_o_direct_is_read_through_the_page_cache(swap_on, mounted, caplog):
    path = mounted("ramfs")
    swap = swap_on(path)
    disks = [swap.reserve(5000, torch.float32) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "onefold"):
        swap.open()
        given = values(5000, shift=4)
        disks[1].store(given)
        assert same(disks[1].load(), given)
    [notice] = caplog.messages
    assert str(path) in notice
    assert "O_DIRECT" in notice


def test_a_drive_that_is_too_small_is_refused_before_anything_is_written(swap_on, mounted):
    path = mounted("tmpfs", "size=1m")
    swap = swap_on(path / "a", path / "b")
    for _ in range(2):
        swap.reserve(600_000, torch.uint8)
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    with pytest.raises(ConfigError, match=f"nvme_path = {path}/a: .* needs 1204224 bytes .* {free} .*larger drive"):
        swap.open()
    assert not rank_folders(path / "a")
    assert not (path / "a" / "onefold-swap").exists()
    fits = swap_on(path)
    fits.reserve(900_000, torch.uint8)
    fits.open()


def test_a_limit_that_only_allocation_meets_is_told_with_its_arithmetic(swap_on, tmp_path):
    swap = swap_on(tmp_path)
    swap.reserve(2 * MIB, torch.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ConfigError, match=r"needs 2097152 bytes .* free \(File too large\)"):
            swap.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def refuse(swap, path, reason):
    swap.reserve(1, torch.float32)
    with pytest.raises(ConfigError, match=f"nvme_path = {path}: .*{reason}"):
        swap.open()


def test_a_file_in_the_way_is_refused_and_kept(swap_on, tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    folder.mkdir()
    for mine in (file, folder / "onefold-swap"):
        mine.write_text("mine")
    refuse(swap_on(file), file, "File exists")
    refuse(swap_on(file / "below"), file / "below", "Not a directory")
    refuse(swap_on(folder), folder, "Not a directory")
    assert file.read_text() == (folder / "onefold-swap").read_text() == "mine"


def test_a_read_only_path_is_refused(swap_on, mounted):
    path = mounted("tmpfs", "ro")
    refuse(swap_on(path), path, "Read-only")
    refuse(swap_on(path / "below"), path / "below", "Read-only")


# -- errors in a step


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_an_error_in_one_request_is_raised_when_the_others_have_ended(swap_on, tmp_path, monkeypatch, name):
    swap = swap_on(tmp_path)
    disk = swap.reserve(40 * 8192, torch.uint8)
    swap.open()

    def fail_once(real, number, fd, buffers, offset):
        if number == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.02)
        return real(fd, buffers, offset)

    calls = Calls(monkeypatch, name, act=fail_once)
    host = values(disk.numel(), torch.uint8)
    transfer = disk.start_store(host) if name == "pwritev" else disk.start_load(host)
    with pytest.raises(SwapError) as caught:
        transfer.wait()
    assert calls.in_flight == 0
    assert len(calls.sizes) < 40  # Nothing more is begun.
    [folder] = rank_folders(tmp_path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.errno, error.filename) == (errno.EIO, str(folder / "data"))
        for part in ("write" if name == "pwritev" else "read", str(folder), "Input/output error", "last checkpoint"):
            assert part in str(error)


def test_a_file_cut_short_under_us_is_an_error_and_not_an_endless_loop(swap_on, tmp_path):
    swap = swap_on(tmp_path)
    disk = swap.reserve(40 * 8192, torch.uint8)
    swap.open()
    [folder] = rank_folders(tmp_path)
    os.truncate(folder / "data", 10 * 8192 + 512)
    with pytest.raises(SwapError, match="truncated"):
        disk.load()


def test_a_folder_that_vanishes_does_not_stop_a_job(swap_on, tmp_path):
    swap = swap_on(tmp_path)
    disk = swap.reserve(5000, torch.float32)
    swap.open()
    [folder] = rank_folders(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    given = values(5000)
    disk.store(given)
    assert same(disk.load(), given)
    swap.close()


# -- folders


def _open_and_stay(path, opened, crash):
    swap = SwapFiles([path], aio=SMALL, rank=0, count=lambda *_: None)
    swap.reserve(5000, torch.float32)
    swap.open()
    opened.set()
    if crash:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@contextmanager
def another_job(path, *, crash):
    opened = fork.Event()
    process = fork.Process(target=_open_and_stay, args=(str(path), opened, crash))
    process.start()
    assert opened.wait(20)
    if crash:
        process.join(20)
    [folder] = [folder for folder in rank_folders(path) if folder.name.endswith("-rank0")]
    yield folder
    process.kill()
    process.join()


def test_leftovers_of_a_crash_go_and_a_living_job_and_the_users_files_stay(swap_on, tmp_path, caplog):
    with another_job(tmp_path, crash=True) as kept:
        (kept / "notes.txt").write_text("mine")
        kept = kept.rename(kept.parent / kept.name.replace("rank0", "rank7"))
    shelf = tmp_path / "onefold-swap"
    (shelf / "readme").write_text("mine")
    (shelf / "folder").mkdir()
    (shelf / "folder" / "data").write_text("mine")
    half_removed = shelf / f"{'0' * 16}-rank5"
    half_removed.mkdir()
    with another_job(tmp_path, crash=True) as dead:
        assert {file.name for file in dead.iterdir()} == {"lock", "data"}
    with another_job(tmp_path, crash=False) as alive:
        assert not dead.exists()
        swap = swap_on(tmp_path)
        swap.reserve(10, torch.float32)
        with caplog.at_level(logging.WARNING, "onefold"):
            swap.open()
        assert {file.name for file in alive.iterdir()} == {"lock", "data"}
    assert not half_removed.exists()
    assert {file.name for file in kept.iterdir()} == {"lock", "data", "notes.txt"}
    assert [str(kept) in message and "notes.txt" in message for message in caplog.messages] == [True]
    swap.close()
    assert {file.name for file in shelf.iterdir()} == {"readme", "folder", kept.name, alive.name}
    assert (shelf / "folder" / "data").read_text() == "mine"


def _open_and_close(path, rank, together):
    together.wait(20)
    for _ in range(25):
        swap = SwapFiles([path], aio=SMALL, rank=rank, count=lambda *_: None)
        disk = swap.reserve(5000, torch.float32)
        swap.open()
        given = values(5000)
        disk.store(given)
        assert same(disk.load(), given)
        [folder] = [name for name in os.listdir(f"{path}/onefold-swap") if name.endswith(f"rank{rank}")]
        assert set(os.listdir(f"{path}/onefold-swap/{folder}")) == {"lock", "data"}
        swap.close()


def test_ranks_that_clean_up_at_once_do_no_harm(tmp_path):
    with another_job(tmp_path, crash=True):
        pass
    together = fork.Barrier(4)
    ranks = [fork.Process(target=_open_and_close, args=(str(tmp_path), rank, together)) for rank in range(1, 5)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["empty", "not locked"])
def test_a_folder_taken_for_a_leftover_while_it_is_made_is_made_again(swap_on, tmp_path, monkeypatch, moment):
    swap, neighbour = swap_on(tmp_path), swap_on(tmp_path)
    for one in (swap, neighbour):
        one.reserve(10, torch.float32)
    make_folder, lock, made, moments = os.makedirs, swap_folder.lock_file, [], [moment]

    def at(reached):
        if reached in moments:
            moments.clear()
            neighbour.open()

    def makedirs(path, *args, **kwargs):
        make_folder(path, *args, **kwargs)
        if "-rank" in path:
            made.append(path)
            at("empty")

    def lock_file(fd, **how):
        at("not locked")
        lock(fd, **how)

    monkeypatch.setattr(os, "makedirs", makedirs)
    monkeypatch.setattr(swap_folder, "lock_file", lock_file)
    swap.open()
    first, _, again = made
    assert not os.path.exists(first)
    assert sorted(os.listdir(again)) == ["data", "lock"]


def test_close_waits_and_removes_everything(swap_on, tmp_path, monkeypatch):
    num_files = len(os.listdir("/proc/self/fd"))
    swap = swap_on(tmp_path / "new" / "path", tmp_path / "new" / "path")
    disks = [swap.reserve(50_000, torch.float32) for _ in range(2)]
    swap.open()
    calls = Calls(monkeypatch, "pwritev", seconds=0.001)
    transfers = [disk.start_store(values(50_000)) for disk in disks]
    swap.close()
    assert calls.in_flight == 0
    for transfer in transfers:
        transfer.wait()
    assert list((tmp_path / "new" / "path").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("onefold-swap")]
    swap.close()


def test_a_swap_that_is_forgotten_removes_its_files(tmp_path):
    swap = SwapFiles([str(tmp_path)], aio=SMALL, rank=0, count=lambda *_: None)
    disk = swap.reserve(5000, torch.float32)
    swap.open()
    disk.store(values(5000))
    del swap
    gc.collect()
    assert rank_folders(tmp_path)  # A tensor still rests there.
    del disk
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_the_end_of_the_process_removes_everything(tmp_path):
    program = """
import sys, torch
from onefold.config import Aio
from onefold.offload.nvme import SwapFiles
swap = SwapFiles([sys.argv[1]], aio=Aio(), rank=0, count=lambda *_: None)
disk = swap.reserve(1 << 22, torch.float32)
swap.open()
transfer = disk.start_store(torch.ones(1 << 22))
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
    assert list(tmp_path.iterdir()) == []
