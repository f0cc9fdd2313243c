"""The getters of DeepSpeed's engine that onefold's engine does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from onefold.checkpoint.state.weights import consolidate
from onefold.engine import Engine


class EngineGetters(Engine):
    """An engine with DeepSpeed's names for batch sizes, ranks, precision and weights."""

    # -- weights and data ---------------------------------------------------------------------------------------

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Call `load_state_dict` on the model. All ranks pass the same unsharded weights."""
        self.module.load_state_dict(state_dict, strict=strict)

    save_fp16_model = Engine.save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the unsharded state dict on rank 0 and None elsewhere, for accelerate."""
        self.state.flush()
        return consolidate(self.module, exclude_frozen=exclude_frozen_parameters)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches over this rank's share of a dataset."""
        return self.state.make_loader(dataset, batch_size, collate_fn, num_local_io_workers)

    # -- batch sizes --------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the start of the job."""
        return self.state.window.micro_steps

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.batch.train, self.batch.micro, self.batch.accumulation

    # -- ranks --------------------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        return self.batch.world

    @property
    def seq_dp_group(self) -> dist.ProcessGroup:
        return self.data_parallel_group

    @property
    def seq_parallel_group(self) -> Any:
        group = self.sequence_parallel.ranks.group
        return group.process_group if group is not None else None

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return self.state.group.rank

    # -- optimizer and precision --------------------------------------------------------------------------------

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def loss_scale(self) -> float:
        """Return the loss scale in force."""
        return self.state.decision.loss_scale.value

    def zero_optimization_stage(self) -> int:
        return self.plan.stage

    def zero_optimization_partition_weights(self) -> bool:
        return self.plan.shards_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return what accelerate reads before it collects a state dict."""
        return self.plan.loop.gathers_weights_on_save

    @property
    def communication_data_type(self) -> torch.dtype:
        return self.plan.precision.of_wire(self.plan.precision.compute or torch.float32)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the model and the dtype in which gradients accumulate."""
        return self.plan.precision.compute or torch.float32, self.plan.precision.accumulate
