"""The rules by which stalled ranks are found, the place of a thread in its program, and the metrics of ranks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batches, config, net, rank, start

from onefold import disk_waits
from onefold.config import ConfigError
from onefold.recovery import rank_beats, thread_stacks
from onefold.recovery.rank_beats import RankBeat, SilentRanks
from onefold.storage.object_path import ObjectPath


def beat(of_rank: int, **values: Any) -> RankBeat:
    return RankBeat(of_rank, **{"doing": "a collective", "seconds": 9.0, "waits": True, **values})


def test_all_ranks_wait_only_if_each_of_them_does():
    waiting = {0: beat(0), 1: beat(1), 2: beat(2)}
    assert rank_beats.all_wait(waiting, 3, 5)
    assert not rank_beats.all_wait(waiting, 4, 5)  # the heartbeat of a rank is missing
    assert not rank_beats.all_wait(waiting | {1: beat(1, waits=False)}, 3, 5)
    assert not rank_beats.all_wait(waiting | {1: beat(1, seconds=4.0)}, 3, 5)
    assert rank_beats.all_wait(waiting | {1: beat(1, ended=True, waits=False)}, 3, 5)
    assert not rank_beats.all_wait({0: beat(0, ended=True)}, 1, 5)
    text = rank_beats.describe_common_wait(waiting, 5)
    assert "rank 2 has waited for other ranks 9 s in a collective, after step 0" in text


def test_silence_is_measured_by_the_clock_of_the_reader():
    silent = SilentRanks(range(1, 4), now=10.0)
    beats = {1: beat(1, number=1), 2: beat(2, number=1)}
    silent.update(beats, 12.0)
    assert silent.longest(beats, 13.0) == (3, 3.0), "no heartbeat of rank 3 was ever read"
    beats |= {1: beat(1, number=2), 3: beat(3, number=1)}
    silent.update(beats, 15.0)
    assert silent.longest(beats, 16.0) == (2, 4.0)
    assert silent.longest(beats | {2: beat(2, ended=True)}, 16.0) == (3, 1.0)
    silent.restart(16.0)  # the reader was paused
    assert silent.longest(beats, 17.0)[1] == 1.0


def test_a_heartbeat_survives_the_store():
    sent = beat(3, number=7, time=1.5, step=4, host="node", pid=12)
    assert RankBeat.of(sent.to_text().encode()) == sent
    rows = json.loads(rank_beats.beats_file({0: sent}, 2, 5.0))
    assert rows["time"] == 5.0
    assert rows["ranks"][0]["step"] == 4
    assert rows["ranks"][1] == {"rank": 1}


class _Blocking(torch.utils.data.Dataset[int]):
    def __init__(self, block: Callable[[], None]) -> None:
        self.block = block

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.block()
        return 0


@pytest.fixture
def blocked() -> Iterator[Callable[[Callable[[Callable[[], None]], Any]], thread_stacks.ThreadPlace]]:
    """Return a function that returns the place of a thread that runs a program until it blocks."""
    there, go = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def place(program: Callable[[Callable[[], None]], Any]) -> thread_stacks.ThreadPlace:
        def block() -> None:
            there.set()
            go.wait()

        threads.append(threading.Thread(target=program, args=(block,)))
        threads[0].start()
        assert there.wait(30)
        return thread_stacks.place_of(sys._current_frames()[threads[0].ident or 0])

    yield place
    go.set()
    threads[0].join()


def test_a_thread_in_a_data_loader(blocked):
    found = blocked(lambda block: list(torch.utils.data.DataLoader(_Blocking(block))))
    assert found.operation == "the data loader's next batch"
    assert found.line.endswith("in block")
    assert "test_rank_beats.py:" in found.line
    assert not found.waits_for_ranks


def test_a_thread_of_the_program(blocked):
    found = blocked(lambda block: torch.nn.Sequential(*[_Layer(block)])(torch.ones(1)))
    assert (found.operation, found.waits_for_ranks) == ("", False)
    assert "test_rank_beats.py:" in found.line


class _Layer(torch.nn.Module):
    def __init__(self, block: Callable[[], None]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block()
        return x


def test_requests_to_disks_are_recorded_only_on_request():
    with disk_waits.waiting_for_disk("the write of", "a"):
        assert disk_waits.longest_disk_wait() is None
    disk_waits.record_disk_waits(enabled=True)
    try:
        before = disk_waits.num_disk_requests()
        with disk_waits.waiting_for_disk("the write of", Path("a")), disk_waits.waiting_for_disk("the read of", "b"):
            assert disk_waits.longest_disk_wait().what == "the write of a"
        assert disk_waits.longest_disk_wait() is None
        assert disk_waits.num_disk_requests() == before + 2
    finally:
        disk_waits.record_disk_waits(enabled=False)


def test_requests_to_object_stores_are_recorded():
    pytest.importorskip("fsspec")
    disk_waits.record_disk_waits(enabled=True)
    try:
        place = ObjectPath("memory://bucket/a")
        assert place._call(lambda fs, key: disk_waits.longest_disk_wait().what) == "a request for memory://bucket/a"
        assert disk_waits.longest_disk_wait() is None
    finally:
        disk_waits.record_disk_waits(enabled=False)


def watched(folder: str) -> tuple[list[str], list[str]]:
    """Return the metrics of ranks, and the threads that are left after the engine is closed."""
    stall = {"seconds": 60, "folder": folder}
    own = {"stall": stall, "metrics_address": "127.0.0.1:0"}
    engine = start(net(), config(2, onefold=own))
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step()
    with pytest.raises(ConfigError, match=r"onefold\.stall differs from that of another engine"):
        start(net(), config(2, onefold={"stall": {**stall, "seconds": 50}}))
    server = engine.monitor.metrics_server
    engine.destroy()
    lines = []
    if server is not None:
        lines = [line for line in server._metrics.text().splitlines() if line.startswith("onefold_rank_last_step")]
    return lines, [thread.name for thread in threading.enumerate() if thread.name in _THREADS]


_THREADS = ("onefold-stall", "onefold-beat", "onefold-heartbeats")


def test_heartbeats_are_metrics_and_the_watch_ends_with_its_engine(on_ranks, tmp_path):
    (lines, left), (_, others) = on_ranks(2, watched, str(tmp_path))
    assert 'onefold_rank_last_step{rank="0"} 2' in lines
    assert (left, others) == ([], [])
    rows = json.loads((tmp_path / "heartbeats.json").read_text())["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert rows[0]["ended"]
    assert not list(tmp_path.glob("stacks*"))


def unwritable(folder: str) -> None:
    (Path(folder) / f"file{rank()}").touch()
    stall = {"seconds": 60, "folder": f"{folder}/file{rank()}"}
    with pytest.raises(ConfigError, match=r"onefold\.stall: .* cannot be written on rank \d"):
        start(net(), config(0, onefold={"stall": stall}))


def test_a_folder_that_cannot_be_written_is_named(on_ranks, tmp_path):
    on_ranks(2, unwritable, str(tmp_path))
