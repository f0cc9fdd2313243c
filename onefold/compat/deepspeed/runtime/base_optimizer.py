"""What `engine.optimizer` is: onefold's optimizer, with what others read on DeepSpeed's."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

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

    def learn(self, plan: Plan, model: nn.Module, stands_for: type[torch.optim.Optimizer]) -> None:
        """What the engine lays it over, for those who ask."""
        self.plan, self.stands_for = plan, stands_for
        if plan.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(model)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, a flat tensor for each shard."""
        return [read(store.master) for store in self.sharded.stores]

    single_partition_of_fp32_groups = fp32_groups_flat_partition = fp32_partitioned_groups_flat

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
