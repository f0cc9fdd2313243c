"""The state of a training job on this rank: what a checkpoint holds, and what the parts of an engine share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from onefold.comm import Group
from onefold.fp8 import Fp8Layers
from onefold.loader import ResumableLoader
from onefold.log import logger
from onefold.moe import ExpertParallel
from onefold.offload.torch_checkpoints import HostCheckpoints
from onefold.optim.decision import StepDecision
from onefold.optim.step import ShardedStep
from onefold.plan import Plan
from onefold.runtime import Schedule
from onefold.sequence import SequenceParallel
from onefold.tiled_loss import TiledLoss
from onefold.window import AccumulationWindow


@dataclass
class TrainState:
    """Model, optimizer, learning-rate schedule, data position and counters of one engine, on this rank."""

    model: nn.Module
    config: dict[str, Any]
    plan: Plan
    group: Group
    device: torch.device
    schedule: Schedule
    window: AccumulationWindow
    decision: StepDecision
    step: ShardedStep | None
    left_alone: list[nn.Parameter]
    """Parameters that require gradients and are in no optimizer group."""
    sequence: SequenceParallel
    experts: ExpertParallel
    fp8: Fp8Layers
    replacements: list[TiledLoss | HostCheckpoints] = field(default_factory=list)
    """Functions of the model that are replaced until the engine is closed."""
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    interrupted: str | None = None
    """The exception that interrupted a backward in which other ranks wait for this one."""
    half_loaded: str = ""
    """Why weights and states are only partly those of a checkpoint, or an empty string."""

    @property
    def gradient_factor(self) -> float:
        """The factor that turns reduced gradients into averaged ones: ranks, loss scale, bare backwards."""
        return self.decision.unscale(self.window.divisor)

    def check_present(self) -> None:
        """Raise if the engine cannot compute.

        It cannot while its weights are off the device, after a load or a step that was interrupted, and once a rank is
        known to hang.
        """
        self.schedule.check_present()
        self.schedule.guard.check()
        if self.step is not None and self.step.interrupted:
            raise RuntimeError(
                f"{self.step.interrupted} interrupted a step, so only some weights are updated. Load a checkpoint "
                "into a new engine (onefold.initialize)."
            )
        if self.half_loaded:
            raise RuntimeError(
                f"{self.half_loaded}. Only some weights and states are loaded, so the engine can neither run nor save. "
                "Call load_checkpoint again, or create another engine with onefold.initialize."
            )

    def check_complete(self) -> None:
        """Raise as `check_present` does, and while any other kind of state is off the device."""
        self.schedule.check_awake()
        self.check_present()

    def flush(self) -> None:
        """Start using the weights of a delayed step. All ranks call this together."""
        if self.step is not None:
            self.step.flush()

    def begin_backward(self, *, divisor: int) -> None:
        """Begin a backward whose loss is still to be divided by `divisor`."""
        self.check_complete()
        if self.schedule.context.in_backward:
            # An earlier backward outside of the engine raised and never ended. Its gradients are incomplete.
            self.abort_backward()
        if self.step is not None:
            self.step.give_up_early("another backward")
        self.window.divide_by(divisor)
        self.schedule.begin_backward(boundary=self.window.backward_is_last)
        if self.step is not None and self.window.backward_is_last:
            self.step.begin_last_backward(self.gradient_factor)

    def abort_backward(self) -> None:
        """Drop the gradients of the accumulation window of a backward that raised, and restart the window."""
        if self.interrupted is not None:
            raise RuntimeError(
                f"a backward of this engine was interrupted ({self.interrupted}), so the ranks are inconsistent. Call "
                "initialize again on every rank, and load the last checkpoint."
            )
        if self.step is not None:
            self.step.abort_backward()
        self.schedule.abort_backward()
        self.decision.forget_losses()
        if self.window.restart():
            logger.warning("a backward raised inside an accumulation window. The window is restarted")

    def drop_gradients(self) -> None:
        """Drop all accumulated gradients and end their window."""
        if self.step is not None:
            self.step.give_up_early("dropping gradients")
        for parameter in self.left_alone:
            parameter.grad = None
        if self.schedule.context.in_backward:
            self.abort_backward()
        self.window.close()
        self.decision.forget_losses()
        self.schedule.drop_gradients()

    def make_loader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_workers: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches over this rank's share of a dataset."""
        return ResumableLoader(
            dataset,
            self.group.size // self.sequence.size,
            self.group.rank // self.sequence.size,
            part=self.sequence.split if self.sequence.size > 1 else None,
            batch_size=batch_size or self.window.batch.micro,
            collate_fn=collate_fn,
            drop_last=self.plan.loop.drops_last_batch,
            num_workers=num_workers,
            pin_memory=self.device.type == "cuda",
        )
