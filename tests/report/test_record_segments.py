"""Records of runs in object stores: segments, their readers, faults of the store, and programs that end early."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batches, config, more, net, start
from object_store import BUCKET, MISSING, NEW_CONNECTIONS, SKIP, ObjectStore
from programs import Ended, run_programs
from records import end, facts, row
from test_run_record import Weight

from onefold import ConfigError
from onefold.config import load_config
from onefold.plan import make_plan
from onefold.report import record_segments
from onefold.report.record_segments import SegmentWriter, count_segments, segment_path
from onefold.report.run_file import RunFile, RunFileError, line_of
from onefold.report.run_record import RunRecord
from onefold.storage.object_path import ObjectPath, StorageError
from onefold.storage.place import place
from onefold.tools.cli.main import main as command

OnRanks = Callable[..., list[Any]]
needs_server = pytest.mark.skipif(bool(MISSING), reason=SKIP)
LINE = len(line_of(row(1)))


def record_of(name: str) -> ObjectPath:
    """Return the path of an empty record in memory."""
    path = place(f"memory://{name}/run.jsonl")
    assert isinstance(path, ObjectPath)
    path.remove_tree()
    return path


def sizes(record: ObjectPath) -> list[int]:
    return [segment_path(record, number).size() for number in range(count_segments(record))]


# -- writer and reader, in memory --------------------------------------------------------------------------------------


def test_lines_are_sent_in_segments_of_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_segments, "SEGMENT_BYTES", 3 * LINE)
    record = record_of("segments")
    writer = SegmentWriter(record)
    assert sizes(record) == [0]
    for step in range(1, 8):
        writer.write(line_of(row(step)).encode())
    writer.close()
    assert len(sizes(record)) == 3
    whole = b""
    for number in range(3):
        path = segment_path(record, number)
        content = path.read_ranges([(0, path.size())])[0]
        assert content.endswith(b"\n")
        whole += content
    assert whole.decode() == "".join(line_of(row(step)) for step in range(1, 8))


def test_an_engine_never_writes_to_the_segments_of_another() -> None:
    record = record_of("engines")
    for step in (1, 2):
        writer = SegmentWriter(record)
        writer.write(facts().encode())
        writer.write(line_of(row(step)).encode())
        writer.close()
    SegmentWriter(record)  # a job that ends before its first line
    SegmentWriter(record)
    found = sizes(record)
    assert min(found[:2]) > 0
    assert found[2:] == [0]
    assert [each.step for each in RunFile.read("memory://engines").steps] == [1, 2]


@given(st.lists(st.sampled_from(["line", "line", "send", "read", "new writer"]), max_size=40))
@settings(max_examples=60)
def test_a_reader_sees_a_prefix_of_the_lines(events: list[str]) -> None:
    """Lines are added, sent and read in any order, and engines end with unsent lines and are followed by others."""
    record, sent, unsent = record_of("any-order"), [facts()], [] if events else [facts()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_segments, "SEGMENT_BYTES", 2 * LINE)
        patch.setattr(SegmentWriter, "_run", lambda self: None)
        writer, run, step = SegmentWriter(record), RunFile("memory://any-order"), 0
        writer.write(facts().encode())
        writer._send()
        for event in events:
            if event == "line":
                step += 1
                unsent.append(line_of(row(step)))
                writer.write(unsent[-1].encode())
            elif event == "send":
                writer._send()
                sent, unsent = sent + unsent, []
            elif event == "new writer":  # the engine was killed
                writer, unsent = SegmentWriter(record), []
            else:
                run.update()
                assert len(run.steps) == len(sent) - 1
        run.update()
        assert "".join(map(line_of, run.steps)) == "".join(sent[1:])
        assert RunFile.read("memory://any-order").steps == run.steps


def test_segments_are_counted_with_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    record, asked = record_of("count"), []
    exists = ObjectPath.exists

    def counted(path: ObjectPath) -> bool:
        asked.append(path.name)
        return exists(path)

    monkeypatch.setattr(ObjectPath, "exists", counted)
    for number in range(40):
        assert count_segments(record) == number
        assert len(asked) <= 12
        asked.clear()
        assert count_segments(record, max(0, number - 1)) == number
        assert len(asked) <= 3
        asked.clear()
        segment_path(record, number).write_bytes(b"")


def test_a_record_that_was_replaced_is_read_anew() -> None:
    record = record_of("replaced")
    segment_path(record, 0).write_bytes((facts() + line_of(row(1)) + line_of(row(2))).encode())
    segment_path(record, 1).write_bytes(line_of(row(3)).encode())
    run = RunFile("memory://replaced")
    assert run.update()
    record.remove_tree()
    with pytest.raises(FileNotFoundError):
        run.update()
    segment_path(record, 0).write_bytes((facts(stage=3) + line_of(row(9))).encode())
    assert run.update()
    assert ([each.step for each in run.steps], run.facts["stage"]) == ([9], 3)
    with pytest.raises(RunFileError, match=r"memory://nothing/run\.jsonl: no such file"):
        RunFile.read("memory://nothing")


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    yield found
    logging.getLogger("onefold").removeHandler(handler)


class Outage:
    """A store that refuses to write, as long as `is_on`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_on, self.num_refused = False, 0
        write = ObjectPath.write_bytes

        def refuse(path: ObjectPath, content: bytes) -> int:
            if self.is_on:
                self.num_refused += 1
                raise StorageError(f"{path}: the store is away")
            return write(path, content)

        patch.setattr(ObjectPath, "write_bytes", refuse)
        patch.setattr(record_segments, "SECONDS", 0.01)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_wait_until_the_store_is_back(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    outage, record = Outage(monkeypatch), record_of("outage")
    run = RunRecord("memory://outage")
    run.write(facts())
    outage.is_on = True
    for step in range(1, 4):
        run.write(line_of(row(step)))
        wait_until(lambda: outage.num_refused >= 2)
    outage.is_on = False
    read = RunFile("memory://outage")
    wait_until(lambda: read.update() and len(read.steps) == 3)
    run.write(end())
    run.close()
    assert RunFile.read("memory://outage").end is not None
    assert [text for text in warnings if "memory and sent later" in text] == [
        f"onefold.report: {segment_path(record, 0)}: the store is away. Its lines are kept in memory and sent later"
    ]


def test_a_store_that_stays_away_ends_the_record(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(record_segments, "_MOST_UNSENT", 5 * LINE)
    outage = Outage(monkeypatch)
    record_of("away")
    run = RunRecord("memory://away")
    outage.is_on = True
    for step in range(1, 9):
        run.write(line_of(row(step)))
    assert sum("Recording is disabled and training continues" in text for text in warnings) == 1
    other = RunRecord("memory://away")  # the record of the first one is closed
    other.write(facts())
    other.close()
    assert "the last lines of the record could not be sent" in warnings[-1]


def test_urls_of_records_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"onefold\.report: s3://bucket: the URL must not contain a user") as caught:
        load_config({"onefold": {"report": "s3://key:hunter2@bucket"}})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"onefold\.report: sftp://.*is not supported"):
        load_config({"onefold": {"report": "sftp://node/run"}})
    with pytest.raises(ConfigError, match=r"onefold\.stall\.folder = 's3://bucket/run': must be a path"):
        load_config({"onefold": {"stall": {"seconds": 5, "folder": "s3://bucket/run"}}})
    loop = make_plan(load_config({"onefold": {"stall": {"seconds": 5}, "report": "s3://bucket/run"}}), 1).loop
    assert (loop.record_folder, loop.stall_folder) == ("s3://bucket/run", "stall")
    assert load_config({"onefold": {"report": f"file://{tmp_path}"}}).onefold.report == str(tmp_path)
    segment_path(record_of("other"), 0).write_bytes(b"something else\n")
    with pytest.raises(ConfigError, match="00000000 exists but is not a run record"):
        RunRecord("memory://other")
    Outage(monkeypatch).is_on = True
    with pytest.raises(ConfigError, match=r"onefold\.report: the record cannot be written\. memory://.*is away"):
        RunRecord("memory://refused")


# -- engines -----------------------------------------------------------------------------------------------------------


def recorded(tmp: str) -> None:
    """Train with a record in memory and with one in a file. One engine at a time writes to a record."""
    url = "memory://engine"
    runs = []
    for folder in (tmp, url):
        engine = start(net(), config(2, onefold={"report": folder}))
        for x, y in batches(3):
            engine.backward(engine(x, y))
            engine.step()
        if folder == url:
            with pytest.raises(ConfigError, match=r"onefold\.report = 'memory://engine': another engine"):
                start(Weight(), config(1, onefold={"report": url}))
        engine.close()
        runs.append(RunFile.read(folder))
    one, other = runs
    assert [(each.step, each.loss, each.grad_norm) for each in one.steps] == [
        (each.step, each.loss, each.grad_norm) for each in other.steps
    ]
    assert other.end is not None
    assert other.end["reason"] == "closed"
    assert count_segments(ObjectPath(f"{url}/run.jsonl")) == 1


def test_a_record_in_an_object_store_has_the_lines_of_a_file(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, recorded, str(tmp_path))


# -- on a server -------------------------------------------------------------------------------------------------------


JOB = """
import os, signal, sys, time, torch, onefold
from onefold.report import record_segments
record_segments.SECONDS = 0.05
model = torch.nn.Linear(8, 8)
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "onefold": {"report": sys.argv[1]}}
engine, *_ = onefold.initialize(model=model, config={**config, "log_level": "warning"})
def train(steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
train(3)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)\n"
STORED = """
from onefold.report.run_file import RunFile
run = RunFile(sys.argv[1])
while len(run.steps) < 3:
    run.update()
    time.sleep(0.01)
"""
ENDS = {
    "falls off its end": "",
    "is killed": STORED + "record_segments.SegmentWriter._send = lambda self: None\ntrain(2)\n" + KILL,
    "trains with a slow store": "train(20)\nprint('trained', engine.global_steps, flush=True)\n" + KILL,
}


@pytest.fixture(scope="module")
def ended(s3: ObjectStore) -> dict[str, Ended]:
    """All of these programs in one start of an interpreter."""
    # The first request creates the segment; the store does not answer the others.
    with (
        pytest.MonkeyPatch.context() as patch,
        s3.faults({"method": "PUT", "path": "/trains-with-a-slow-store/", "fault": "hold", "skip": 1}),
    ):
        for name, value in {**NEW_CONNECTIONS, "AWS_ENDPOINT_URL": f"http://localhost:{s3.port}"}.items():
            patch.setenv(name, value)
        return run_programs({name: (JOB + code, url_of(name)) for name, code in ENDS.items()})


def url_of(name: str) -> str:
    return f"s3://{BUCKET}/{name.replace(' ', '-')}"


@needs_server
@pytest.mark.program
def test_a_slow_store_does_not_delay_steps(ended: dict[str, Ended]) -> None:
    done = ended["trains with a slow store"]
    assert "trained 23" in done.stdout, done.stderr
    with pytest.raises(RunFileError, match="it contains no run yet"):
        RunFile.read(url_of("trains with a slow store"))


@needs_server
@pytest.mark.program
def test_a_killed_process_loses_only_unsent_lines(ended: dict[str, Ended]) -> None:
    assert ended["is killed"].returncode == -9, ended["is killed"].stderr
    run = RunFile.read(url_of("is killed"))
    assert (run.end, len(run.steps)) == (None, 3)


@needs_server
@pytest.mark.program
def test_the_last_line_of_a_program_is_stored(ended: dict[str, Ended]) -> None:
    """The program does not close its engine."""
    run = RunFile.read(url_of("falls off its end"))
    assert run.end is not None, ended["falls off its end"].stderr
    assert (run.end["reason"], len(run.steps)) == ("the process ended", 3)


@needs_server
def test_commands_read_a_record_of_a_url(s3: ObjectStore, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/commands"
    writer = SegmentWriter(ObjectPath(f"{url}/run.jsonl"))
    for line in (facts(), line_of(row(1)), line_of(row(2, loss=0.75)), end()):
        writer.write(line.encode())
    writer.close()
    assert command(["watch", url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert re.search("loss +0.75", shown)
    assert command(["report", url]) == 0
    assert capsys.readouterr().out == f"report: {url}/report.html\n"
    page = ObjectPath(f"{url}/report.html")
    assert b"Plan against measurement" in page.read_ranges([(0, page.size())])[0]
    assert command(["report", url, "--out", str(tmp_path / "page.html"), "--png"]) == 0
    assert (tmp_path / "report-loss.png").stat().st_size > 1000
    assert command(["report", f"s3://{BUCKET}/nothing"]) != 0
    assert "run.jsonl: no such file" in capsys.readouterr().err


@needs_server
@pytest.mark.parametrize("fault", ["drop", more("error")])
def test_requests_that_fail_for_a_moment_are_repeated(s3: ObjectStore, fault: str) -> None:
    url = f"s3://{BUCKET}/moment-{fault}"
    with s3.faults({"method": "PUT", "path": f"/moment-{fault}/", "fault": fault, "skip": 1, "times": 2}):
        record = RunRecord(url)
        record.write(facts())
        record.close()
    assert RunFile.read(url).steps == []
    assert sum(each["fault"] == fault for each in s3.requests()) == 2
