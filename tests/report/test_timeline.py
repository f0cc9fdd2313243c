"""The timeline of units: what every rank did when, in one file; by `onefold.Profiling` and by `onefold.trace`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from models import Block, Net, Trace, batches, config, first_difference, more, net, precision, rank, start, train
from test_engine import log_lines
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import recorder
from onefold.comm import agreement
from onefold.config import ConfigError, load_config
from onefold.recorder import TRACKS, Recorder, Slice, Track, rows_of
from onefold.report.trace_file import RankTimeline, write_alone

UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def pieces(events: list[dict[str, Any]], of_rank: int, **wanted: str) -> list[dict[str, Any]]:
    """The spans of a rank whose fields are as wanted, in the order of their begin."""
    found = [event for event in events if event["ph"] == "X" and event["pid"] == of_rank]
    found = [event for event in found if all(event[field] == value for field, value in wanted.items())]
    return sorted(found, key=lambda event: event["ts"])


def of_unit(found: list[dict[str, Any]], unit: str) -> list[dict[str, Any]]:
    return [event for event in found if unit in event["args"].get("unit", "").split(", ")]


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def tiers(kind: str, folder: str) -> dict[str, Any]:
    """Settings by name: the stages, tiers and wires that move bytes in other ways."""
    on_disk = {"device": "nvme", "nvme_path": folder}
    on_host = {"device": "cpu"}
    return {
        "stage 0": config(0),
        "stage 1": config(1, zero_optimization={"overlap_comm": True}),
        "stage 2": config(2, **precision("bf16")),
        "stage 3": config(3, **precision("bf16")),
        "accumulation": config(3, gradient_accumulation_steps=2),
        "offload": config(3, zero_optimization={"offload_optimizer": on_host, "offload_param": on_host}),
        "offload of states": config(2, zero_optimization={"offload_optimizer": on_host}, **precision("bf16")),
        "nvme": config(3, zero_optimization={"offload_optimizer": on_disk, "offload_param": on_disk}),
        "quantized": config(3, zero_optimization={"zero_quantized_weights": True, "zero_quantized_gradients": True}),
        "secondary shards": config(3, zero_optimization={"zero_hpz_partition_size": 2}),
        "another optimizer": config(1, optimizer={"type": "RMSprop", "params": {"lr": 1e-3}}),
    }[kind]


KINDS = [
    "stage 0", "stage 1", "stage 2", "stage 3", "accumulation", "offload", "offload of states", "quantized",
    "secondary shards", "another optimizer", "nvme",
]  # fmt: skip
QUICK = ("stage 1", "stage 3", "offload", "quantized", "nvme")


def traced(settings: dict[str, Any], path: str | None) -> tuple[Trace, dict[str, int]]:
    """Four steps, of which the last two are traced: what they computed, and the bytes that the ledger counted."""
    engine = start(net(), settings)
    first = train(engine, 4)
    before = engine.ledger.copy()
    with onefold.Profiling(trace=path) if path is not None else nullcontext():
        last = train(engine, 4, seed=1)
        engine.wait_for_step()
        engine.optimizer.sharded.wait_for_host()
        moved = engine.ledger.since(before)
    counted: dict[str, int] = {}
    for row in moved.rows():
        track = TRACKS[row.operation].value
        counted[track] = counted.get(track, 0) + row.bytes
    engine.destroy()
    trace = Trace([*first.losses, *last.losses], [*first.norms, *last.norms], last.weights)
    return trace, {track: num_bytes for track, num_bytes in counted.items() if num_bytes}


def with_and_without(kind: str, folder: str, path: str) -> tuple[str | None, dict[str, int]]:
    settings = tiers(kind, folder)
    plain, _ = traced(settings, None)
    recorded, counted = traced(settings, path)
    return first_difference(recorded, plain), counted


@pytest.mark.parametrize("kind", [kind if kind in QUICK else more(kind) for kind in KINDS])
def test_a_traced_run_is_the_same_and_has_every_byte_of_the_ledger(on_ranks, tmp_path, kind):
    path = tmp_path / "trace.json"
    results = on_ranks(2, with_and_without, kind, str(tmp_path), str(path))
    events = read(path)
    for number, (difference, counted) in enumerate(results):
        assert difference is None
        found: dict[str, int] = {}
        for event in pieces(events, number):
            found[event["cat"]] = found.get(event["cat"], 0) + event["args"].get("bytes", 0)
        assert {track: num_bytes for track, num_bytes in found.items() if num_bytes} == counted
        assert counted["synchronization"] > 0
        for track in (Track.DOWN, Track.UP):
            moved = [event["args"] for event in pieces(events, number, cat=track.value)]
            assert all(args["bytes"] for args in moved if args.get("elements")), "each copy has its own bytes"


@pytest.mark.parametrize("keys", [{"mics_shard_size": 2}, more({"zero_quantized_gradients": True}), more({})])
def test_two_levels_have_every_byte_of_the_ledger(on_ranks, tmp_path, keys):
    """What crosses between nodes is counted on threads of its own."""
    path = tmp_path / "trace.json"
    results = on_ranks(4, traced, config(3, onefold={"node_size": 2}, zero_optimization=keys), str(path))
    events = read(path)
    for number, (_, counted) in enumerate(results):
        for track in (Track.GATHERS, Track.REDUCTIONS):
            spans = [event for event in pieces(events, number, cat=track.value) if event["args"]["bytes"]]
            assert sum(event["args"]["bytes"] for event in spans) == counted[track.value]
            assert all(event["args"]["unit"] for event in spans)


def stage_three(path: str) -> None:
    traced(config(3, zero_optimization={"overlap_comm": True}), path)


def test_every_unit_is_unsharded_computed_and_reduced_in_order(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_ranks(2, stage_three, str(path))
    events = read(path)
    for number in range(2):
        for unit in UNITS:
            unshards = of_unit(pieces(events, number, name="unshard"), unit)
            forwards = pieces(events, number, name=f"forward {unit}")
            backwards = pieces(events, number, name=f"backward {unit}")
            reductions = of_unit(pieces(events, number, name="reduce"), unit)
            steps = of_unit(pieces(events, number, name="step", cat="step"), unit)
            assert len(forwards) == len(backwards) == len(reductions) == len(steps) == 4
            assert len(unshards) >= 4
            for turn in range(4):
                forward, backward, reduction = forwards[turn], backwards[turn], reductions[turn]
                assert any(end(unshard) <= forward["ts"] for unshard in unshards[turn:])
                assert end(forward) <= backward["ts"] <= reduction["ts"]
                assert end(reduction) <= steps[turn]["ts"]
                for event in (forward, backward, reduction):
                    assert event["dur"] > 0
                assert reduction["args"]["wire"] == "native"
                assert reduction["args"]["tier"] == "device"
                assert reduction["args"]["elements"] > 0


def test_the_file_is_a_trace_of_all_ranks(on_ranks, tmp_path):
    path = tmp_path / "folder" / "trace.json"
    on_ranks(2, stage_three, str(path))
    whole = json.loads(path.read_text())
    assert sorted(file.name for file in path.parent.iterdir()) == ["trace.json"]
    names: dict[tuple[int, int], str] = {}
    for event in whole["traceEvents"]:
        assert event["ph"] in ("X", "M")
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    ranks = {event["pid"] for event in whole["traceEvents"] if event["name"] == "process_name"}
    assert ranks == {0, 1}
    for number in range(2):
        rows = {name for (pid, _), name in names.items() if pid == number}
        assert rows >= {track.value for track in Track}
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in whole["traceEvents"]:
        if event["ph"] == "X":
            place = event["pid"], event["tid"]
            assert names[place].startswith(event["cat"])
            assert event["ts"] >= 0
            times.setdefault(place, []).append((event["ts"], end(event)))
    for place, found in times.items():
        for (_, first_end), (begin, last_end) in zip(sorted(found), sorted(found)[1:], strict=False):
            nested = names[place].startswith(("compute", "phases"))
            assert begin >= first_end - 0.01 or (nested and last_end <= max(stop for _, stop in found))
    clock = whole["otherData"]["clocks"]["rank 1"]
    assert 0 < clock["clock_error_us"] < 1e6


class Again(Net):
    """Blocks that are computed again in backward."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


def recomputed(path: str) -> str | None:
    found = []
    for trace in (None, path):
        torch.manual_seed(3)
        engine = start(Again(), config(3))
        with onefold.Profiling(trace=trace):
            found.append(train(engine, 3))
    return first_difference(*found)


def test_recomputation_lies_inside_its_units_backward(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    assert on_ranks(2, recomputed, str(path)) == [None, None]
    events = read(path)
    for unit in UNITS[1:]:
        again, backwards = (pieces(events, 1, name=f"{name} {unit}") for name in ("recompute", "backward"))
        assert len(again) == len(backwards) == 3
        for inner, outer in zip(again, backwards, strict=True):
            assert outer["ts"] <= inner["ts"]
            assert end(inner) <= end(outer)


def bare(path: str) -> None:
    """A loop that calls backward on the loss itself."""
    engine = start(net(), config(3))
    with onefold.Profiling(trace=path):
        for x, y in batches(3):
            engine(x, y).backward()
            engine.step()


def test_a_backward_of_the_programs_own_has_an_end_in_its_own_step(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_ranks(2, bare, str(path))
    events = read(path)
    steps = pieces(events, 0, cat="phases", name="step")
    assert len(steps) == 3
    for unit in UNITS:
        backwards = pieces(events, 0, name=f"backward {unit}")
        assert len(backwards) == 3
        for backward, step in zip(backwards, steps, strict=True):
            assert backward["dur"] > 0
            assert end(backward) <= step["ts"]


@contextmanager
def no_spans() -> Iterator[None]:
    with mock.patch.object(recorder, "Span", side_effect=AssertionError("a span is made")):
        yield


def untraced(kind: str, folder: str) -> tuple[int, int]:
    """The hooks on modules and parameters while nobody records, and after somebody has."""
    engine = start(net(), tiers(kind, folder))

    def num_hooks() -> int:
        modules = [[*m._forward_hooks, *m._forward_pre_hooks] for m in engine.module.modules()]
        return sum(map(len, modules)) + sum(len(p._post_accumulate_grad_hooks or ()) for p in engine.parameters())

    with no_spans():
        train(engine, 3)
    before = num_hooks()
    with onefold.Profiling(trace=Path(folder) / "trace.json"):
        train(engine, 1)
    with no_spans():
        train(engine, 1)
    assert Recorder.active is None
    return before, num_hooks()


@pytest.mark.parametrize("kind", ["offload", "stage 2", "nvme"])
def test_nothing_is_recorded_and_nothing_is_left_when_nobody_asks(on_ranks, tmp_path, kind):
    for before, after in on_ranks(2, untraced, kind, str(tmp_path)):
        assert before == after


def failing(path: str) -> None:
    engine = start(net(), config(2))
    train(engine, 2)
    with suppress(KeyError), onefold.Profiling(trace=path):
        train(engine, 1)
        raise KeyError("the program's own")
    assert Recorder.active is None
    assert len(train(engine, 1).losses) == 1


def test_an_error_inside_leaves_each_rank_its_own_part(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_ranks(2, failing, str(path))
    assert not path.exists()
    for number in range(2):
        events = read(path.with_name(f"trace.rank{number}.json"))
        assert {event["pid"] for event in events} == {number}
        assert pieces(events, number, name="backward blocks.1")


# -- clocks and rows ---------------------------------------------------------------------------------------------------


def measured(ahead: int) -> agreement.ClockOffset:
    """Rank 1's clock is so many nanoseconds ahead."""
    engine = start(net(), config(1))
    real = time.perf_counter_ns

    def shifted() -> int:
        return real() + (ahead if rank() else 0)

    with mock.patch.object(agreement.time, "perf_counter_ns", shifted):
        return agreement.clock_offset(engine.state.schedule.agreement)


@pytest.mark.parametrize("ahead", [0, 7_000_000_000, -1_000_000])
def test_clocks_are_aligned_as_well_as_they_say(on_ranks, ahead):
    first, second = on_ranks(2, measured, ahead)
    assert (first.nanoseconds, first.error) == (0, 0)
    assert abs(second.nanoseconds + ahead) <= second.error


def gathered(sizes: list[int]) -> list[int]:
    engine = start(net(), config(1))
    data = bytes([rank() + 1]) * sizes[rank()]
    found = agreement.bytes_for_first(engine.state.schedule.agreement, "a test", data)
    assert all(part == bytes([number + 1]) * sizes[number] for number, part in enumerate(found))
    return [len(part) for part in found]


def test_rank_0_gets_everybodys_bytes(on_ranks):
    sizes = [3, 100_000]
    assert on_ranks(2, gathered, sizes) == [sizes, []]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40), st.booleans())
def test_spans_of_a_row_do_not_cross(spans, nests):
    times = [(begin, begin + length) for begin, length in spans]
    rows = rows_of(times, nests=nests)
    for one, (begin, stop) in enumerate(times):
        for other, (low, high) in enumerate(times):
            if one != other and rows[one] == rows[other]:
                apart = stop <= low or high <= begin
                inside = nests and ((begin <= low and high <= stop) or (low <= begin and stop <= high))
                assert apart or inside
    if times:
        assert min(rows) == 0
        assert set(rows) == set(range(max(rows) + 1))


def test_times_count_from_the_first_event_in_microseconds(tmp_path):
    slices = [Slice(Track.STEP, "b", 5_000, 9_000, {}), Slice(Track.STEP, "a", 2_000, 3_500, {"bytes": 4})]
    events = read(write_alone(RankTimeline(3, "here", slices), tmp_path / "t.json"))
    found = {event["name"]: event for event in pieces(events, 3)}
    assert (found["a"]["ts"], found["a"]["dur"]) == (0.0, 1.5)
    assert (found["b"]["ts"], found["b"]["dur"]) == (3.0, 4.0)
    assert found["a"]["args"] == {"bytes": 4}


# -- by the config -----------------------------------------------------------------------------------------------------


def by_config(path: str, steps: list[int], num_steps: int, more: dict[str, Any]) -> tuple[str | None, list[str]]:
    plain = train(start(net(), config(2, gradient_accumulation_steps=2)), 2 * num_steps)
    with log_lines() as lines:
        settings = config(2, gradient_accumulation_steps=2, onefold={"trace": {"steps": steps, "path": path, **more}})
        engine = start(net(), {**settings, "log_level": "info"})
        trace = train(engine, 2 * num_steps)
        assert Recorder.active is None or num_steps < steps[1]
        engine.close()
        assert Recorder.active is None
    return first_difference(trace, plain), lines


def test_the_config_traces_some_steps(on_ranks, tmp_path):
    path = tmp_path / "there" / "trace.json"
    results = on_ranks(2, by_config, str(path), [2, 3], 5, {"torch_profiler": True, "memory_snapshot": True})
    for number, (difference, lines) in enumerate(results):
        assert difference is None
        assert any("memory_snapshot" in line and "no CUDA device" in line for line in lines) == (number == 0)
        assert any(str(path) in line for line in lines) == (number == 0)
    events = read(path)
    for number in range(2):
        phases = [event["name"] for event in pieces(events, number, cat="phases")]
        assert phases == ["forward", "backward", "forward", "backward", "step"] * 2
        assert json.loads((path.parent / f"trace.torch.rank{number}.json").read_text())["traceEvents"]


def test_a_run_that_ends_inside_the_window_leaves_each_rank_its_part(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_ranks(2, by_config, str(path), [2, 30], 3, {})
    assert not path.exists()
    for number in range(2):
        events = read(path.with_name(f"trace.rank{number}.json"))
        assert len(pieces(events, number, name="step", cat="phases")) == 2


def too_late(path: str) -> list[str]:
    with log_lines() as lines:
        engine = start(net(), config(1, onefold={"trace": {"steps": [1, 2], "path": path}}))
        engine.global_steps = 7
        train(engine, 2)
        engine.close()
    return lines


def beside_another(path: str) -> list[str]:
    with log_lines() as lines, onefold.Profiling():
        engine = start(net(), config(1, onefold={"trace": {"steps": [1, 2], "path": path}}))
        train(engine, 3)
        engine.close()
    return lines


@pytest.mark.parametrize(("case", "word"), [(too_late, "already done"), (beside_another, "onefold.Profiling")])
def test_steps_that_cannot_be_traced_are_told(on_ranks, tmp_path, case, word):
    lines = on_ranks(2, case, str(tmp_path / "trace.json"))[0]
    assert any("onefold.trace" in line and word in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def unwritable(path: str) -> tuple[int, list[str]]:
    with log_lines() as lines:
        engine = start(net(), config(1, onefold={"trace": {"steps": [1, 1], "path": path}}))
        num = len(train(engine, 2).losses)
        engine.close()
    return num, lines


def test_a_file_that_cannot_be_written_does_not_end_the_training(on_ranks, tmp_path):
    (tmp_path / "file").write_text("")
    results = on_ranks(2, unwritable, str(tmp_path / "file" / "trace.json"))
    assert [num for num, _ in results] == [2, 2]
    assert any("onefold.trace.path" in line for line in results[0][1])


def test_steps_that_end_before_they_begin_are_refused():
    with pytest.raises(ConfigError, match=r"onefold\.trace\.steps = \[5, 2\].*\[2, 5\]"):
        load_config({"train_batch_size": 1, "onefold": {"trace": {"steps": [5, 2]}}})


def test_a_profiler_without_steps_is_noticed():
    notices = load_config({"train_batch_size": 1, "onefold": {"trace": {"torch_profiler": True}}}).notices
    assert any("onefold.trace.torch_profiler" in notice for notice in notices)


def in_one_process(path: str) -> None:
    engine = start(Block(8), {"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    with onefold.Profiling(trace=path):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    assert dist.get_world_size() == 1


def test_one_rank_writes_the_same_file(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_ranks(1, in_one_process, str(path))
    events = read(path)
    assert pieces(events, 0, cat="step")
    assert any(event["name"].startswith("backward") for event in pieces(events, 0, cat="compute"))
