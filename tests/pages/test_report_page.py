"""The page about a run: one well-formed file that needs nothing else, with the numbers of the record in it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from records import HELD, REPORT, end, facts, row, write_run

from onefold.log import format_bytes
from onefold.report.plan_report import TrafficRow
from onefold.report.run_file import MemoryRow, RunFile, write_line
from onefold.tools.cli.main import main
from onefold.tools.pages.charts import MAX_POINTS, charts_of, smooth, thin
from onefold.tools.pages.page import tiles_of, write_page

VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = "</script><img src=x onerror=alert(1)>&\"'@@body@@<!--"


class Page(HTMLParser):
    """Elements, texts, and whether every element that is opened is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        (self.scripts if inside in ("script", "style") else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def charts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(next(text for text in self.scripts if text.startswith("[")))
        return found


def page(folder: Path) -> Page:
    return Page(write_page(folder).read_text(encoding="utf-8"))


def sent(num_bytes: int) -> tuple[TrafficRow, ...]:
    return (TrafficRow("gather", "data", 2, num_bytes),)


def test_the_page_is_one_whole_file_with_the_numbers_of_the_record(tmp_path):
    steps = [row(n, loss=5.0 / n, traffic=sent(1_000_000 * n), grad_norm=0.1234 * n) for n in (1, 2, 3)]
    write_run(
        tmp_path,
        facts(),
        write_line("note", steps=9, name="GPT of tests", data="books", held_out_loss=2.5, tokens_per_second=1234.4),
        *steps,
        end(),
    )
    written = write_page(tmp_path)
    assert written == tmp_path / "report.html"
    source = written.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source.replace("<!DOCTYPE html>", ""))
    found = Page(source)
    assert not any(name in ("src", "href") or name.startswith("on") for _, given in found.tags for name in given)
    for text in ("GPT of tests: stage 2, 2 ranks", "3 of 9", "5.0000", "1.6667", "books", "1,234 trained, 5 frozen",
                 "8 samples per step = 2 per micro-batch x 2 micro-batches x 2 ranks", "held-out loss 2.5000",
                 "tokens per second 1,234", f"peak memory {format_bytes(123_456_789)}"):  # fmt: skip
        assert text in found.text, text
    for kind, size in HELD["device"].items():
        held = REPORT["held"]["device"][kind]
        assert f"device {kind} {format_bytes(size)} {format_bytes(held)}" in found.text
    assert "+12.5%" in found.text  # of the states
    assert "sent: gather (data) 1.0 MB" in found.text  # 3 MB over three steps
    by_title = dict(zip((given["id"] for tag, given in found.tags if tag == "figure"), found.charts, strict=True))
    assert by_title["loss"]["series"][0]["values"] == [found.loss for found in steps]
    assert by_title["gradient-norm"]["series"][0]["values"] == [found.grad_norm for found in steps]
    assert [one["values"] for one in by_title["learning-rate"]["series"]] == [[0.001] * 3, [0.002] * 3]
    assert by_title["traffic"]["series"][0]["values"] == [1_000_000, 2_000_000, 3_000_000]
    kinds = {one["name"]: one["values"][-1] for one in by_title["memory-by-kind"]["series"]}
    assert kinds == HELD["device"]
    tiers = {one["name"]: one["values"][-1] for one in by_title["memory-by-tier"]["series"]}
    assert tiers == {"held in device": 18_000, "rest of the process": 70_000}
    phases = {one["name"]: one["values"][0] for one in by_title["time"]["series"]}
    assert phases == {"forward": 0.25, "backward": 0.5, "step": 0.125, "outside": 0.125}
    assert all(chart["steps"] == [1, 2, 3] for chart in found.charts)


def test_tokens_per_second_and_mfu_are_shown_where_the_record_has_them(tmp_path):
    """4,000 tokens and 0.5 PFLOP in a second, on two GPUs with 1 PFLOP/s each."""
    write_run(tmp_path, facts(peak_flops=2e15), *(row(step, tokens=4000, flops=0.5e15) for step in (1, 2, 3)))
    run = RunFile.read(tmp_path)
    tiles = dict(tiles_of(run))
    assert tiles["tokens per second"] == "4,000"
    assert tiles["tokens per second and rank"] == "2,000"
    assert tiles["MFU"] == "25.0%"
    charts = {chart.name: chart.series[0].values for chart in charts_of(run)}
    assert (charts["tokens"], charts["mfu"]) == ([4000.0] * 3, [0.25] * 3)
    write_run(tmp_path, facts(peak_flops=None), row(1, tokens=4000, flops=0.5e15), row(2))
    run = RunFile.read(tmp_path)
    assert "MFU" not in dict(tiles_of(run))
    assert "mfu" not in {chart.name for chart in charts_of(run)}


def test_on_a_device_the_rest_is_activations_and_buffers(tmp_path):
    memory = MemoryRow(HELD, rest=5000, host_resident=1, host_peak=2, device_allocated=23_000, device_reserved=30_000,
                       device_peak=64_000)  # fmt: skip
    write_run(tmp_path, facts(), row(1, memory=memory), row(2, memory=memory))
    charts = {chart.name: chart for chart in charts_of(RunFile.read(tmp_path))}
    kinds = {one.name: one.values[0] for one in charts["memory-by-kind"].series}
    assert kinds == {**HELD["device"], "activations and buffers": 5000}
    assert sum(kinds.values()) == 23_000
    assert charts["memory-by-kind"].over is not None
    assert charts["memory-by-kind"].over.values == [64_000, 64_000]


def test_everything_from_the_record_is_escaped(tmp_path):
    config = {NASTY: [NASTY]}
    given = {"plan": NASTY, "device": NASTY, "optimizer": NASTY, "config": config, "versions": {NASTY: NASTY}}
    given |= {"model": {"class": NASTY}, "batch": {"train": NASTY}, "nodes": [NASTY], "stage": NASTY}
    nasty = row(1, traffic=(TrafficRow(NASTY, NASTY, 1, 10),), phases={NASTY: 1.0, "forward": 1.0})
    report = {
        **REPORT,
        "buffers": {NASTY: 1},
        "peaks": {NASTY: 1},
        "traffic": [{**REPORT["traffic"][0], "group": NASTY}],
    }
    note = write_line("note", name=NASTY, data=NASTY, steps=NASTY)
    write_run(tmp_path, facts(**given), note, nasty, nasty, end(reason="error", error=NASTY, report=report))
    source = write_page(tmp_path).read_text(encoding="utf-8")
    found = Page(source)
    assert not any(tag == "img" for tag, _ in found.tags)
    assert source.count("</script>") == 2
    data = source.partition('id="charts">')[2].partition("</script>")[0]
    assert not set("<>&") & set(data)
    assert NASTY in " ".join(found.texts)
    assert found.charts[-1]["series"][0]["name"] == NASTY


def test_what_is_not_finite_is_a_gap_with_a_name(tmp_path):
    losses = [1.0, math.nan, math.inf, 2.0, None]
    write_run(tmp_path, facts(), *(row(n, loss=loss, skipped=n == 3) for n, loss in enumerate(losses)))
    found = page(tmp_path)
    (series,) = found.charts[0]["series"]
    assert series["values"] == [1.0, None, None, 2.0, None]
    assert series["marks"] == {"1": "nan", "2": "inf"}
    assert "steps skipped 1" in found.text


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, num_steps):
    write_run(tmp_path, facts(), *(row(n + 1) for n in range(num_steps)), '{"kind": "st')
    found = page(tmp_path)
    assert "running, or killed after" in found.text
    assert ("No step is recorded yet." in found.text) == (num_steps == 0)
    assert bool(found.charts) == bool(num_steps)


# -- long runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("length", [999, 1001, 12_345])
def test_thinning_keeps_the_ends_and_the_extremes(length, num_columns):
    choose = random.Random(length)
    columns = [[choose.gauss(0, 1) for _ in range(length)] for _ in range(num_columns)]
    columns[0][length // 3] = math.nan
    columns[-1][length // 2], columns[-1][length // 4] = 50.0, None  # type: ignore[call-overload]
    kept = thin(columns)
    assert kept == sorted(set(kept))
    assert {0, length - 1, length // 3, length // 2} <= set(kept)
    assert len(kept) <= max(min(length, MAX_POINTS), 2 + MAX_POINTS)
    for column in columns:
        finite = [value for value in column if value is not None and math.isfinite(value)]
        shown = [column[place] for place in kept if column[place] is not None and math.isfinite(column[place])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(gaps) <= 4 * math.ceil(length / (MAX_POINTS // (2 * num_columns)))


@pytest.mark.slow
def test_a_long_run_makes_a_small_page_with_its_worst_step(tmp_path):
    steps = [row(n, loss=1.0 + (n == 7777) * 100) for n in range(20_000)]
    write_run(tmp_path, facts(), *steps)
    found = page(tmp_path)
    assert all(len(chart["steps"]) <= MAX_POINTS + 2 for chart in found.charts)
    loss = found.charts[0]
    assert loss["series"][0]["values"][loss["steps"].index(7777)] == 101.0
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_smoothing_is_a_mean_over_what_there_is():
    values = [3.0, None, 1.0, math.nan, 2.0]
    assert smooth(values) == [2.0] * 5
    line = [float(n) for n in range(40)]
    assert smooth(line)[10:30] == pytest.approx(line[10:30])


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_pngs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    losses = [1.0, math.nan, 3.0]
    write_run(tmp_path / "run", facts(), *(row(n, loss=loss, traffic=sent(n)) for n, loss in enumerate(losses)), end())
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "pages" / "a.html"), "--png"]) == 0
    said = capsys.readouterr().out
    Page((tmp_path / "pages" / "a.html").read_text())
    pngs = sorted((tmp_path / "pages").glob("*.png"))
    assert {path.stem for path in pngs} >= {"report-loss", "report-memory-by-tier", "report-time", "report-traffic"}
    for path in pngs:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in said


def test_pngs_without_matplotlib_are_an_error_that_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_run(tmp_path, facts(), row(1))
    assert main(["report", str(tmp_path), "--png"]) == 2
    assert "pip install 'onefold[plots]'" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_what_is_no_record_is_told_and_leaves_no_page(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err
    write_run(tmp_path, facts(), "{oops\n", row(1))
    assert main(["report", str(tmp_path)]) == 2
    assert "run.jsonl: line 2" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
