"""What an engine knows about itself, under DeepSpeed's names. Nothing here changes anything but batch sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onefold.comm import Group, Ledger, local_rank
from onefold.config import Batch, Config
from onefold.optim.sharded import ShardedOptimizer
from onefold.optim.update import Update
from onefold.plan import Counting, Crossing, ModelBytes, Plan, Precision, Tier, count_crossing
from onefold.plan.table import DTYPES, every_stage
from onefold.report.describe import describe, held_bytes, planned_bytes
from onefold.runtime import Unit
from onefold.tier.device import Pool
from onefold.tier.parking import Parked
from onefold.window import Window


class Facts(nn.Module):
    """The half of the engine that answers questions."""

    settings: Config
    plan: Plan
    device: torch.device
    ledger: Ledger
    optimizer: ShardedOptimizer | None
    _group: Group
    _window: Window
    _precision: Precision
    _counting: Counting
    _update: Update
    _units: list[Unit]
    _pool: Pool
    _collective_name: str
    _parked: list[Parked]
    # Why weights and states are a mixture of what they were and of a checkpoint, or "".
    _half_loaded: str = ""

    def _check_present(self) -> None:
        """After `offload_states` there is nothing on the device to work with, and after a load that failed half-way
        nothing that belongs together.
        """
        self._check_reloaded()
        if self._half_loaded:
            raise RuntimeError(
                f"{self._half_loaded}. Its weights and states are partly those of before: the engine neither computes "
                "nor saves until load_checkpoint succeeds; or make another with onefold.initialize"
            )

    def _check_reloaded(self) -> None:
        if self._parked:
            raise RuntimeError("the engine's states are off the device: call engine.reload_states() first")

    # -- batches ------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        return self._window.micro_steps

    @property
    def batch(self) -> Batch:
        return self._window.batch

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation count so that a step takes this many samples."""
        self._window.set_train(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with it those of a step."""
        self._window.set_micro(micro_batch_size)

    def set_gradient_accumulation_steps(self, accumulation: int) -> None:
        """Change the micro-steps of a step, and with it its samples."""
        self._window.set_accumulation(accumulation)

    # -- ranks, steps, plans ------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The config as the user gave it."""
        return self.settings.raw

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return self._group.size

    @property
    def dp_world_size(self) -> int:
        return self._group.size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return self._group.rank

    def was_step_applied(self) -> bool:
        """Whether the last boundary updated the weights (an overflow skips it)."""
        return self._update.applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's averaged gradient before clipping; None before the first step."""
        return self._update.norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group["betas"] if "betas" in group else group.get("momentum") for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_weights(self) -> bool:
        return self.plan.shards_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What accelerate asks before it collects a state dict."""
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def loss_scale(self) -> float:
        """The loss scale in force."""
        return self._update.loss_scale.value

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._precision.of_wire(DTYPES[self.settings.compute_dtype])

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the model, dtype in which gradients accumulate)."""
        return DTYPES[self.settings.compute_dtype], self._precision.accumulate

    def planned_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """The plan's arithmetic: model-state bytes of one rank in one tier."""
        return planned_bytes(self._units, self._counting, self._window, tier)

    def planned_bytes_by_stage(self) -> dict[str, ModelBytes]:
        """The same for every stage, all on the device: what another one would have needed."""
        return {
            name: planned_bytes(
                self._units, self._counting, self._window, Tier.DEVICE, plan.for_world(self._group.size)
            )
            for name, plan in every_stage(self.settings).items()
        }

    def planned_crossing(self) -> Crossing:
        """Bytes that cross between tiers in one step, on one rank: what `ledger` counts."""
        shapes = [run.shape for unit in self._units for run in unit.runs]
        return count_crossing(shapes, self._counting, self.batch.accumulation, device_casts=self.device.type == "cuda")

    def held_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """What is really allocated, counted from the tensors."""
        return held_bytes(self._units, self._pool, self.optimizer, tier)

    def describe(self) -> str:
        """The plan in words: what is replicated, what is sharded, bytes per rank, tier and step."""
        sizes = {tier: self.planned_bytes(tier) for tier in Tier}
        crossing = self.planned_crossing()
        return describe(self._units, self.plan, sizes, crossing, self.batch, self.optimizer, self._collective_name)
