"""Write the charts of a run as PNG files, with matplotlib."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

from onefold.report.run_file import RunFile, RunFileError
from onefold.storage.place import Place
from onefold.tools.pages.charts import RESTS, Chart, charts_of

_COLORS = ("#2f6fc1", "#e08a2e", "#3a9a6a", "#8a62c9", "#cd4f62", "#2b9bab")
_GREY = "#a9aeb6"
_SCALES = {"number": (1.0, ""), "bytes": (1e-6, " (MB)"), "seconds": (1000.0, " (ms)")}


def new_figure(width: float, height: float) -> Any:
    """Return a new figure of matplotlib, or None if it is not installed. Avoids pyplot, which has global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_pngs(run: RunFile, folder: Place) -> list[Place]:
    """Write one file for each chart: report-loss.png and so on."""
    written = []
    for chart in charts_of(run):
        figure = new_figure(8, 4)
        if figure is None:
            raise RunFileError(
                "--png needs matplotlib, which is not installed. Run pip install 'onefold[plots]'. The page itself is "
                "written."
            )
        _draw(figure.subplots(), chart)
        path = folder / f"report-{chart.name}.png"
        content = BytesIO()
        figure.savefig(content, format="png")
        path.write_bytes(content.getvalue())
        written.append(path)
    return written


def _draw(axes: Any, chart: Chart) -> None:
    factor, unit = _SCALES[chart.unit]
    columns = {one.name: [_scaled(value, factor) for value in one.values] for one in chart.series}
    if chart.stacked:
        colors = [_GREY if name in RESTS else _COLORS[at % len(_COLORS)] for at, name in enumerate(columns)]
        axes.stackplot(chart.steps, *columns.values(), labels=list(columns), colors=colors, alpha=0.8)
    else:
        for place, (name, column) in enumerate(columns.items()):
            axes.plot(chart.steps, column, label=name, color=_COLORS[place % len(_COLORS)], linewidth=1.4)
    if chart.over is not None:
        line = [_scaled(value, factor) for value in chart.over.values]
        axes.plot(chart.steps, line, label=chart.over.name, color="black", linestyle="--", linewidth=1)
    if chart.stacked:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{chart.title.lower()}{unit}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)


def _scaled(value: float | None, factor: float) -> float:
    """Return a scaled value, or NaN for a gap."""
    return value * factor if value is not None and math.isfinite(value) else math.nan
