"""The section `zero_optimization` and the sections inside it."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from onefold.config.keys import key, noticed, refused, section

Device = Literal["none", "cpu", "nvme"]

_stage3 = partial(key, from_stage=3)
_offloaded = partial(key, switch="device")
_on_nvme = partial(key, switch="device", needs="nvme")


def _renamed(default: Any, doc: str, *old_names: str, **options: Any) -> Any:
    """Declare a stage 3 key that also has old names without `stage3_`. A file may use only one of the names."""
    return key(default, doc, aliases=old_names, one_spelling=True, **options)


_limit = partial(_renamed, from_stage=3, minimum=0, fraction=True)


_NVME_PATH = (
    "Folder on the NVMe drive, or a list of folders on several drives, which are used in proportion to their measured "
    "rates. Required if `device` is nvme, otherwise ignored. `~` and environment variables (`$SCRATCH/swap`) are "
    "expanded. A variable that is not set is an error."
)
_BUFFER_SIZE = "Elements per buffer. Longer shards are streamed through the buffers."
_ONE_REDUCTION = "all stages use the same reduction"
_ONE_GATHER = "a unit is gathered by one collective already"


@dataclass(frozen=True)
class OffloadParam:
    """Offload of the parameter shards."""

    device: Device = _stage3("none", "Device on which parameter shards are stored.")
    nvme_path: tuple[str, ...] = _stage3((), _NVME_PATH, or_one=True)
    buffer_count: int = _on_nvme(5, "Number of staging buffers between NVMe and host memory.", from_stage=3, minimum=1)
    buffer_size: int = _on_nvme(100_000_000, _BUFFER_SIZE, from_stage=3, minimum=1)
    max_in_cpu: int = _on_nvme(1_000_000_000, "Number of elements kept in host memory.", from_stage=3, minimum=0)
    pin_memory: bool = _offloaded(True, "Keep the host copy in page-locked memory.", from_stage=3)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Offload of the master weights and the optimizer states."""

    device: Device = key("none", "Device on which master weights and optimizer states are stored. Stages 1, 2 and 3.")
    nvme_path: tuple[str, ...] = key((), _NVME_PATH, or_one=True)
    buffer_count: int = _on_nvme(
        4, "Number of page-locked buffers. Reading, updating and writing overlap fully from 3 on.", minimum=1
    )
    buffer_size: int = _on_nvme(8_000_000, _BUFFER_SIZE, minimum=1)
    pin_memory: bool = _offloaded(True, "Keep the host copy in page-locked memory.")
    pipeline_read: bool | None = _on_nvme(None, "Read the next states during an update. On unless set to false.")
    pipeline_write: bool | None = _on_nvme(None, "Write updated states during the next update. On unless set to false.")
    fast_init: bool = noticed(
        False, "Initialize states on NVMe faster.", "states start as empty files, which is already fast"
    )
    ratio: float | None = _offloaded(
        1.0,
        "Fraction of the trained parameters whose states are offloaded. The states of the first units stay on the "
        "device. `auto`: the smallest fraction that fits `onefold.device_memory`.",
        minimum=0,
        maximum=1,
        auto=True,
    )
    super_offload: bool = noticed(
        False, "Use SuperOffload, for superchips.", "transfers and the host step always overlap"
    )
    cpuadam_cores_perc: float = noticed(
        0.8, "Fraction of the cores for the optimizer.", "the host step uses torch's threads"
    )
    max_in_cpu: int = _on_nvme(0, "Number of elements whose states are kept in host memory.", minimum=0)


@dataclass(frozen=True)
class ZenFlow:
    """DeepSpeed's asynchronous offload."""

    topk_ratio: float = key(0.1, "Fraction of important gradients that stay on the device.")
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "Unit of `select_interval`.")
    select_interval: int | None = key(None, "Interval between two selections of important gradients.")
    update_interval: int | None = key(None, "Steps between two host updates.")
    overlap_step: bool = key(False, "Overlap the host update with the next steps.")
    offload: bool = key(False, "Also offload the states of important gradients.")
    auto_ratio: float = key(0.99, "Threshold for automatic updates.")
    full_warm_up_rounds: int = key(0, "Number of initial rounds with all gradients.")
    steps_per_epoch: int | None = key(None, "Steps per epoch.")
    pt_reserved_cores_perc: float = key(0.5, "Fraction of the cores reserved for torch.")


@dataclass(frozen=True)
class LoCo:
    """Error feedback for quantized gradients, with one byte per parameter."""

    err_beta: float = key(0.8, "Decay of the error buffer.", minimum=0, maximum=1)
    reset_T: int = key(1024, "Number of steps between two resets of the error buffer.", minimum=1)


@dataclass(frozen=True)
class LeafModule:
    """Modules that are not divided into smaller units."""

    classes: tuple[str, ...] = _stage3((), "Class names of the modules.", or_one=True)
    names: tuple[str, ...] = _stage3((), "Names of the modules.", or_one=True)
    name_suffixes: tuple[str, ...] = _stage3((), "Suffixes of the names of the modules.", or_one=True)


@dataclass(frozen=True)
class ZeroOptimization:
    """Sharding, offload and communication of the model states."""

    stage: int = key(
        0,
        "Sharded states. 0: none; 1: optimizer states; 2: optimizer states and gradients; 3: optimizer states, "
        "gradients and parameters. `true` is an old spelling of 1.",
        minimum=0,
        maximum=3,
        flag=True,
    )
    overlap_comm: bool | None = key(None, "Overlap communication with computation. The default depends on the stage.")
    reduce_bucket_size: int = key(
        500_000_000,
        "Maximum number of gradient elements in flight, and maximum size of a bucket of small reductions.",
        aliases=("allreduce_bucket_size",),
        minimum=1,
        fraction=True,
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "Maximum number of elements in flight, and maximum size of a bucket of small all-gathers.",
        from_stage=1,
        minimum=0,
        fraction=True,
    )
    contiguous_gradients: bool = noticed(
        True, "Store gradients contiguously.", "gradients are always stored in flat buffers"
    )
    reduce_scatter: bool = noticed(True, "Use reduce-scatter instead of all-reduce.", _ONE_REDUCTION)
    use_multi_rank_bucket_allreduce: bool = noticed(
        True, "Group the reductions of several ranks in stages 1 and 2.", _ONE_REDUCTION
    )
    allgather_partitions: bool = noticed(
        True, "Use all-gather instead of broadcast.", "updated shards are always gathered"
    )
    load_from_fp32_weights: bool = noticed(
        True, "Load master weights from checkpoints.", "master weights are always restored exactly"
    )
    elastic_checkpoint: bool = noticed(
        False,
        "Save checkpoints that load on a different number of ranks.",
        "checkpoints never depend on the number of ranks",
    )
    ignore_unused_parameters: bool = noticed(
        True, "Accept parameters without a gradient.", "a parameter without a gradient always counts as zero"
    )
    legacy_stage1: bool = refused(
        False,
        "Use DeepSpeed's first implementation of stage 1.",
        "it was removed from DeepSpeed too; use stage 1 and leave this out",
    )
    round_robin_gradients: bool = noticed(False, "Distribute gradients over ranks.", "shards are equal by construction")
    grad_hooks: bool = noticed(
        True, "Start reductions from gradient hooks.", "reductions always start from gradient hooks"
    )
    offload_param: OffloadParam = section(OffloadParam)
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer)
    cpu_offload: bool = key(
        False, "Offload master weights and optimizer states to the host.", same_as="offload_optimizer.device"
    )
    cpu_offload_param: bool = key(
        False, "Offload parameters to the host.", aliases=("cpu_offload_params",), same_as="offload_param.device"
    )
    cpu_offload_use_pin_memory: bool | None = key(
        None, "Offload to page-locked memory.", same_as="offload_optimizer.pin_memory"
    )
    zenflow: ZenFlow | None = refused(
        None, "DeepSpeed's asynchronous offload.", "asynchronous offload is outside onefold's scope; leave it out"
    )
    sub_group_size: int = noticed(
        1_000_000_000, "Elements per optimizer step.", "the step runs unit by unit", minimum=0
    )
    stage3_prefetch_bucket_size: int = _limit(
        50_000_000, "Maximum number of elements that are prefetched.", "prefetch_bucket_size"
    )
    stage3_param_persistence_threshold: int = _limit(
        100_000, "Maximum number of elements of a parameter that stays unsharded.", "param_persistence_threshold"
    )
    stage3_model_persistence_threshold: int = _limit(
        sys.maxsize, "Maximum total number of elements that stay unsharded.", "model_persistence_threshold"
    )
    stage3_max_live_parameters: int = _limit(
        1_000_000_000, "Maximum number of elements that are unsharded at a time.", "max_live_parameters"
    )
    stage3_max_reuse_distance: int = _limit(
        1_000_000_000,
        "Keep a unit unsharded if it is used again within this number of elements.",
        "max_reuse_distance",
    )
    stage3_gather_16bit_weights_on_model_save: bool = _renamed(
        False,
        "Gather whole weights when the model is saved. Accelerate and Trainer require it.",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        from_stage=3,
    )
    stage3_module_granularity_threshold: int = _renamed(
        0,
        "Select leaf modules by size.",
        "module_granularity_threshold",
        notice="units are never smaller than a block",
        minimum=0,
    )
    stage3_use_all_reduce_for_fetch_params: bool = _renamed(
        False, "Gather parameters by all-reduce.", "use_all_reduce_for_fetch_params", notice=_ONE_GATHER
    )
    stage3_allgather_sequential: bool = _renamed(
        False, "Gather one parameter at a time.", "allgather_sequential", notice=_ONE_GATHER
    )
    zero_hpz_partition_size: int = _stage3(
        1,
        "Number of ranks in a node that share a secondary copy of the weights for backward (hpZ). 0 and 1: none.",
        minimum=0,
        requested_if=lambda value: value > 1,
    )
    zero_quantized_weights: bool = _stage3(False, "Gather parameters as int8 (qwZ).")
    zero_quantized_nontrainable_weights: bool = _stage3(False, "Gather frozen parameters as int8.")
    zero_quantized_gradients: bool = key(False, "Reduce gradients as int8 inside a node and int4 across nodes (qgZ).")
    zeropp_loco_param: LoCo | None = key(
        None, "Error feedback (LoCo), with one byte per parameter.", switch="zero_quantized_gradients"
    )
    mics_shard_size: int = _stage3(
        -1,
        "Number of consecutive ranks over which the model states are sharded (MiCS). -1: all ranks.",
        minimum=-1,
        requested_if=lambda value: value > 0,
        requested_text="above 0",
    )
    mics_hierarchical_params_gather: bool = noticed(
        False, "Gather in two hops (MiCS).", "each rank receives all slices directly"
    )
    memory_efficient_linear: bool = noticed(
        True, "Replace `torch.nn.functional.linear`.", "torch's linear saves no copy of a weight"
    )
    pipeline_loading_checkpoint: bool = noticed(
        False, "Overlap the phases of loading a checkpoint.", "each rank reads only its own part"
    )
    override_module_apply: bool = noticed(
        True, "Patch `Module.apply` in `Init`.", "onefold does not patch torch classes"
    )
    log_trace_cache_warnings: bool = noticed(
        False, "Warn if the order of modules changes.", "the ranks agree on the order; it is not traced"
    )
    enable_sanity_checks: bool = noticed(False, "Check for inconsistent ranks.", "these checks always run")
    save_muon_momentum_buffer_in_memory: bool = noticed(
        False, "Keep Muon's momentum in memory.", "it is sharded, and stored on the device of offload_optimizer"
    )
    compute_grad_norm: bool = noticed(
        True, "Compute the norm of the gradient.", "the pass that looks for infinite gradients also computes the norm"
    )
    parameter_alignment: bool = noticed(
        False, "Align parameters to 16 bytes.", "flat parameters are aligned by construction"
    )
    leaf_module: LeafModule = section(LeafModule)
