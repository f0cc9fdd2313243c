"""Several folders of `nvme_path`: bytes in proportion to the rates of their drives, and values that do not change."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import config, first_difference, net, precision, start, train

from onefold.config import Aio, ConfigError
from onefold.offload.host_memory import page_aligned
from onefold.offload.nvme import SwapFiles
from onefold.offload.stripes import Stripes

MIB = 1 << 20
SMALL = Aio(block_size=4096, queue_depth=4)


@pytest.fixture
def swap_on(mounted):
    made = []

    def make(*paths, aio=SMALL, rates=None):
        made.append(SwapFiles([str(path) for path in paths], aio=aio, rank=0, count=lambda *_: None, rates=rates))
        return made[-1]

    yield make
    for swap in made:
        swap.close()


def data_of(path: Path) -> list[Path]:
    return sorted(path.glob("onefold-swap/*/data"))


def device(path: Path) -> int:
    return os.stat(path).st_dev


# -- the division


@pytest.mark.parametrize("rates", [[1.0], [1.0, 1.0], [3.0, 1.0], [7e9, 2.5e9, 0.4e9], [1.0, 1e-6], [0.3] * 7])
def test_every_address_has_one_place_and_files_have_no_holes(rates):
    stripes = Stripes.in_proportion(rates, 4096)
    for total in (0, 4096, 5 * 4096, 1000 * 4096 + 123 * 512):
        places: dict[int, list[int]] = {}
        for address in range(0, total, 512):
            folder, offset = stripes.locate(address)
            places.setdefault(folder, []).append(offset)
            assert stripes.end_of_run(address) > address
        for folder, offsets in places.items():
            assert offsets == list(range(0, len(offsets) * 512, 512)), "a file is filled in the order of addresses"
            assert stripes.num_bytes(total)[folder] == len(offsets) * 512
        assert sum(stripes.num_bytes(total).values()) == total
        assert set(stripes.folders_of(0, total)) == set(places)


@pytest.mark.parametrize("rates", [[3.0, 1.0], [7e9, 2.5e9, 0.4e9], [5.0, 4.0, 3.0, 2.0]])
def test_every_long_range_is_divided_in_proportion(rates):
    """The share of a folder is exact to 1/64, and in every range to about a unit, not only in the whole."""
    stripes, total = Stripes.in_proportion(rates, 4096), sum(rates)
    for begin in (0, 17, 40):
        for length in (8, 50, 640):
            found = [stripes.locate(number * 4096)[0] for number in range(begin, begin + length)]
            for folder, rate in enumerate(rates):
                assert abs(found.count(folder) - length * rate / total) <= 2 + length / 64


def test_a_drive_below_half_of_a_64th_of_the_rate_gets_nothing():
    assert set(Stripes.in_proportion([1000.0, 1.0, 1000.0], 4096).cycle) == {0, 2}


# -- files


def test_bytes_follow_the_rates_and_odd_sizes_round_trip(swap_on, mounted):
    fast, slow = mounted("tmpfs"), mounted("ramfs")  # ramfs has no O_DIRECT: pages and bytes are mixed
    swap = swap_on(fast, slow, rates={device(fast): 3e9, device(slow): 1e9})
    kinds = [
        (50_001, torch.float32),
        (3, torch.bfloat16),
        (0, torch.float32),
        (99_999, torch.uint8),
        (8192, torch.half),
    ]
    disks = [swap.reserve(numel, dtype) for numel, dtype in kinds]
    swap.open()
    sizes = [data_of(path)[0].stat().st_size for path in (fast, slow)]
    assert sum(sizes) == swap.num_bytes
    assert abs(sizes[0] - 3 * sizes[1]) <= 4 * 4096
    assert swap.num_bytes_in_folders == {str(fast): sizes[0], str(slow): sizes[1]}
    mirrors = [torch.zeros(numel, dtype=dtype) for numel, dtype in kinds]
    chance = random.Random(0)
    for _ in range(80):
        disk, mirror = chance.choice(list(zip(disks, mirrors, strict=True)))
        begin, end = sorted(chance.randrange(disk.numel() + 1) for _ in range(2))
        given = page_aligned((end - begin) * disk.itemsize + 64)[chance.choice([0, 4]) :]
        given = given[: (end - begin) * disk.itemsize].random_(0, 256).view(disk.dtype)
        disk[begin:end].store(given)
        mirror[begin:end] = given
        begin, end = sorted(chance.randrange(disk.numel() + 1) for _ in range(2))
        assert torch.equal(disk[begin:end].load().view(torch.uint8), mirror[begin:end].view(torch.uint8))
    for disk, mirror in zip(disks, mirrors, strict=True):
        assert torch.equal(disk.load().view(torch.uint8), mirror.view(torch.uint8))


def test_folders_on_one_file_system_share_its_rate(swap_on, tmp_path, mounted):
    other = mounted("tmpfs")
    swap = swap_on(tmp_path / "a", tmp_path / "b", other, rates={device(tmp_path): 3e9, device(other): 1e9})
    swap.reserve(64 * 4096, torch.uint8)
    swap.open()
    assert list(swap.num_bytes_in_folders.values()) == [24 * 4096, 24 * 4096, 16 * 4096]


class Requests:
    """Stands between a swap and the system calls: counts the bytes of each open file, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_in: Path | None = None) -> None:
        self.num_bytes: dict[tuple[str, str], int] = {}
        self._lock, self._fail_in = threading.Lock(), fail_in
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[Any], offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{fd}")
            with self._lock:
                key = name, path.split("/onefold-swap/")[0]
                self.num_bytes[key] = self.num_bytes.get(key, 0) + len(buffers[0])
            if self._fail_in is not None and path.startswith(str(self._fail_in)) and len(buffers[0]) > 4096:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        return call


def test_one_transfer_uses_all_drives(swap_on, mounted, monkeypatch):
    fast, slow = mounted("tmpfs"), mounted("tmpfs")
    swap = swap_on(fast, slow, rates={device(fast): 3e9, device(slow): 1e9})
    disk = swap.reserve(16 * 4096, torch.uint8)
    swap.open()
    requests = Requests(monkeypatch)
    disk.load(page_aligned(disk.nbytes))
    assert requests.num_bytes == {("preadv", str(fast)): 12 * 4096, ("preadv", str(slow)): 4 * 4096}


# -- the measurement


def test_folders_on_one_file_system_are_not_measured(swap_on, tmp_path, monkeypatch):
    requests = Requests(monkeypatch)
    swap = swap_on(tmp_path / "a", tmp_path / "b", aio=Aio())
    swap.reserve(100 * MIB, torch.uint8)
    swap.open()
    assert max(requests.num_bytes.values()) <= 2 * 4096, "only the check of O_DIRECT"
    assert list(swap.num_bytes_in_folders.values()) == [50 * MIB, 50 * MIB]


def test_a_measurement_is_bounded_and_leaves_zeros_and_the_users_files(swap_on, tmp_path, mounted, monkeypatch):
    other = mounted("tmpfs")
    for folder in (tmp_path, other):
        (folder / "data").write_text("mine")
    requests, rates = Requests(monkeypatch), {}
    swap = swap_on(tmp_path, other, aio=Aio(), rates=rates)
    disk = swap.reserve(5 * MIB + 1, torch.uint8)
    swap.open()
    assert set(rates) == {device(tmp_path), device(other)}
    assert all(rate > 0 for rate in rates.values())
    # The first 5 MiB are written once before the measurement, which moves at most 1 GiB and what is in flight.
    assert all(5 * MIB < moved <= 1100 * MIB for moved in requests.num_bytes.values())
    assert {name for name, _ in requests.num_bytes} == {"preadv", "pwritev"}
    assert not disk.load().any()
    assert sum(path.stat().st_size for folder in (tmp_path, other) for path in data_of(folder)) == swap.num_bytes
    assert all(len(data_of(folder)) <= 1 for folder in (tmp_path, other))
    requests.num_bytes.clear()
    again = swap_on(tmp_path, other, aio=Aio(), rates=rates)
    again.reserve(5 * MIB, torch.uint8)
    again.open()
    assert max(requests.num_bytes.values()) <= 2 * 4096, "the rates are known"
    assert again.num_bytes_in_folders.keys() == swap.num_bytes_in_folders.keys()
    swap.close()
    again.close()
    for folder in (tmp_path, other):
        assert (folder / "data").read_text() == "mine"
        assert not (folder / "onefold-swap").exists()


def test_an_error_in_the_measurement_names_the_folder(swap_on, tmp_path, mounted, monkeypatch):
    other = mounted("tmpfs")
    swap = swap_on(tmp_path, other, aio=Aio())
    swap.reserve(5 * MIB, torch.uint8)
    Requests(monkeypatch, fail_in=other)
    with pytest.raises(ConfigError, match=f"nvme_path = {other}: cannot be used .*Input/output error"):
        swap.open()
    assert not (tmp_path / "onefold-swap").exists()
    assert not (other / "onefold-swap").exists()


def test_a_drive_without_room_for_its_share_is_refused_by_name(swap_on, tmp_path, mounted):
    small = mounted("tmpfs", "size=1m")
    swap = swap_on(tmp_path, small, rates={device(tmp_path): 1e9, device(small): 3e9})
    swap.reserve(2 * MIB, torch.uint8)
    with pytest.raises(ConfigError, match=rf"nvme_path = {small}: .* needs {3 * MIB // 2} bytes .*75% of all"):
        swap.open()
    assert not (tmp_path / "onefold-swap").exists()
    fits = swap_on(tmp_path, small, rates={device(tmp_path): 3e9, device(small): 1e9})
    fits.reserve(2 * MIB, torch.uint8)
    fits.open()


@pytest.fixture
def throttled(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`throttled(rate)` is the folder of a drive that reads and writes so many bytes per second."""
    group, cgroups = Path("/sys/fs/cgroup/blkio/onefold-test"), Path("/sys/fs/cgroup/blkio/cgroup.procs")
    made: list[Path] = []

    def make(rate: int) -> Path:
        image, folder = tmp_path / f"image{len(made)}", tmp_path / f"drive{len(made)}"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(160 * MIB)
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("loop devices cannot be mounted here")
        made.append(folder)
        number = os.stat(folder).st_dev
        for way in ("read", "write"):
            limit = group / f"blkio.throttle.{way}_bps_device"
            limit.write_text(f"{os.major(number)}:{os.minor(number)} {rate}")
        return folder

    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        pytest.skip("block devices cannot be throttled here")
    try:
        yield make
    finally:
        cgroups.write_text(str(os.getpid()))
        for folder in made:
            subprocess.run(["umount", str(folder)], check=True)
        group.rmdir()


def test_measured_shares_follow_the_rates_of_throttled_drives(throttled, swap_on):
    fast, slow = throttled(240_000_000), throttled(80_000_000)
    rates: dict[int, float] = {}
    swap = swap_on(fast, slow, aio=Aio(), rates=rates)
    disk = swap.reserve(32 * MIB, torch.uint8)
    swap.open()
    assert rates[device(fast)] / rates[device(slow)] == pytest.approx(3, rel=0.3)
    share = swap.num_bytes_in_folders[str(fast)] / disk.nbytes
    assert share == pytest.approx(0.75, abs=0.07)
    given = page_aligned(disk.nbytes).random_(0, 256)
    disk.store(given)
    assert torch.equal(disk.load(), given)


# -- an engine


def over_two_drives(fast: str, slow: str, dtype: str) -> list[Any]:
    told = []
    aio = {"aio": {"block_size": 4096}}
    disk = {"device": "nvme", "max_in_cpu": 0, "buffer_size": 4096, "nvme_path": [fast, slow]}
    for keys in ({}, {"offload_optimizer": disk, "offload_param": disk}):
        engine = start(net(), config(3, zero_optimization=keys, **precision(dtype), **(aio if keys else {})))
        trace = train(engine, 3)
        sizes = [sum(data.stat().st_size for data in data_of(Path(path))) for path in (fast, slow)]
        described = engine.describe()
        engine.destroy()
        told.append((trace, sizes, described))
    return told


@covering(dtype=("fp32", "bf16"), world=(1, 2), strength=1)
def test_an_engine_divides_its_states_and_says_so(on_ranks, mounted, world, dtype):
    fast, slow = mounted("tmpfs"), mounted("tmpfs")
    for (reference, _, plain), (trace, sizes, described) in on_ranks(
        world, over_two_drives, str(fast), str(slow), dtype
    ):
        assert first_difference(trace, reference) is None
        assert any(sizes)
        assert "on NVMe           " not in plain
        [line] = [line for line in described.splitlines() if line.startswith("on NVMe           ")]
        assert str(fast) in line
        assert str(slow) in line
        shares = [int(share) for share in re.findall(r"\((\d+)%\)", line)]
        assert len(shares) == 2
        # Rates are measured, so that a drive may get few or no units.
        assert all(size > 0 for size, share in zip(sizes, shares, strict=True) if share >= 5)
