"""The gradient accumulation window: its boundaries, and the division of its gradients. No tensors.

There are two protocols. Either the engine counts micro-steps, and the caller calls `backward` and `step` for every
micro-batch; or the caller sets the boundary before each backward and calls `step` only at boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onefold.config import Batch


class AccumulationWindow:
    """The state of the accumulation window of one engine.

    If `managed` is False every `step` is a boundary, and a backward cannot know whether it is the last of its window.
    """

    def __init__(self, batch: Batch, *, managed: bool) -> None:
        self.batch = batch
        self.managed = managed
        self.micro_steps = 0
        self.explicit: bool | None = None
        self.in_no_sync = False
        # The divisor that still has to be applied to the accumulated gradients: 1 if `engine.backward` divided the
        # loss, or the accumulation count after a bare `loss.backward()`. None between windows.
        self._divisor: int | None = None
        # The micro-step at which the counting of windows starts.
        self._first = 0

    @property
    def accumulates(self) -> bool:
        return self.batch.accumulation > 1 or not self.managed

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-step, or the next one if none is active, ends with an update."""
        if not self.managed:
            return True
        if self.explicit is not None:
            return self.explicit
        return (self.micro_steps - self._first + 1) % self.batch.accumulation == 0

    @property
    def backward_is_last(self) -> bool:
        """Whether the next backward is known to be the last of its window."""
        return self.managed and not self.in_no_sync and self.at_boundary

    @property
    def divisor(self) -> int:
        """The divisor that still has to be applied to the accumulated gradients."""
        return self._divisor or 1

    @property
    def is_open(self) -> bool:
        """Whether there are accumulated gradients that no step has used yet."""
        return self._divisor is not None

    def resume(self, micro_steps: int) -> None:
        """Resume at a boundary after `micro_steps` micro-steps."""
        self.micro_steps = self._first = micro_steps
        self.close()

    def divide_by(self, divisor: int) -> None:
        """Set the divisor of the window. Raise if the window has another one."""
        if self._divisor not in (None, divisor):
            raise RuntimeError(
                "engine.backward(loss) and loss.backward() are mixed in one accumulation window, but divide by the "
                "accumulation count at different points. Use one of them throughout."
            )
        self._divisor = divisor

    def close(self) -> None:
        """Close the window after its gradients were used by a step or dropped."""
        self._divisor = None

    def restart(self) -> bool:
        """Start a new window, because the gradients are lost. Return whether earlier micro-steps were lost too."""
        lost = self.micro_steps > self._window_start
        self._first = self.micro_steps
        self.close()
        return lost

    @property
    def _window_start(self) -> int:
        return self.micro_steps - (self.micro_steps - self._first) % self.batch.accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark backwards in this context as not the last of their window."""
        if self.in_no_sync:
            raise RuntimeError("engine.no_sync() is already active. Leave it before you enter it again.")
        self.in_no_sync = True
        try:
            yield
        finally:
            self.in_no_sync = False

    def set_train(self, train: int) -> None:
        """Set the global batch size by changing the accumulation count."""
        per_micro_step = self.batch.micro * self.batch.world
        if train < 1 or train % per_micro_step:
            raise ValueError(
                f"train_batch_size {train} is not a multiple of micro-batch {self.batch.micro} x ranks "
                f"{self.batch.world} = {per_micro_step}. Pass a multiple."
            )
        self.set_accumulation(train // per_micro_step)

    def set_micro(self, micro: int) -> None:
        """Set the micro-batch size."""
        if micro < 1:
            raise ValueError(f"the micro-batch size is {micro}. Pass at least 1.")
        self._set(micro, self.batch.accumulation)

    def set_accumulation(self, accumulation: int) -> None:
        """Set the accumulation count. Raise inside a window."""
        if accumulation < 1:
            raise ValueError(f"the accumulation count is {accumulation}. Pass at least 1.")
        if accumulation != self.batch.accumulation:
            if self._divisor is not None:
                raise RuntimeError("the accumulation count cannot change inside a window. Set it after the step.")
            self._first = self.micro_steps
        self._set(self.batch.micro, accumulation)

    def _set(self, micro: int, accumulation: int) -> None:
        self.batch = Batch(micro * accumulation * self.batch.world, micro, accumulation, self.batch.world)
