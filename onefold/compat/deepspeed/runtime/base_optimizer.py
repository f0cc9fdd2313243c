"""What `engine.optimizer` is: onefold's optimizer, with what others read on DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from onefold.offload.param_shard import read
from onefold.optim.loss_scale import DynamicLossScale
from onefold.optim.sharded import ShardedOptimizer as DeepSpeedOptimizer
from onefold.plan import Plan

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine that `deepspeed.initialize` has made."""

    plan: Plan
    parameter_offload: DeepSpeedZeRoOffload
    """Where parameters are sharded."""

    def learn(self, plan: Plan, model: nn.Module) -> None:
        """What the engine lays it over, for those who ask."""
        self.plan = plan
        if plan.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(model)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, a flat tensor for each shard."""
        return [read(store.master) for store in self.sharded.stores]

    single_partition_of_fp32_groups = fp32_groups_flat_partition = fp32_partitioned_groups_flat

    @property
    def dynamic_loss_scale(self) -> bool:
        return isinstance(self._loss_scale, DynamicLossScale)

    @property
    def loss_scaler(self) -> Any:
        return self._loss_scale
