"""What a training job is at any moment: what a checkpoint holds, and what its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onefold.comm import Group
from onefold.log import logger
from onefold.optim.step import ShardedStep, StepDecision
from onefold.plan import Plan
from onefold.runtime import Schedule
from onefold.window import AccumulationWindow


@dataclass
class TrainState:
    """Model, optimizer, schedule of rates, data position and counters of one engine, on this rank."""

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
    """Parameters that require gradients and that no optimizer has."""
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    offloaded: dict[Any, Any] = field(default_factory=dict)
    """What `offload_states` has moved off the device, by kind."""
    interrupted: str | None = None
    """What ended a backward that other ranks counted on."""
    half_loaded: str = ""
    """Why weights and states are a mixture of what they were and of a checkpoint, or nothing."""

    def check_present(self) -> None:
        """Raise while the weights are off the device, after a load that failed half-way or a step that was
        interrupted, and once ranks are known to be stuck.
        """
        self.schedule.check_present()
        self.schedule.check()
        if self.step is not None and self.step.interrupted:
            raise RuntimeError(
                f"{self.step.interrupted} has interrupted a step, and some weights are stepped and some are not: load "
                "a checkpoint into a new engine (onefold.initialize)"
            )
        if self.half_loaded:
            raise RuntimeError(
                f"{self.half_loaded}. Its weights and states are partly those of before: the engine neither computes "
                "nor saves until load_checkpoint succeeds; or make another with onefold.initialize"
            )

    def check_complete(self) -> None:
        """Raise as `check_present` does, and while any other kind of state is off the device."""
        self.schedule.check_awake()
        self.check_present()

    def flush(self) -> None:
        """With a delayed host step: have the last one's weights in use. All ranks call this together."""
        if self.step is not None:
            self.step.flush()

    def drop_gradients(self) -> None:
        """Forget all accumulated gradients, and end their window."""
        for parameter in self.left_alone:
            parameter.grad = None
        if self.schedule.in_backward:
            self.abort_backward()
        self.window.close()
        self.decision.losses.clear()
        self.schedule.drop_gradients()

    def abort_backward(self) -> None:
        """A backward raised: its window's gradients are dropped, and the window starts over."""
        if self.interrupted is not None:
            raise RuntimeError(
                f"a backward of this engine was interrupted ({self.interrupted}) while other ranks counted on it: "
                "call initialize again on every rank, and load the last checkpoint"
            )
        self.schedule.abort_backward()
        self.decision.losses.clear()
        if self.window.restart():
            logger.warning("a backward raised inside an accumulation window: the window starts over")
