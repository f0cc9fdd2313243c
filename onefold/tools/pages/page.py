"""Write one page of HTML from the record of a run. `page.html` is its template, and draws the charts."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from onefold.log import format_bytes
from onefold.report.plan_report import Compared, PlanReport
from onefold.report.run_file import RunFile
from onefold.storage.place import Place, PlaceLike, place
from onefold.tools.pages.charts import RESTS, Chart, Series, charts_of

PAGE_NAME = "report.html"
_TEMPLATE = Path(__file__).with_name("page.html")
_COLORS = ("c0", "c1", "c2", "c3", "c4", "c5")


def write_page(folder: PlaceLike, out: str | os.PathLike[str] | None = None) -> Place:
    """Read the record in a folder or below a URL, and write the page next to it, or to `out`."""
    run = RunFile.read(folder)
    path = place(out) if out is not None else run.path.parent / PAGE_NAME
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page_of(run).encode())
    return path


def page_of(run: RunFile) -> str:
    """Return the page. Every text of the record is escaped, because it may contain markup."""
    charts = charts_of(run)
    values = {
        "title": escape(title_of(run)),
        "body": "\n".join(_body(run, charts)),
        "charts": _script_data([_chart_data(chart) for chart in charts]),
    }
    # One pass, so that inserted text is not searched again.
    return re.sub("@@([a-z]+)@@", lambda found: values[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def title_of(run: RunFile) -> str:
    """Return the title of a run."""
    facts = run.facts
    model = facts.get("model")
    name = facts.get("name") or (model.get("class") if isinstance(model, dict) else None) or "a run"
    ranks = facts.get("world_size")
    return f"{name}: stage {facts.get('stage')}, {ranks} rank{'s' * (ranks != 1)}"


def status_of(run: RunFile) -> tuple[str, str]:
    """Return the status of the run, and its CSS class: good, bad or none."""
    if run.end is None:
        last = run.steps[-1].time if run.steps else float(run.facts["time"])
        return f"running, or killed after {_moment(last)}", ""
    if run.end.get("reason") == "error":
        return f"ended by an error: {run.end.get('error')}", "bad"
    return f"ended {_moment(run.end.get('time'))}", "good"


def _body(run: RunFile, charts: Sequence[Chart]) -> Iterable[str]:
    status, mood = status_of(run)
    yield f"<h1>{escape(title_of(run))}</h1>"
    yield f'<p class="soft">started {escape(_moment(run.facts["time"]))} on {escape(_device(run))}</p>'
    yield f'<p class="{mood}">{escape(status)}</p>'
    yield '<div class="tiles">'
    yield from (f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in tiles_of(run))
    yield "</div>"
    if charts:
        yield '<div class="charts">'
        yield from (_figure(chart) for chart in charts)
        yield "</div>"
    else:
        yield '<p class="soft">No step is recorded yet.</p>'
    yield "<h2>Plan against measurement</h2>"
    yield _plan_table(run.report)
    yield "<h2>The run</h2>"
    yield f'<div class="table"><pre>{escape(str(run.facts.get("plan")))}</pre></div>'
    yield _table(("", ""), [(name, value) for name, value in facts_of(run)])
    config = json.dumps(run.facts.get("config"), indent=2)
    yield f'<details><summary>config</summary><div class="table"><pre>{escape(config)}</pre></div></details>'


def tiles_of(run: RunFile) -> list[tuple[str, str]]:
    """Return the main figures of a run."""
    steps, planned = run.steps, run.facts.get("steps")
    if not steps:
        return [("steps", "0")]
    losses = [row.loss for row in steps if row.loss is not None]
    speeds = [row.samples_per_second for row in steps[1:] or steps if row.samples_per_second is not None]
    found = [("steps", f"{steps[-1].step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))]
    if losses:
        found += [("first loss", f"{losses[0]:.4f}"), ("last loss", f"{losses[-1]:.4f}")]
    if isinstance(held_out := run.facts.get("held_out_loss"), float):
        found.append(("held-out loss", f"{held_out:.4f}"))
    if speeds:
        found.append(("samples per second", f"{statistics.median(speeds):,.4g}"))
    found += _token_tiles(run)
    found.append(("time in steps", duration(sum(row.seconds for row in steps))))
    found.append(("peak memory", format_bytes(next(iter(run.report.peaks.values())))))
    skipped = sum(row.skipped for row in steps)
    return [*found, ("steps skipped", f"{skipped:,}")] if skipped else found


def _token_tiles(run: RunFile) -> Iterable[tuple[str, str]]:
    """Yield tokens per second, of all ranks and of each, and MFU, as far as the record has them."""
    rows, ranks = run.steps[1:] or run.steps, run.facts.get("world_size")
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second is not None]
    shares = [share for row in rows if (share := row.utilization(run.peak_flops)) is not None]
    exact = run.facts.get("tokens_per_second")  # of all ranks
    speed = exact if isinstance(exact, float) else statistics.median(speeds) if speeds else None
    if speed is not None:
        yield "tokens per second", f"{speed:,.0f}"
        if isinstance(ranks, int) and ranks > 1:
            yield "tokens per second and rank", f"{speed / ranks:,.0f}"
    if shares:
        yield "MFU", f"{statistics.median(shares):.1%}"


def facts_of(run: RunFile) -> Iterable[tuple[str, str]]:
    """Yield facts about model, batch, data and software."""
    facts, model = run.facts, run.facts.get("model") or {}
    if isinstance(model, dict):
        frozen = model.get("parameters_frozen")
        text = (
            f"{model.get('parameters_trained'):,} trained" if isinstance(model.get("parameters_trained"), int) else ""
        )
        yield "parameters", text + (f", {frozen:,} frozen" if isinstance(frozen, int) and frozen else "")
        yield "units", str(len(model.get("units") or ()))
    yield "optimizer", str(facts.get("optimizer"))
    batch = facts.get("batch")
    if isinstance(batch, dict):
        yield (
            "batch",
            f"{batch.get('train')} samples per step = {batch.get('micro')} per micro-batch x "
            f"{batch.get('accumulation')} micro-batches x {batch.get('world')} ranks",
        )
    if facts.get("data"):
        yield "data", str(facts["data"])
    nodes = facts.get("nodes")
    if isinstance(nodes, list):
        yield "nodes", f"{len(nodes)}, of {', '.join(map(str, nodes))} ranks"
    versions = facts.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


# -- pieces ----------------------------------------------------------------------------------------------------------


def _figure(chart: Chart) -> str:
    keys = [
        f'<span><i style="--c: var(--{color})"></i>{escape(one.name)} <em>{escape(_last(one, chart))}</em></span>'
        for one, color in zip(chart.series, _colors(chart), strict=True)
    ]
    if chart.over is not None:
        keys.append(
            f'<span><i class="over"></i>{escape(chart.over.name)} <em>{escape(_last(chart.over, chart))}</em></span>'
        )
    return (
        f'<figure id="{escape(chart.name)}"><figcaption><b>{escape(chart.title)}</b><p>{escape(chart.note)}</p>'
        f'<div class="keys">{"".join(keys)}</div></figcaption><div class="plot" role="img" '
        f'aria-label="{escape(chart.title)} by step"></div><div class="tip" hidden></div></figure>'
    )


def _last(one: Series, chart: Chart) -> str:
    value = next((value for value in reversed(one.values) if value is not None), None)
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if chart.unit == "bytes":
        return format_bytes(value)
    return f"{value * 1000:.3g} ms" if chart.unit == "seconds" else f"{value:.4g}"


def _colors(chart: Chart) -> list[str]:
    found = ["rest" if one.name in RESTS else _COLORS[place % len(_COLORS)] for place, one in enumerate(chart.series)]
    return ["c0", "c0"] if any(one.name == "smoothed" for one in chart.series) else found


def _chart_data(chart: Chart) -> dict[str, Any]:
    return {
        "unit": chart.unit,
        "stacked": chart.stacked,
        "steps": chart.steps,
        "series": [_series_data(one) for one in chart.series],
        "over": _series_data(chart.over) if chart.over is not None else None,
        "colors": _colors(chart),
    }


def _series_data(one: Series) -> dict[str, Any]:
    """Return a series for the script, with values that are not finite as text in `marks`."""
    marks = {
        place: str(value) for place, value in enumerate(one.values) if value is not None and not math.isfinite(value)
    }
    values = [None if value is None or place in marks else value for place, value in enumerate(one.values)]
    return {"name": one.name, "values": values, **({"marks": marks} if marks else {})}


def _script_data(value: Any) -> str:
    """Return JSON that is safe inside a script element, which ends at the first `</script`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plan_table(report: PlanReport) -> str:
    rows = [
        f"<tr{' class=sum' if row.what == 'model state' else ''}>"
        f"<td>{escape(row.where)}</td><td>{escape(row.what)}</td>"
        f'<td class="number">{_size(row.planned)}</td><td class="number">{_size(row.measured)}</td>'
        f'<td class="number {"good" if _difference(row) == "none" else ""}">{_difference(row)}</td></tr>'
        for row in report.rows()
    ]
    heads = '<th>tier</th><th>kind</th><th class="number">planned</th><th class="number">measured</th>'
    note = (
        f"Rank 0. Model states are measured at the end of backward; traffic is the mean of {report.num_steps:,} steps."
    )
    return (
        f'<div class="table"><table><tr>{heads}<th class="number">difference</th></tr>{"".join(rows)}</table></div>'
        f'<p class="soft">{escape(note)}</p>'
    )


def _size(value: int | None) -> str:
    return "" if value is None else f'<span title="{value:,} bytes">{escape(format_bytes(value))}</span>'


def _difference(row: Compared) -> str:
    if row.planned is None or row.measured is None:
        return ""
    if row.planned == row.measured:
        return "none"
    return f"{(row.measured - row.planned) / row.planned:+.1%}" if row.planned else "not planned"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in heads)}</tr>" if any(heads) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table>{head}{body}</table></div>'


def _device(run: RunFile) -> str:
    ranks = run.facts.get("world_size")
    return f"{ranks} x {run.facts.get('device')}" if ranks != 1 else str(run.facts.get("device"))


def _moment(value: Any) -> str:
    try:
        return datetime.fromtimestamp(float(value)).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (TypeError, ValueError, OverflowError, OSError):
        return str(value)


def duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if there are any."""
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
