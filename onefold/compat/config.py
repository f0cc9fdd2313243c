"""`DeepSpeedConfig`: a config that others build and read, over onefold's own reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from onefold.compat import groups
from onefold.compat.comm import get_world_rank_from_launcher
from onefold.compat.config_models import get_zero_config
from onefold.compat.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from onefold.compat.rank_logging import warning_once
from onefold.config import ConfigError as DeepSpeedConfigError
from onefold.config import load_config, solve_batch
from onefold.plan import Monitoring

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER, LION_OPTIMIZER = "adam", "adamw", "adagrad", "lion"
LAMB_OPTIMIZER, MUON_OPTIMIZER = "lamb", "muon"
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]

__all__ = ["DEEPSPEED_OPTIMIZERS", "DeepSpeedConfig", "DeepSpeedConfigError"]


def get_gradient_clipping(param_dict: dict[str, Any]) -> float:
    return float(param_dict.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT))


# Keys that this object has under their own name.
_PLAIN = (
    "communication_data_type", "dataloader_drop_last", "disable_allgather", "dump_state", "gradient_allreduce_op",
    "gradient_clipping", "gradient_predivide_factor", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "prescale_gradients", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip


def read_config(source: Any) -> Any:
    """Read a config as DeepSpeed does: a top-level key that resembles no known key is a warning, once.

    Sequences are divided if `groups.mpu` was set.
    """
    config = load_config(source, lists_unknown=True)
    rank = dist.get_rank() if dist.is_initialized() else get_world_rank_from_launcher()
    for name in config.unknown if rank == 0 else ():
        warning_once(
            "config: the unknown top-level key %r has no effect. Delete it, or begin its name "
            "with an underscore to mark a comment",
            name,
        )
    size = groups._get_sequence_parallel_world_size()
    return replace(config, sequence_parallel_size=size) if config.sequence_parallel_size == 1 else config


class DeepSpeedConfig:
    """A config, read and checked: every key with its value or default, and the batch sizes solved."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise DeepSpeedConfigError("mpu and mesh_device need model parallelism. Leave them out.")
        self.settings = settings = load_config(read_config(config))  # a Config passes through, with its type
        self._param_dict: dict[str, Any] = settings.raw
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        # Without a process group, the batch is that of the smallest job: one sequence at a time.
        self.world_size = dist.get_world_size() if dist.is_initialized() else settings.sequence_parallel_size
        self.train_batch_size = settings.train_batch_size
        self.train_micro_batch_size_per_gpu = settings.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = settings.gradient_accumulation_steps
        self._configure_train_batch_size()
        for name in _PLAIN:
            setattr(self, name, getattr(settings, name))
        self.zero_config = get_zero_config(settings.raw)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = bool(settings.zero_optimization.stage)
        self.float16_config, self.bfloat16_config = settings.fp16, settings.bf16
        self.optimizer_name = settings.optimizer.type if settings.optimizer else None
        if self.optimizer_name and self.optimizer_name.lower() in DEEPSPEED_OPTIMIZERS:
            self.optimizer_name = self.optimizer_name.lower()
        self.optimizer_params = dict(settings.optimizer.params) if settings.optimizer else None
        self.scheduler_name = settings.scheduler.type if settings.scheduler else None
        self.scheduler_params = dict(settings.scheduler.params) if settings.scheduler else None
        self.activation_checkpointing_config = settings.activation_checkpointing
        self.checkpoint_config, self.aio_config = settings.checkpoint, settings.aio
        self.comms_config = settings.comms_logger
        self.monitor_config = Monitoring(settings.tensorboard, settings.csv_monitor, settings.wandb, settings.comet)
        self.grad_accum_dtype = settings.data_types.grad_accum_dtype
        self.param_dtype, self.buffer_dtype = settings.data_types.param_dtype, settings.data_types.buffer_dtype
        self.elasticity_enabled = settings.elasticity.enabled
        self.torch_autocast_enabled = settings.torch_autocast.enabled

    def _configure_train_batch_size(self) -> None:
        """Fill in what the three batch keys leave out."""
        given = replace(
            self.settings,
            train_batch_size=self.train_batch_size,
            train_micro_batch_size_per_gpu=self.train_micro_batch_size_per_gpu,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )
        batch = solve_batch(given, self.world_size)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    def print_user_config(self) -> None:
        import json

        print(json.dumps(self._param_dict, indent=4, default=str))

    def print(self, name: str) -> None:
        print(f"{name}:")
        for key, value in sorted(vars(self).items()):
            print(f"  {key} {'.' * (29 - len(key))} {value}")
