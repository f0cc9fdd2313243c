"""The accumulation window: which micro-step is a boundary, and how a window's loss is divided. No tensors.

Two protocols are served. The engine counts, and `backward` and `step` are called on every micro-batch; or the caller
sets the boundary before each backward and calls `step` only there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onefold.config import Batch


class AccumulationWindow:
    """`managed` False: every `step` is a boundary, and no backward knows whether one follows."""

    def __init__(self, batch: Batch, *, managed: bool) -> None:
        self.batch = batch
        self.managed = managed
        self.micro_steps = 0
        self.explicit: bool | None = None
        self.in_no_sync = False
        # What the accumulated gradients are still to be divided by: 1 where `engine.backward` divided the loss,
        # the accumulation count where a bare backward did not. None between windows.
        self._divisor: int | None = None
        # The micro-step from which windows are counted.
        self._first = 0

    @property
    def accumulates(self) -> bool:
        return self.batch.accumulation > 1 or not self.managed

    @property
    def at_boundary(self) -> bool:
        """Whether the coming (or present) micro-step ends with an update."""
        if not self.managed:
            return True
        if self.explicit is not None:
            return self.explicit
        return (self.micro_steps - self._first + 1) % self.batch.accumulation == 0

    @property
    def backward_is_last(self) -> bool:
        """Whether the coming backward is known to be the last of its window."""
        return self.managed and not self.in_no_sync and self.at_boundary

    @property
    def divisor(self) -> int:
        """What the accumulated gradients are still to be divided by."""
        return self._divisor or 1

    @property
    def is_open(self) -> bool:
        """Whether gradients have been accumulated that no step has used yet."""
        return self._divisor is not None

    def resume(self, micro_steps: int) -> None:
        """Go on as a run that stands at a boundary after so many micro-steps."""
        self.micro_steps = self._first = micro_steps
        self.close()

    def divide_by(self, divisor: int) -> None:
        if self._divisor not in (None, divisor):
            raise RuntimeError(
                "engine.backward(loss) and a bare loss.backward() in one accumulation window: they divide by the "
                "accumulation count in different places. Use one of them throughout"
            )
        self._divisor = divisor

    def close(self) -> None:
        """The window's gradients are gone: stepped with, or dropped."""
        self._divisor = None

    def restart(self) -> bool:
        """The window's gradients are lost: count from here. Whether earlier micro-steps were lost with them."""
        lost = self.micro_steps > self._window_start
        self._first = self.micro_steps
        self.close()
        return lost

    @property
    def _window_start(self) -> int:
        return self.micro_steps - (self.micro_steps - self._first) % self.batch.accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.in_no_sync:
            raise RuntimeError("engine.no_sync() does not nest")
        self.in_no_sync = True
        try:
            yield
        finally:
            self.in_no_sync = False

    def set_train(self, train: int) -> None:
        per_micro_step = self.batch.micro * self.batch.world
        if train < 1 or train % per_micro_step:
            raise ValueError(
                f"train_batch_size {train} is no multiple of micro {self.batch.micro} x world {self.batch.world} = "
                f"{per_micro_step}"
            )
        self.set_accumulation(train // per_micro_step)

    def set_micro(self, micro: int) -> None:
        if micro < 1:
            raise ValueError(f"the micro-batch size must be at least 1, not {micro}")
        self._set(micro, self.batch.accumulation)

    def set_accumulation(self, accumulation: int) -> None:
        if accumulation < 1:
            raise ValueError(f"the accumulation count must be at least 1, not {accumulation}")
        if accumulation != self.batch.accumulation:
            if self._divisor is not None:
                raise RuntimeError("the accumulation count can change only between steps, not inside a window")
            self._first = self.micro_steps
        self._set(self.batch.micro, accumulation)

    def _set(self, micro: int, accumulation: int) -> None:
        self.batch = Batch(micro * accumulation * self.batch.world, micro, accumulation, self.batch.world)
