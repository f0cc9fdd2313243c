"""What is left when a run has ended: a table, a plot, metrics.jsonl and summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from onefold.comm.ledger import Row
from onefold.train.progress import StepMetrics, format_bytes, format_seconds


@dataclass(frozen=True)
class Summary:
    """One run in a dozen figures."""

    preset: str
    num_parameters: int
    num_ranks: int
    device: str
    plan: str
    data: str
    steps_asked: int
    steps_done: int
    stopped: bool
    """Whether Ctrl-C ended it before its last step."""
    seconds: float
    first_loss: float
    last_loss: float
    held_out_loss: float
    tokens_per_second: float
    peak_bytes_per_rank: tuple[int, ...]
    traffic: tuple[Row, ...]
    """What rank 0 sent."""
    bytes_by_stage: dict[str, int]
    """Model states of one rank, as each ZeRO stage would have held them at the end of a backward."""

    def rows(self) -> list[tuple[str, str]]:
        """The table, top to bottom."""
        steps = f"{self.steps_done} of {self.steps_asked}"
        peaks = ", ".join(format_bytes(value) for value in self.peak_bytes_per_rank)
        rows = [
            ("model", f"GPT {self.preset}, {self.num_parameters:,} parameters"),
            ("ranks", f"{self.num_ranks} on {self.device}"),
            ("plan", self.plan),
            ("data", self.data),
            ("steps", f"{steps} in {format_seconds(self.seconds)}{', stopped by you' * self.stopped}"),
            ("loss", f"{self.first_loss:.4f} first, {self.last_loss:.4f} last"),
            ("held-out loss", f"{self.held_out_loss:.4f} ({self.held_out_loss / 0.6931:.2f} bits a byte)"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s over all ranks"),
            ("peak memory", f"{peaks} (by rank)"),
            (
                "model states",
                ", ".join(f"{stage} {format_bytes(value)}" for stage, value in self.bytes_by_stage.items())
                + " (a rank, by stage)",
            ),
        ]
        rows += [
            (
                f"sent: {row.operation}",
                f"{format_bytes(row.bytes)} in {row.calls:,} calls, {row.seconds:.2f} s on the host",
            )
            for row in self.traffic
        ]
        return rows


def show(summary: Summary) -> None:
    """Print the table: with rich where it is installed, as plain lines elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        width = max(len(name) for name, _ in summary.rows())
        print("\n".join(f"{name:<{width}}  {value}" for name, value in summary.rows()), flush=True)
        return
    table = Table(show_header=False, title="Summary", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def write_files(folder: Path, summary: Summary, steps: Sequence[StepMetrics]) -> Path | None:
    """metrics.jsonl, summary.json and the plot into `folder`; returns the plot's path, None without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step.as_dict()) + "\n" for step in steps))
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return _plot(folder / "loss.png", summary, steps)


def _plot(path: Path, summary: Summary, steps: Sequence[StepMetrics]) -> Path | None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    done = [step.step for step in steps]
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state: figures made this way need no pyplot
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(f"GPT {summary.preset}, {summary.num_parameters / 1e6:,.1f}M parameters, {summary.num_ranks} ranks")

    upper.plot(done, [step.loss for step in steps], color="#c9d6e8", linewidth=1, label="each step")
    upper.plot(done, _smooth([step.loss for step in steps]), color="#1f5fa8", linewidth=2, label="smoothed")
    upper.axhline(summary.held_out_loss, color="#c4552d", linewidth=1.2, linestyle="--",
                  label=f"held out, at the end: {summary.held_out_loss:.3f}")  # fmt: skip
    upper.set_ylabel("loss (nats a byte)")
    upper.legend(frameon=False)

    megabytes = [step.memory_bytes / 1e6 for step in steps]
    lower.plot(done, megabytes, color="#2f855a", linewidth=1.5)
    lower.fill_between(done, megabytes, color="#2f855a", alpha=0.12)
    lower.set_ylim(0, max(megabytes) * 1.15)
    lower.set_ylabel("memory of rank 0 (MB)")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(path)
    return path


def _smooth(values: Sequence[float], reach: int = 5) -> list[float]:
    """The mean of each value and of up to `reach` on either side: no lag behind what it smooths."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
