"""Output of `onefold train`: progress, then a summary, metrics.jsonl and the loss curve."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from onefold.comm.collective import Row
from onefold.log import format_bytes
from onefold.tools.pages.charts import smooth
from onefold.tools.pages.plots import new_figure
from onefold.tools.train.options import SUMMARY

NO_CURVE = "no plot: matplotlib is not installed (pip install 'onefold[plots]'); the numbers are in metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step, a line of metrics.jsonl."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int
    """Current memory of this rank: GPU memory, or resident memory on a CPU."""
    seconds: float
    """Seconds since training began."""
    held_out_loss: float | None = None
    """The held-out loss after this step, with --eval-every."""
    num_ranks: int = 1
    mfu: float | None = None
    """Model FLOPs utilization. None on CPUs, and for unknown GPUs and models."""

    @property
    def speed(self) -> str:
        """Tokens per second, of all ranks and of each, and MFU."""
        return describe_speed(self.tokens_per_second, self.num_ranks, self.mfu)


def describe_speed(tokens_per_second: float, num_ranks: int, mfu: float | None) -> str:
    """Describe tokens per second, of all ranks and of each, and MFU."""
    each = f" ({tokens_per_second / num_ranks:,.0f} per rank)" if num_ranks > 1 else ""
    return f"{tokens_per_second:,.0f} tokens/s{each}" + ("" if mfu is None else f", MFU {mfu:.1%}")


# -- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """A context that is called with every step and message. This class prints nothing, for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, metrics: StepMetrics) -> None:
        pass

    def print(self, text: str) -> None:
        pass


class LineProgress(Progress):
    """Progress for logs and pipes: about twenty lines, with the first and the last step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._every = max(1, num_steps // 20)

    def update(self, metrics: StepMetrics) -> None:
        if metrics.step in (1, self._num_steps) or metrics.step % self._every == 0:
            left = format_seconds(metrics.seconds / metrics.step * (self._num_steps - metrics.step))
            self.print(
                f"step {metrics.step:>5}/{self._num_steps}  loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2e}  "
                f"grad norm {metrics.grad_norm:.3f}  {metrics.speed}  "
                f"memory {format_bytes(metrics.memory_bytes)}  {left} left"
            )

    def print(self, text: str) -> None:
        print(text, flush=True)


class _Bar(RichProgress):
    figures = "first step ..."

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.figures, style="cyan", overflow="ellipsis", no_wrap=True)


class LiveProgress(Progress):
    """Progress for terminals: a bar, with the metrics of the last step below."""

    def __init__(self, num_steps: int) -> None:
        self._bar = _Bar(
            TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("[bold green]{task.fields[loss]}"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._bar.add_task("train", total=num_steps, loss="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, metrics: StepMetrics) -> None:
        self._bar.figures = (
            f"learning rate {metrics.learning_rate:.2e}   gradient norm {metrics.grad_norm:.3f}   "
            f"{metrics.speed}   memory {format_bytes(metrics.memory_bytes)}"
        )
        self._bar.update(self._task, completed=metrics.step, loss=f"loss {metrics.loss:.3f}")

    def print(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)


def make_progress(num_steps: int, *, shows: bool) -> Progress:
    """Return the progress of this rank. `shows`: whether it prints anything."""
    if not shows:
        return Progress()
    return LiveProgress(num_steps) if sys.stdout.isatty() else LineProgress(num_steps)


def format_seconds(value: float) -> str:
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes}:{seconds:02d}"


# -- summary ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The main figures of a run."""

    model: str
    unit: str
    """The unit of the loss: byte or token."""
    num_parameters: int
    num_ranks: int
    device: str
    plan: str
    data: str
    row_formats: dict[str, int]
    """Rows of each format for training. `onefold chat` reads it."""
    steps_asked: int
    steps_done: int
    stopped: bool
    """Whether Ctrl-C ended the run before its last step."""
    seconds: float
    first_loss: float
    last_loss: float
    held_out_loss: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes_per_rank: tuple[int, ...]
    traffic: tuple[Row, ...]
    """Traffic of rank 0."""
    bytes_by_stage: dict[str, int]
    """Bytes of model states per rank in each ZeRO stage, at the end of backward."""

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the summary."""
        steps = f"{self.steps_done} of {self.steps_asked}"
        peaks = ", ".join(format_bytes(value) for value in self.peak_bytes_per_rank)
        states = ", ".join(f"{stage} {format_bytes(value)}" for stage, value in self.bytes_by_stage.items())
        return [
            ("model", f"{self.model}, {self.num_parameters:,} parameters"),
            ("ranks", f"{self.num_ranks} on {self.device}"),
            ("plan", self.plan),
            ("data", self.data),
            ("steps", f"{steps} in {format_seconds(self.seconds)}{', interrupted' * self.stopped}"),
            ("loss", f"{self.first_loss:.4f} first, {self.last_loss:.4f} last"),
            ("held-out loss", f"{self.held_out_loss:.4f} ({self.held_out_loss / 0.6931:.2f} bits per {self.unit})"),
            ("speed", describe_speed(self.tokens_per_second, self.num_ranks, self.mfu)),
            ("peak memory", f"{peaks} (by rank)"),
            ("model states", f"{states} (per rank, by stage)"),
            *((f"sent: {row.operation}", _sent(row)) for row in self.traffic),
        ]


def _sent(row: Row) -> str:
    return f"{format_bytes(row.bytes)} in {row.calls:,} calls, {row.seconds:.2f} s on the host"


def show(summary: Summary) -> None:
    """Print the summary."""
    table = Table(show_header=False, title="Summary", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def write_files(folder: Path, summary: Summary, steps: Sequence[StepMetrics]) -> Path | None:
    """Write metrics.jsonl, summary.json and the loss curve. Return the curve's path, or None without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))
    (folder / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return _draw_curve(folder / "loss.png", summary, steps)


def _draw_curve(path: Path, summary: Summary, steps: Sequence[StepMetrics]) -> Path | None:
    figure = new_figure(8, 5.5)
    if figure is None:
        return None
    done = [step.step for step in steps]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(f"{summary.model}, {summary.num_parameters / 1e6:,.1f}M parameters, {summary.num_ranks} ranks")

    upper.plot(done, [step.loss for step in steps], color="#c9d6e8", linewidth=1, label="each step")
    upper.plot(done, smooth([step.loss for step in steps]), color="#1f5fa8", linewidth=2, label="smoothed")
    upper.axhline(summary.held_out_loss, color="#c4552d", linewidth=1.2, linestyle="--",
                  label=f"held out, at the end: {summary.held_out_loss:.3f}")  # fmt: skip
    upper.set_ylabel(f"loss (nats per {summary.unit})")
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
