"""What `engine.optimizer` is: onefold's optimizer, with what others read on DeepSpeed's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from onefold.compat.as_deepspeed import VERSION
from onefold.compat.deepspeed.runtime.fp16.loss_scaler import LossScalerBase, scaler_of
from onefold.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from onefold.offload.param_shard import read
from onefold.optim.loss_scale import DynamicLossScale
from onefold.optim.sharded import ShardedOptimizer as DeepSpeedOptimizer
from onefold.plan import Plan

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine that `deepspeed.initialize` has made."""

    plan: Plan
    stands_for: type[torch.optim.Optimizer]
    """The class of the instance that `initialize` was given, or the one that DeepSpeed makes of the same config."""
    parameter_offload: DeepSpeedZeRoOffload
    """Where parameters are sharded."""
    step_of_engine: weakref.WeakMethod[Callable[[], None]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """`engine.step()`: loops of one's own, and Lightning's Fabric, call it here."""
        if closure is not None:
            raise ValueError("optimizer.step(closure): an engine has no closure to call; call backward before the step")
        step = self.step_of_engine()
        if step is None:
            raise RuntimeError("the engine of this optimizer is gone, and its shards with it")
        step()

    def learn(self, plan: Plan, model: nn.Module, stands_for: type[torch.optim.Optimizer]) -> None:
        """What the engine lays it over, for those who ask."""
        self.plan, self.stands_for = plan, stands_for
        if self.sharded.instance is None:
            self.optimizer = self._basic_optimizer()
        if plan.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(model)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, a flat tensor for each shard."""
        return [read(store.master) for store in self.sharded.stores]

    single_partition_of_fp32_groups = fp32_groups_flat_partition = fp32_partitioned_groups_flat

    def _basic_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer of the class that the config names, over the same groups: schedules and monitors read it."""
        made = self.stands_for.__new__(self.stands_for)
        # As unpickling makes one: the constructor would make new groups, and import the compiler.
        state = {"param_groups": self.param_groups, "defaults": dict(self.defaults), "state": self.state}
        torch.optim.Optimizer.__setstate__(made, state)
        self.answer_for(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, by DeepSpeed's names, without a copy: what is on a disk comes as what loads it.

        `engine.save_checkpoint` saves the part of every rank.
        """
        self.sharded.wait_for_host()
        stores, stepper = self.sharded.stores, self.sharded.stepper
        states = [{held.name: held.memory for held in stepper.held_states(store)} for store in stores]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        masters, states_key = "single_partition_of_fp32_groups", "base_optimizer_state"
        if self.plan.shards_parameters:
            masters, states_key = "fp32_flat_groups", "optimizer_state_dict"
        return {
            "zero_stage": self.plan.stage,
            "partition_count": self.plan.num_shards,
            "overflow": self.overflow,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "loss_scale": self.loss_scale,
            "ds_version": VERSION,
            states_key: {"state": dict(enumerate(states)), "param_groups": groups},
            masters: [store.master for store in stores],
        }

    @property
    def adam_w_mode(self) -> bool:
        return bool(self.param_groups[0]["decoupled_weight_decay"])

    @property
    def dynamic_loss_scale(self) -> bool:
        return isinstance(self._loss_scale, DynamicLossScale)

    @cached_property
    def loss_scaler(self) -> LossScalerBase:
        return scaler_of(self._loss_scale)

    @property
    def loss_scale_config(self) -> LossScalerBase:
        return self.loss_scaler

    @property
    def low_precision_dtype(self) -> torch.dtype | None:
        return self.plan.precision.compute
