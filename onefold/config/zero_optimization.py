"""The section `zero_optimization` and the sections inside it."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule wants.

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from onefold.config.keys import key, noticed, refused, section

Device = Literal["none", "cpu", "nvme"]

_stage3 = partial(key, from_stage=3)
_offloaded = partial(key, switch="device")
_on_nvme = partial(key, switch="device", needs="nvme")


def _renamed(default: Any, doc: str, *old_names: str, **rest: Any) -> Any:
    """A key of stage 3 that has an older name, without `stage3_`. Only one of the names may be in a file."""
    return key(default, doc, aliases=old_names, one_spelling=True, **rest)


_limit = partial(_renamed, from_stage=3, minimum=0, fraction=True)


_NVME_PATH = (
    "Folder on the NVMe drive, or a list of folders on several; required when `device` is nvme, read only then. `~` "
    "and variables of the environment (`$SCRATCH/swap`) are filled in; one that is not set is an error."
)
_BUFFER_SIZE = "Elements of one buffer; a longer shard is streamed through it."
_ONE_REDUCTION = "one and the same reduction serves every stage"
_ONE_GATHER = "a unit is gathered by one collective already"


@dataclass(frozen=True)
class OffloadParam:
    """Where the parameter shards rest between uses."""

    device: Device = _stage3("none", "Where parameter shards rest.")
    nvme_path: tuple[str, ...] = _stage3((), _NVME_PATH, or_one=True)
    buffer_count: int = _on_nvme(5, "Staging buffers between NVMe and host.", from_stage=3, minimum=1)
    buffer_size: int = _on_nvme(100_000_000, _BUFFER_SIZE, from_stage=3, minimum=1)
    max_in_cpu: int = _on_nvme(1_000_000_000, "Elements kept in host memory.", from_stage=3, minimum=0)
    pin_memory: bool = _offloaded(True, "Keep the host copy in page-locked memory.", from_stage=3)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Where masters and optimizer states rest, and hence where the step runs."""

    device: Device = key("none", "Where masters and optimizer states rest; stages 1, 2 and 3.")
    nvme_path: tuple[str, ...] = key((), _NVME_PATH, or_one=True)
    buffer_count: int = _on_nvme(4, "Page-locked buffers: read, update, write; fewer than 3 overlap less.", minimum=1)
    buffer_size: int = _on_nvme(8_000_000, _BUFFER_SIZE, minimum=1)
    pin_memory: bool = _offloaded(True, "Keep the host copy in page-locked memory.")
    pipeline_read: bool | None = _on_nvme(None, "Read the next states during the step; on unless it says false.")
    pipeline_write: bool | None = _on_nvme(None, "Write the last states during the step; on unless it says false.")
    fast_init: bool = noticed(False, "Fast start on NVMe.", "states start as empty files, which is already fast")
    ratio: float | None = _offloaded(
        1.0,
        "Share of the trained parameters whose states are offloaded; the first units stay on the device. `auto`: as "
        "little as fits `onefold.device_memory`.",
        minimum=0,
        maximum=1,
        auto=True,
    )
    super_offload: bool = noticed(False, "For tightly coupled hosts.", "transfers and the host step always overlap")
    cpuadam_cores_perc: float = noticed(0.8, "DeepSpeed's share of cores.", "the host step uses torch's own threads")
    max_in_cpu: int = _on_nvme(0, "Elements whose states stay in host memory.", minimum=0)


@dataclass(frozen=True)
class ZenFlow:
    """DeepSpeed's asynchronous offload."""

    topk_ratio: float = key(0.1, "Share of important gradients that stay on the device.")
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "How often the important ones are chosen.")
    select_interval: int | None = key(None, "Steps between two choices.")
    update_interval: int | None = key(None, "Steps between two host updates.")
    overlap_step: bool = key(False, "Overlap the host update with the next steps.")
    offload: bool = key(False, "Offload the selected states too.")
    auto_ratio: float = key(0.99, "Threshold for automatic updates.")
    full_warm_up_rounds: int = key(0, "Rounds with every gradient, at the start.")
    steps_per_epoch: int | None = key(None, "Steps of an epoch.")
    pt_reserved_cores_perc: float = key(0.5, "Share of the cores kept for torch.")


@dataclass(frozen=True)
class LoCo:
    """Error feedback for quantized gradients (a byte a parameter)."""

    err_beta: float = key(0.8, "Decay of the error buffer.", minimum=0, maximum=1)
    reset_T: int = key(1024, "Steps between two resets of the error buffer.", minimum=1)


@dataclass(frozen=True)
class LeafModule:
    """Modules that are never cut into smaller units."""

    classes: tuple[str, ...] = _stage3((), "Class names.", or_one=True)
    names: tuple[str, ...] = _stage3((), "Module names.", or_one=True)
    name_suffixes: tuple[str, ...] = _stage3((), "Endings of module names.", or_one=True)


@dataclass(frozen=True)
class ZeroOptimization:
    """What is sharded, where it rests, and how it travels."""

    stage: int = key(
        0,
        "0: nothing is sharded; 1: optimizer states; 2: and gradients; 3: and parameters. `true` is an old 1.",
        minimum=0,
        maximum=3,
        flag=True,
    )
    overlap_comm: bool | None = key(None, "Communicate while computing. Left out: the plan decides by stage.")
    reduce_bucket_size: int = key(
        500_000_000,
        "Elements of gradient that may be in flight, and up to which small reductions are joined.",
        aliases=("allreduce_bucket_size",),
        minimum=1,
        fraction=True,
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "Elements that may be in flight, and up to which small gathers are joined.",
        from_stage=1,
        minimum=0,
        fraction=True,
    )
    contiguous_gradients: bool = noticed(True, "Contiguous gradients.", "gradients always lie in flat buffers")
    reduce_scatter: bool = noticed(True, "Reduce-scatter instead of all-reduce.", _ONE_REDUCTION)
    use_multi_rank_bucket_allreduce: bool = noticed(True, "How stages 1 and 2 group reductions.", _ONE_REDUCTION)
    allgather_partitions: bool = noticed(True, "All-gather, not broadcasts.", "updated shards are always gathered")
    load_from_fp32_weights: bool = noticed(True, "Load masters, not weights.", "masters are always restored exactly")
    elastic_checkpoint: bool = noticed(
        False, "Checkpoints for another number of ranks.", "checkpoints never depend on the number of ranks"
    )
    ignore_unused_parameters: bool = noticed(
        True, "Whether unused parameters are an error.", "a parameter without a gradient always counts as zero"
    )
    legacy_stage1: bool = refused(
        False, "DeepSpeed's first stage 1.", "it was removed from DeepSpeed too; use stage 1 and leave this out"
    )
    round_robin_gradients: bool = noticed(False, "Spread gradients over ranks.", "shards are equal by construction")
    grad_hooks: bool = noticed(True, "Reduce from gradient hooks.", "reductions always start from gradient hooks")
    offload_param: OffloadParam = section(OffloadParam)
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer)
    cpu_offload: bool = key(False, "Masters and states rest on the host.", same_as="offload_optimizer.device")
    cpu_offload_param: bool = key(
        False, "Parameters rest on the host.", aliases=("cpu_offload_params",), same_as="offload_param.device"
    )
    cpu_offload_use_pin_memory: bool | None = key(None, "Page-locked memory.", same_as="offload_optimizer.pin_memory")
    zenflow: ZenFlow | None = refused(
        None, "DeepSpeed's asynchronous offload.", "asynchronous offload is outside onefold's scope; leave it out"
    )
    sub_group_size: int = noticed(1_000_000_000, "Elements stepped together.", "the step goes unit by unit", minimum=0)
    stage3_prefetch_bucket_size: int = _limit(50_000_000, "Elements gathered ahead of use.", "prefetch_bucket_size")
    stage3_param_persistence_threshold: int = _limit(
        100_000, "Parameters of at most so many elements stay unsharded.", "param_persistence_threshold"
    )
    stage3_model_persistence_threshold: int = _limit(
        sys.maxsize, "Elements that may stay unsharded in all.", "model_persistence_threshold"
    )
    stage3_max_live_parameters: int = _limit(1_000_000_000, "Elements unsharded at one time.", "max_live_parameters")
    stage3_max_reuse_distance: int = _limit(
        1_000_000_000, "A unit that is used again within so many elements is not released.", "max_reuse_distance"
    )
    stage3_gather_16bit_weights_on_model_save: bool = _renamed(
        False,
        "Gather whole weights when the model is saved. Accelerate and Trainer ask for it.",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        from_stage=3,
    )
    stage3_module_granularity_threshold: int = _renamed(
        0,
        "Find leaf modules by size.",
        "module_granularity_threshold",
        notice="the cut into units never goes below a block",
        minimum=0,
    )
    stage3_use_all_reduce_for_fetch_params: bool = _renamed(
        False, "Gather by all-reduce.", "use_all_reduce_for_fetch_params", notice=_ONE_GATHER
    )
    stage3_allgather_sequential: bool = _renamed(
        False, "Gather one parameter at a time.", "allgather_sequential", notice=_ONE_GATHER
    )
    zero_hpz_partition_size: int = _stage3(
        1,
        "Ranks of a node that hold a secondary shard for backward (hpZ); 0 and 1: none.",
        minimum=0,
        asks=lambda value: value > 1,
    )
    zero_quantized_weights: bool = _stage3(False, "Gather parameters as int8 (qwZ).")
    zero_quantized_nontrainable_weights: bool = _stage3(False, "Gather frozen parameters as int8.")
    zero_quantized_gradients: bool = key(False, "Reduce gradients as int8 inside a node and int4 across nodes (qgZ).")
    zeropp_loco_param: LoCo | None = key(None, "Error feedback: a byte a parameter.", switch="zero_quantized_gradients")
    mics_shard_size: int = _stage3(
        -1,
        "Neighbouring ranks that hold one whole model state between them (MiCS); -1: all ranks.",
        minimum=-1,
        asks=lambda value: value > 0,
        asks_text="above 0",
    )
    mics_hierarchical_params_gather: bool = noticed(
        False, "Two-hop gathers (MiCS).", "slices go straight to each rank that gathers them"
    )
    memory_efficient_linear: bool = noticed(
        True, "Replace `torch.nn.functional.linear`.", "torch's own linear saves no copy of a weight"
    )
    pipeline_loading_checkpoint: bool = noticed(
        False, "Overlap reading and placing a checkpoint.", "each rank reads only its own part"
    )
    override_module_apply: bool = noticed(True, "Patch `Module.apply` in `Init`.", "no class of torch is ever patched")
    log_trace_cache_warnings: bool = noticed(
        False, "Warn when the order of modules changes.", "the order is agreed on by all ranks, not traced"
    )
    enable_sanity_checks: bool = noticed(False, "Compare the ranks.", "misuse raises without being asked to")
    save_muon_momentum_buffer_in_memory: bool = noticed(
        False, "Where Muon's momentum rests.", "it rests where offload_optimizer says, and is sharded"
    )
    compute_grad_norm: bool = noticed(
        True, "Compute the norm of the gradient.", "the pass that looks for infinite gradients also computes the norm"
    )
    parameter_alignment: bool = noticed(
        False, "Align parameters to 16 bytes.", "flat parameters are aligned by construction"
    )
    leaf_module: LeafModule = section(LeafModule)
