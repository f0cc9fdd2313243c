"""What rank 0 shows while it trains: a live bar on a terminal, a line now and then everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, as it is shown and as it goes into metrics.jsonl."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int
    """Of this rank, now: GPU memory on a GPU, resident memory on a CPU."""
    seconds: float
    """Since training began."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Progress(Protocol):
    """Entered once, told of every step, told of what else there is to say in between."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, metrics: StepMetrics) -> None: ...
    def say(self, text: str) -> None: ...


class SilentProgress:
    """Of every rank but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, metrics: StepMetrics) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class LineProgress(SilentProgress):
    """For logs and pipes: about twenty lines a run, the first and the last step among them."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._every = max(1, num_steps // 20)

    def update(self, metrics: StepMetrics) -> None:
        if metrics.step in (1, self._num_steps) or metrics.step % self._every == 0:
            left = format_seconds(metrics.seconds / metrics.step * (self._num_steps - metrics.step))
            self.say(
                f"step {metrics.step:>5}/{self._num_steps}  loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2e}  "
                f"grad norm {metrics.grad_norm:.3f}  {metrics.tokens_per_second:,.0f} tokens/s  "
                f"memory {format_bytes(metrics.memory_bytes)}  {left} left"
            )

    def say(self, text: str) -> None:
        print(text, flush=True)


class LiveProgress(SilentProgress):
    """For terminals: a bar, and under it the last step's figures."""

    def __init__(self, num_steps: int) -> None:
        from rich.console import RenderableType
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        class Bar(RichProgress):
            figures = "first step ..."

            def get_renderables(self) -> Iterable[RenderableType]:
                yield self.make_tasks_table(self.tasks)
                yield Text(self.figures, style="cyan", overflow="ellipsis", no_wrap=True)

        self._bar = Bar(
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, metrics: StepMetrics) -> None:
        self._bar.figures = (
            f"learning rate {metrics.learning_rate:.2e}   gradient norm {metrics.grad_norm:.3f}   "
            f"{metrics.tokens_per_second:,.0f} tokens/s   memory {format_bytes(metrics.memory_bytes)}"
        )
        self._bar.update(self._task, completed=metrics.step, loss=f"loss {metrics.loss:.3f}")

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)


def make_progress(num_steps: int, *, shows: bool) -> Progress:
    """`shows`: whether this rank shows anything at all."""
    if not shows:
        return SilentProgress()
    if sys.stdout.isatty():
        try:
            return LiveProgress(num_steps)
        except ImportError:  # rich makes it nicer, nothing more
            pass
    return LineProgress(num_steps)


def format_bytes(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:.2f} GB"
    return f"{value / 1e6:.1f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB"


def format_seconds(value: float) -> str:
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes}:{seconds:02d}"
