"""`onefold bench tiers`: what is measured is kept, what is kept is read back, and the tables follow by arithmetic."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from onefold.plan import OffloadTraffic
from onefold.tools.bench import offload_bench
from onefold.tools.bench.offload_bench import SETTINGS, BusRates, DiskRates, Measured
from onefold.tools.cli.main import main

# Each of the table's 20 units is a multiple of 2048, so nothing is padded.
P = 20 * 2048 * 1000
GB = 1_000_000_000
FIXED = Measured(
    host=socket.gethostname(),
    when="2030-01-01T00:00:00+00:00",
    num_threads=8,
    host_free_bytes=100 * GB,
    host_copy=50.0,
    adam=P / 2,
    device="a GPU",
    device_bytes=80 * GB,
    page_lock=5.0,
    bus=BusRates(down=P / GB, up=2 * P / GB, both=2 * P / GB),
    disk=DiskRates(("/mnt/a", "/mnt/b"), 4 * P / GB, 2 * P / GB, 3 * P / GB, True, 1000 * GB, "2030-01-01"),
)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Other tests fork their ranks from this process: CUDA must not start in it.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "cache" / "onefold" / "tiers.json"


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["bench", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


# -- the command -----------------------------------------------------------------------------------------------------


def test_what_is_measured_is_shown_kept_and_read_back(bench: Command, cache: Path, drive: Path) -> None:
    code, out, _ = bench("tiers", "--size", 0.05, "--path", drive, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts.keys() == {"measured", "parameters", "settings", "kept_in"}
    assert facts["kept_in"] == str(cache)
    assert [row["setting"] for row in facts["settings"]] == list(SETTINGS)
    assert facts["settings"][0].keys() >= {"device_bytes", "host_bytes", "offload_traffic", "seconds", "bound_by"}
    measured = facts["measured"]
    assert measured["adam"] > 0
    assert measured["host_copy"] > 0
    assert measured["num_threads"] == torch.get_num_threads()
    assert measured["bus"] is None
    assert measured["disk"]["paths"] == [str(drive)]
    assert all(measured["disk"][way] > 0 for way in ("read", "write", "both", "free_bytes"))
    kept = offload_bench.load_measured()
    assert kept is not None
    assert json.loads(json.dumps(asdict(kept))) == measured
    assert os.listdir(drive) == []
    assert os.listdir(cache.parent) == ["tiers.json"]


def test_without_a_path_the_disk_is_as_it_was_kept(bench: Command) -> None:
    code, out, _ = bench("tiers", "--size", 0.01)
    assert code == 0
    assert "give --path" in out
    offload_bench.save_measured(FIXED)
    code, out, _ = bench("tiers", "--size", 0.01)
    assert code == 0
    assert "measured 2030-01-01" in out
    kept = offload_bench.load_measured()
    assert kept is not None
    assert kept.disk == FIXED.disk
    assert kept.when != FIXED.when


def test_no_save_writes_nothing(bench: Command, cache: Path) -> None:
    code, out, _ = bench("tiers", "--size", 0.01, "--no-save")
    assert code == 0
    assert "bottleneck" in out
    assert not cache.parent.exists()


def test_a_folder_that_is_not_there_is_named_and_not_made(bench: Command, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    code, _, said = bench("tiers", "--path", missing)
    assert code == 2
    assert f"--path {missing}: no such folder" in said
    assert not missing.exists()


@pytest.mark.parametrize(("option", "value"), [("--size", 0), ("--size", "nan"), ("--parameters", -1)])
def test_numbers_that_make_no_sense_are_refused(bench: Command, option: str, value: object) -> None:
    code, _, said = bench("tiers", option, value)
    assert code == 2
    assert f"{option} {value}: must be above 0" in said


def test_more_than_the_host_has_is_refused(bench: Command) -> None:
    code, _, said = bench("tiers", "--size", 1e6)
    assert code == 2
    assert "of host memory are available" in said


def test_sizes_are_read_with_their_units(bench: Command) -> None:
    code, out, _ = bench("tiers", "--size", "10MB", "--parameters", "7B", "--no-save", "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 7_000_000_000
    code, out, _ = bench("tiers", "--size", "10MB", "--no-save")
    assert "bus and disk are not measured and may be the bottleneck" in " ".join(out.split())
    assert bench("tiers", "--size", "many")[0] == 2


def test_bench_alone_shows_its_help(bench: Command) -> None:
    code, _, said = bench()
    assert code == 2
    assert "onefold bench tiers --path" in said


def test_a_cache_that_cannot_be_written_does_not_take_the_tables(bench: Command, cache: Path) -> None:
    cache.parent.parent.write_text("a file where the folder would be")
    code, out, said = bench("tiers", "--size", 0.01)
    assert code == 1
    assert "bottleneck" in out
    assert str(cache.parent.parent) in said


# -- keeping ---------------------------------------------------------------------------------------------------------


def test_hosts_are_kept_side_by_side(cache: Path) -> None:
    assert offload_bench.load_measured() is None
    other = replace(FIXED, host="another", bus=None, disk=None, page_lock=None, device=None, device_bytes=None)
    offload_bench.save_measured(other)
    offload_bench.save_measured(FIXED)
    assert offload_bench.load_measured() == FIXED
    assert offload_bench.load_measured("another") == other
    assert json.loads(cache.read_text()).keys() == {"another", FIXED.host}


def spoiled(**changes: object) -> str:
    return json.dumps({FIXED.host: {**asdict(FIXED), **changes}})


@pytest.mark.parametrize(
    "text",
    ["{", "[]", json.dumps({FIXED.host: {}}), spoiled(adam="fast"), spoiled(host_copy=0), spoiled(bus={"down": 1})],
)
def test_a_damaged_file_is_told_and_replaced(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with caplog.at_level(logging.WARNING, logger="onefold"):
        assert offload_bench.load_measured() is None
    assert f"{cache} cannot be read" in caplog.text
    offload_bench.save_measured(FIXED)
    assert offload_bench.load_measured() == FIXED


# -- arithmetic ------------------------------------------------------------------------------------------------------

# Multiples of P: device, host and disk at rest; down, up, read, written in a step; seconds of bus, host Adam, disk. At
# the rates above a step that moves P down takes 1 s, 2P up 1 s, and 2P both ways 1 s; Adam takes 2 s; 4P read take 1 s,
# 2P written 1 s, and 3P both ways 1 s. The device steps 0.6 of all, and 0.2 of the last 0.3: 14 go up for it, 12 down.
BY_HAND = {
    "all on the device": ((16, 0, 0), (0, 0, 0, 0), (0, 0, 0), None),
    "optimizer cpu, ratio 0.3": ((2 + 0.7 * 14, 0.3 * 14, 0), (0.6 + 2.4, 0.4 + 2.8, 0, 0), (3.1, 0.2, 0), "bus"),
    "optimizer cpu": ((2, 14, 0), (2 + 7.2, 1.6 + 8.4, 0, 0), (9.6, 0.8, 0), "bus"),
    "optimizer cpu, stepped by the host": ((2, 14, 0), (2, 4, 0, 0), (3, 2, 0), "bus"),
    "optimizer and param cpu": ((0, 16, 0), (2 + 2 + 7.2, 4 + 0.8 + 8.4, 0, 0), (12.2, 0.8, 0), "bus"),
    "optimizer nvme": ((2, 2, 12), (2 + 7.2, 1.6 + 8.4, 12, 12), (9.6, 0.8, 8), "bus"),
    "optimizer and param nvme": ((0, 2, 14), (2 + 7.2, 4 + 8.4, 12, 12 + 2), (10.8, 0.8, 26 / 3), "bus"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_setting_costs_by_hand(setting: str) -> None:
    rest, ways, seconds, bound_by = BY_HAND[setting]
    cost = offload_bench.cost_of(setting, P, FIXED)
    assert (cost.device_bytes, cost.host_bytes, cost.disk_bytes) == tuple(round(factor * P) for factor in rest)
    assert cost.offload_traffic == OffloadTraffic(*(round(factor * P) for factor in ways))
    assert cost.seconds == pytest.approx(dict(zip(("bus", "host Adam", "disk"), seconds, strict=True)))
    assert cost.bound_by == bound_by


def test_one_way_alone_is_no_faster_than_its_own_rate() -> None:
    assert BusRates(down=10, up=20, both=25).seconds(OffloadTraffic(20 * GB, 20 * GB, 0, 0)) == 2
    assert BusRates(down=10, up=20, both=25).seconds(OffloadTraffic(0, 80 * GB, 0, 0)) == 4
    assert BusRates(down=10, up=20, both=25).seconds(OffloadTraffic(20 * GB, 40 * GB, 0, 0)) == 2.4


def test_what_was_not_measured_is_unknown_and_not_free() -> None:
    cost = offload_bench.cost_of("optimizer nvme", P, replace(FIXED, bus=None, disk=None))
    # The host steps four tenths, as where there is a bus: bytes and seconds are those of one assumption.
    assert cost.seconds == {"bus": None, "host Adam": pytest.approx(0.8), "disk": None}
    assert cost.offload_traffic == offload_bench.cost_of("optimizer nvme", P, FIXED).offload_traffic
    assert cost.bound_by == "host Adam"
    assert offload_bench.cost_of("optimizer cpu", P, replace(FIXED, disk=None)).seconds["disk"] == 0


def test_what_does_not_fit_is_said() -> None:
    small = replace(FIXED, device_bytes=16 * P - 1, host_free_bytes=16 * P - 1)
    short = {setting: offload_bench.shortages(offload_bench.cost_of(setting, P, small), small) for setting in SETTINGS}
    assert [setting for setting, lines in short.items() if lines] == ["all on the device", "optimizer and param cpu"]
    assert "device memory" in short["all on the device"][0]
    assert "host memory" in short["optimizer and param cpu"][0]


# -- measuring -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_where_a_transfer_failed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "the drive is gone")

    monkeypatch.setattr(offload_bench, "_best", fail)
    with pytest.raises(OSError, match="the drive is gone"):
        offload_bench.measure_disk(1 << 20, [str(drive)])
    assert os.listdir(drive) == []


def test_several_paths_are_written_to(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    found = offload_bench.measure_disk(1 << 20, [str(path) for path in paths])
    assert found.paths == tuple(map(str, paths))
    assert [os.listdir(path) for path in paths] == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_bus_has_rates_both_ways() -> None:
    command = [sys.executable, "-m", "onefold.tools.cli.main", "bench", "tiers", "--size", "0.1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["measured"]["page_lock"] > 0
    assert facts["measured"]["device_bytes"] > 0
    assert all(rate > 0 for rate in facts["measured"]["bus"].values())
    assert all(row["seconds"]["bus"] is not None for row in facts["settings"])
