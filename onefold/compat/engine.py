"""`DeepSpeedEngine`: onefold's engine with all getters of DeepSpeed's, and `deepspeed.initialize`."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from onefold import start
from onefold.checkpoint.format.folder import SCRIPT, SCRIPT_NAME
from onefold.checkpoint.saving.rank_shard_writer import SaveError
from onefold.compat import groups
from onefold.compat.config import DeepSpeedConfig, read_config
from onefold.compat.config_models import ZeroStageEnum
from onefold.compat.engine_getters import EngineGetters
from onefold.compat.not_offered import NotOfferedError, explain
from onefold.compat.optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion
from onefold.compat.parameters import install
from onefold.compat.timer import ThroughputTimer
from onefold.compat.zero_optimizer import ZeROOptimizer
from onefold.config import Batch, ConfigError
from onefold.config.monitoring import ThroughputTimer as ThroughputSettings
from onefold.config.params import plain_name
from onefold.log import logger
from onefold.optim.choose import check_shardable
from onefold.optim.chosen import NOT_ELEMENTWISE, ChosenOptimizer
from onefold.plan import Plan

install()  # the ds_* attributes of parameters

DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = Callable[..., Any]

__all__ = ["DeepSpeedEngine", "initialize"]


class TagError(SaveError, AssertionError):
    """Ranks save under different tags, and `checkpoint.tag_validation` is "Fail"."""


class DeepSpeedEngine(EngineGetters):
    """The engine that `deepspeed.initialize` returns."""

    _optimizer_type = ZeROOptimizer

    def __init__(
        self, model: nn.Module, plan: Plan, batch: Batch, chosen: ChosenOptimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        _check_as_deepspeed(plan, chosen, DeepSpeedConfig(kwargs["config"]))
        super().__init__(model, plan, batch, chosen, *args, **kwargs)
        self.sequence_parallel.in_evaluation = not getattr(groups.mpu, "disable_in_eval", False)
        self._saver.pointer_files += self._checkpoint_file_names()
        # Lightning saves at the end of an epoch, also inside an accumulation window, and reads state dicts of sharded
        # modules whose values it drops.
        self._saver.refuses_open_window = False
        self._hooks.state_dicts_may_be_empty = True
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.step_of_engine = weakref.WeakMethod(self.step)
            self.optimizer.learn(self.state, self.offloaded_states, self._optimizer_class(self.optimizer))

    def _optimizer_class(self, optimizer: ZeROOptimizer) -> type[torch.optim.Optimizer]:
        """Return the class of the user's instance, or the class that DeepSpeed chooses by the section `optimizer`."""
        if optimizer.sharded.instance is not None:
            return type(optimizer.sharded.instance)
        on_host, decoupled = self.zero_use_cpu_optimizer(), optimizer.param_groups[0].get("decoupled_weight_decay")
        if (self._config.optimizer_params or {}).get("torch_adam"):
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        of_adam = DeepSpeedCPUAdam if on_host else FusedAdam
        kinds: dict[str, type[torch.optim.Optimizer]] = {
            "adam": of_adam,
            "adamw": of_adam,
            "adagrad": DeepSpeedCPUAdagrad if on_host else torch.optim.Adagrad,
            "lion": DeepSpeedCPULion if on_host else FusedLion,
            "muon": torch.optim.Muon,
            "sgd": torch.optim.SGD,
        }
        # Several instances have the class of the first. Rules without a class elsewhere have the base class.
        several = [type(instance) for instance in optimizer.sharded.instances]
        return several[0] if several else kinds.get(plain_name(optimizer.name), torch.optim.Optimizer)

    @cached_property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig(self.config)

    def _checkpoint_file_names(self) -> list[str]:
        """Return the names of DeepSpeed's files, whose existence transformers and others check."""
        ranks = range(self.state.group.size)
        optimizers = [self._optimizer_file(rank) for rank in ranks] if self.plan.shards_states else []
        return [*dict.fromkeys(self._model_file(rank) for rank in ranks), *optimizers]

    def _model_file(self, rank: int) -> str:
        place = f"zero_pp_rank_{rank}_mp_rank_00" if self.plan.shards_parameters else "mp_rank_00"
        return f"{place}_model_states.pt"

    def _optimizer_file(self, rank: int) -> str:
        prefix = "bf16_" if self.plan.precision.compute is torch.bfloat16 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Return the loss times the loss scale. `retain_graph` is ignored: pass it to `backward`."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise AssertionError("engine.scale expects a scalar loss. Reduce it, e.g. by loss.mean().")
        return super().scale(loss)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        try:
            return super().save_checkpoint(*args, **kwargs)
        except SaveError as error:
            if "checkpoint.tag_validation" in str(error):
                raise TagError(str(error)) from None
            raise

    def _get_ckpt_name(self, checkpoints_path: str, tag: str) -> str:
        """Return the path of this rank's model file. It refers to the manifest, which lists the tensors."""
        return os.path.join(checkpoints_path, str(tag), self._model_file(self.state.group.rank))

    def _get_zero_ckpt_name(self, checkpoints_path: str, tag: str) -> str:
        """Return the path of this rank's optimizer file. It refers to the manifest."""
        return os.path.join(checkpoints_path, str(tag), self._optimizer_file(self.state.group.rank))

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int) -> str:
        """Return the path of the optimizer file of expert-parallel layers. It is never written."""
        return os.path.join(checkpoints_path, str(tag), f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt")

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write the script that consolidates a checkpoint into fp32 weights, as `save_checkpoint` does."""
        place = os.path.join(save_path, SCRIPT_NAME)
        with open(place, "wb") as file:
            file.write(SCRIPT)
        self._change_recovery_script_permissions(place)

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make a script executable if the file system supports it."""
        try:
            os.chmod(dst, os.stat(dst).st_mode | stat.S_IEXEC)
        except OSError as error:
            logger.info("%s cannot be made executable: %s", dst, error)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules with sparse gradients: none, because `sparse_gradients` is refused."""
        return set()

    def get_type(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("type") for group in groups]

    def empty_partition_cache(self) -> None:
        """Reshard all units that are not in use."""
        self.state.schedule.wait_for_step()
        self.state.schedule.context.forget_cached()
        for unit in self.state.schedule.units:
            unit.reshard_unused()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.optimizer is None:
            raise Misuse("must provide optimizer during init in order to use backward")
        return super().backward(loss, *args, **kwargs)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if self.optimizer is None:
            raise Misuse("must provide optimizer during init in order to use step")
        if self.state.window.in_no_sync:
            raise Misuse("It is illegal to call Engine.step() inside no_sync context manager")
        ends_a_step = self.is_gradient_accumulation_boundary()
        super().step(lr_kwargs)
        self.tput_timer.stop(global_step=ends_a_step, report_speed=False)
        self.tput_timer.start()

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second from step to step, measured without waiting for the device."""
        return ThroughputTimer(ThroughputSettings(synchronized=False), self.train_batch_size())

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return milliseconds by phase since the last progress line; none without `wall_clock_breakdown`."""
        shown = self._timeline.totals.items() if self.wall_clock_breakdown() else ()  # type: ignore[attr-defined]
        return {_TIMERS.get(phase, phase): 1000 * seconds for phase, seconds in shown}

    def _report_progress(self, step: int) -> None:
        rates, skipped = self.get_lr(), self.skipped_steps
        if self.state.group.rank == 0:
            logger.info("step=%s, skipped=%s, lr=%s, mom=%s", step, skipped, rates, self.get_mom())

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the unsharded state dict on rank 0 and None elsewhere. All ranks call this together."""
        if not self.plan.shards_parameters:
            raise ValueError(
                f"_consolidated_16bit_state_dict is for sharded parameters, but stage {self.plan.stage} shards none. "
                "Call engine.module_state_dict() instead."
            )
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run backwards that no step follows. As in DeepSpeed, raise if gradients are sharded."""
        stage = self.zero_optimization_stage()
        if stage >= ZeroStageEnum.gradients:
            raise Misuse(
                f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}. "
                "Leave it out: gradients are accumulated until engine.step()."
            )
        if self.state.window.in_no_sync:
            raise Misuse("no_sync context manager reentry is unsupported")
        with super().no_sync():
            yield

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context for several backwards before a step. Their gradients are reduced one by one."""
        return super().no_sync()

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    def is_first_weights_partition_group(self) -> bool:
        return self.state.group.rank < self.plan.num_shards

    def zero_use_cpu_optimizer(self) -> bool:
        return self._config.settings.zero_optimization.offload_optimizer.device != "none"

    zero_cpu_offload = zero_use_cpu_optimizer

    def zero_offload_optimizer(self) -> Any:
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.zero_config.offload_param

    def zero_optimization(self) -> bool:
        return self._config.zero_enabled

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self._config.zero_config.stage >= ZeroStageEnum.gradients)

    def postscale_gradients(self) -> bool:
        return not self._config.settings.prescale_gradients

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self._config.settings.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> int:
        return int(2**self._config.settings.fp16.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        fp16 = self._config.settings.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.settings.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.settings.checkpoint.tag_validation == "Fail"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._config.settings.zero_optimization.offload_optimizer.device == "nvme"

    def zero_compute_grad_norm(self) -> bool:
        return True

    def _not_asked_for(self) -> bool:
        """Return False, because `initialize` refuses configs that ask for it."""
        return False

    data_efficiency_enabled = data_sampling_enabled = curriculum_learning_enabled = random_ltd_enabled = _not_asked_for
    compile_autosp = compile_autotp = is_deepcompile_active = _not_asked_for

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        return 0

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing, because gradients are reduced during backward."""

    def collect_python_gc(self) -> None:
        import gc

        gc.collect()


class Misuse(RuntimeError, AssertionError):
    """A call in the wrong place, for which DeepSpeed raises AssertionError."""


class UnsupportedMix(ConfigError, NotImplementedError):
    """Dtypes that DeepSpeed does not combine."""


def _check_as_deepspeed(plan: Plan, chosen: ChosenOptimizer | None, config: DeepSpeedConfig) -> None:
    """Raise for configs that DeepSpeed refuses, though onefold supports them."""
    if plan.loop.peer_copies.every is not None:
        raise UnsupportedMix(
            "onefold.peer_copies is not supported behind DeepSpeed's names: Trainer, accelerate and Lightning resume "
            "from the step count of their own files, which copies do not have. Leave the key out, or call "
            "onefold.initialize."
        )
    if chosen is None:
        return
    settings = config.settings
    if plan.shards_states and not chosen.elementwise and chosen.name.lower() not in NOT_ELEMENTWISE:
        check_shardable(chosen, allow_untested=plan.allows_untested_optimizer)
    accumulate = settings.data_types.grad_accum_dtype
    compute = "bf16" if settings.bf16.enabled else "fp16" if settings.fp16.enabled else "fp32"
    if not plan.shards_states and accumulate not in (None, compute):
        raise UnsupportedMix(
            f"data_types.grad_accum_dtype = {accumulate!r} with {compute} is supported in stages 1 to 3 only, as in "
            "DeepSpeed. Leave it out (gradients are accumulated in fp32), or choose another stage."
        )


# Phases of a step under the names of DeepSpeed's timers.
_TIMERS = {"forward": "fwd", "backward": "bwd"}


def _getter(path: str) -> Callable[[DeepSpeedEngine], Any]:
    read = attrgetter(path)
    return lambda self: read(self._config.settings)


# Keys at the top of a config, in `flops_profiler` and in `zero_optimization` whose getter has their name, with the
# section's name in front.
_TOP = """
    dataloader_drop_last dump_state gradient_predivide_factor log_level managed_gradient_accumulation memory_breakdown
    steps_per_print wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
"""
_FLOPS_PROFILER = "detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules"
_ZERO = """
    allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint ignore_unused_parameters
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings reduce_bucket_size reduce_scatter
    round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
"""


# Getters that return a key of the config.
_KEYS = {
    **{key: key for key in _TOP.split()},
    **{f"flops_profiler_{key}": f"flops_profiler.{key}" for key in _FLOPS_PROFILER.split()},
    **{
        f"zero_{key.removeprefix('zero_').removeprefix('stage3_')}": f"zero_optimization.{key}" for key in _ZERO.split()
    },
    "aio_config": "aio",
    "autotuning_enabled": "autotuning.enabled",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "cpuadam_cores_perc": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "is_deepcompile_enabled": "compile.deepcompile",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "swap_tensor_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "zenflow_config": "zero_optimization.zenflow",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
}
for _name, _path in _KEYS.items():
    setattr(DeepSpeedEngine, _name, _getter(_path))
for _name in ("gradient_clipping", "optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params"):
    setattr(DeepSpeedEngine, _name, lambda self, _name=_name: getattr(self._config, _name))
# Methods that tools patch, for features that are not offered.
_EXPERTS = "files of experts (engine.save_checkpoint and load_checkpoint include experts)"
_NOT_OFFERED = {
    "_broadcast_model": "a broadcast of its own (`initialize` broadcasts the weights of rank 0)",
    "_save_moe_checkpoint": _EXPERTS,
    "clip_fp32_gradients": "clipping by itself (engine.step() clips by the key gradient_clipping)",
    "load_moe_state_dict": _EXPERTS,
    "print_forward_breakdown": "times of the parts of `MoE`",
}


def _refusal(name: str, what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotOfferedError(explain(f"engine.{name}", what))

    return refuse


for _name, _what in _NOT_OFFERED.items():
    setattr(DeepSpeedEngine, _name, _refusal(_name, _what))
DeepSpeedEngine.zero_overlap_comm = lambda self: self._config.zero_config.overlap_comm  # type: ignore[attr-defined]


initialize = partial(start.initialize, engine_class=DeepSpeedEngine, read_config=read_config)
