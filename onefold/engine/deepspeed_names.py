"""What an engine answers and writes under DeepSpeed's names. Each function is a method of `Engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from onefold.checkpoint.state.weights import consolidate, save_weights
from onefold.loader import ResumableLoader

if TYPE_CHECKING:
    from onefold.engine.core import Engine


def module_state_dict(self: Engine, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
    """The model's unsharded state dict. All ranks call this together. Where parameters are sharded it is gathered unit
    by unit into host memory of rank 0; other ranks get an empty dict.
    """
    self.state.flush()
    if self.state.schedule.sharded:
        return consolidate(self.module, exclude_frozen=exclude_frozen_parameters) or {}
    kept = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    found = self.module.state_dict()
    return {n: tensor for n, tensor in found.items() if not (exclude_frozen_parameters and n in kept)}


def load_module_state_dict(self: Engine, state_dict: dict[str, Any], strict: bool = True) -> None:
    """`load_state_dict` on the model: every rank passes the same unsharded weights."""
    self.module.load_state_dict(state_dict, strict=strict)


def save_16bit_model(
    self: Engine,
    save_dir: str,
    save_filename: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,
    max_shard_size: int | str = "5GB",
) -> bool:
    """Write the unsharded weights, as they compute, for `from_pretrained`: safetensors, unless the file name ends
    otherwise (`pytorch_model.bin` is pickled by torch). All ranks call this together.
    """
    self.state.check_present()
    self.state.flush()
    save_weights(
        self.module,
        save_dir,
        file_name=save_filename,
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )
    return True


def consolidated_16bit_state_dict(
    self: Engine, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor] | None:
    """What accelerate calls: the unsharded state dict on rank 0, None elsewhere."""
    self.state.flush()
    return consolidate(self.module, exclude_frozen=exclude_frozen_parameters)


def deepspeed_io(
    self: Engine,
    dataset: Dataset[Any],
    batch_size: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    num_local_io_workers: int = 0,
) -> DataLoader[Any]:
    """A loader of micro-batches over this rank's share of a dataset."""
    return ResumableLoader(
        dataset,
        self.state.group,
        batch_size=batch_size or self.batch.micro,
        collate_fn=collate_fn,
        drop_last=self.plan.loop.drops_last_batch,
        num_workers=num_local_io_workers,
        pin_memory=self.device.type == "cuda",
    )


def train_batch_size(self: Engine) -> int:
    return self.batch.train


def train_micro_batch_size_per_gpu(self: Engine) -> int:
    return self.batch.micro


def gradient_accumulation_steps(self: Engine) -> int:
    return self.batch.accumulation


def get_batch_info(self: Engine) -> tuple[int, int, int]:
    return self.batch.train, self.batch.micro, self.batch.accumulation


def set_train_batch_size(self: Engine, train_batch_size: int) -> None:
    """Change the accumulation count so that a step takes this many samples."""
    self.state.window.set_train(train_batch_size)


def set_train_micro_batch_size(self: Engine, micro_batch_size: int) -> None:
    """Change the samples of one forward, and with it those of a step."""
    self.state.window.set_micro(micro_batch_size)


def set_gradient_accumulation_steps(self: Engine, accumulation: int) -> None:
    """Change the micro-steps of a step, and with it its samples."""
    self.state.window.set_accumulation(accumulation)


def data_parallel_group(self: Engine) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def get_data_parallel_rank(self: Engine) -> int:
    return self.state.group.rank


def was_step_applied(self: Engine) -> bool:
    """Whether the last boundary updated the weights (an overflow skips it)."""
    return self.state.decision.applied


def get_global_grad_norm(self: Engine) -> float | None:
    """The norm of the last step's averaged gradient before clipping; None before the first step."""
    return self.state.decision.norm


def get_lr(self: Engine) -> list[float]:
    return [float(group["lr"]) for group in _groups(self)]


def get_mom(self: Engine) -> list[Any]:
    return [group["betas"] if "betas" in group else group.get("momentum") for group in _groups(self)]


def _groups(self: Engine) -> list[dict[str, Any]]:
    return self.optimizer.param_groups if self.optimizer is not None else []


def gradient_clipping(self: Engine) -> float:
    return self.plan.scaling.clipping


def zero_optimization_stage(self: Engine) -> int:
    return self.plan.stage


def zero_optimization_partition_weights(self: Engine) -> bool:
    return self.plan.shards_parameters


def zero_gather_16bit_weights_on_model_save(self: Engine) -> bool:
    """What accelerate asks before it collects a state dict."""
    return self.plan.loop.gathers_weights_on_save


def loss_scale(self: Engine) -> float:
    """The loss scale in force."""
    return self.state.decision.loss_scale.value


def communication_data_type(self: Engine) -> torch.dtype:
    return self.plan.precision.of_wire(self.plan.precision.compute or torch.float32)


def get_data_types(self: Engine) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the model, dtype in which gradients accumulate)."""
    return self.plan.precision.compute or torch.float32, self.plan.precision.accumulate
