"""The other sections: training pieces, storage, observation, and what is outside onefold's scope."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule wants.

from dataclasses import dataclass
from typing import Any, Literal

from onefold.config.keys import key, section

_LATER = "comes with a later release"
_COUNTED = "every call and byte is always counted; read engine.ledger"
_MONITOR = "monitors are outside onefold's scope; log from your own loop and leave it out"


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer that the engine builds."""

    type: str = key("", "Adam, AdamW, SGD, Adagrad, Lion or any class of `torch.optim`. Required.")
    params: dict[str, Any] = key({}, "Handed to the optimizer; keys that are `auto` are dropped.")
    legacy_fusion: bool = key(
        False, "DeepSpeed's old fused optimizer.", notice="there is one optimizer step, over flat shards"
    )


@dataclass(frozen=True)
class SchedulerSection:
    """The learning-rate scheduler that the engine builds and steps."""

    type: str = key(
        "",
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or a `torch.optim.lr_scheduler`. Required.",
    )
    params: dict[str, Any] = key({}, "Handed to the scheduler; keys that are `auto` are dropped.")


@dataclass(frozen=True)
class OnefoldSection:
    """Keys of onefold's own; DeepSpeed does not know them."""

    collective: Literal["auto", "native", "exchange"] = key(
        "auto",
        "native: the backend's own collectives; exchange: pairwise, added in rank order in fp32; auto: exchange on "
        "gloo, native elsewhere.",
    )
    node_size: int | None = key(
        None, "Ranks of one host, neighbours in the order of ranks. Left out: what the launcher says.", minimum=1
    )
    units: tuple[str, ...] = key(
        (),
        "Module classes, module names or name patterns (`*`) that become units of the cut; empty: found by structure.",
    )
    device_memory: float | None = key(
        None,
        "GB (1e9 bytes) of device memory that model state may take; `ratio: auto` fills it first. Left out: what is "
        "free at the start, less a quarter for activations.",
        above=0,
    )
    host_memory: float | None = key(
        None,
        "GB of host memory that offloaded state may take, over all ranks of this host. Left out: what is available, "
        "less a tenth.",
        above=0,
    )
    honour_writes: bool = key(
        True,
        "Writes in place to unsharded parameters (`p.clamp_()`, `p.data.mul_()`) reach the fp32 master at the next "
        "step, which compares the two. false: they are lost where a master stands behind the parameter. The "
        "search reads two bytes more a parameter.",
    )
    nonfinite_gradients: Literal["auto", "raise", "skip", "ignore"] = key(
        "auto",
        "What a step does, on all ranks alike, when a gradient is infinite or NaN: raise (`FloatingPointError`, before "
        "any weight is changed, naming units and ranks), skip the step, or ignore it, as plain torch. auto: fp16 "
        "skips, bf16 does what `check_grad_overflow` says, everything else raises.",
    )
    delayed_host_step: bool = key(
        False,
        "Let the host step run beside the next forward and backward, which then use weights one step old. Inexact: "
        "it changes the training.",
    )


@dataclass(frozen=True)
class Aio:
    """How NVMe is read and written."""

    block_size: int = key(1_048_576, "Bytes of one request.", minimum=1)
    queue_depth: int = key(8, "Requests in flight.", minimum=1)
    intra_op_parallelism: int = key(
        1, "`queue_depth` requests for each of so many threads.", aliases=("thread_count",), minimum=1
    )
    single_submit: bool = key(False, "One request at a time in each transfer.")
    overlap_events: bool = key(True, "false: each transfer is finished where it is started.")
    use_gds: bool = key(False, "GPU-direct storage.", notice="transfers go through page-locked host memory")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """What `onefold.checkpointing.checkpoint` does with the inputs of the functions that it computes again."""

    partition_activations: bool = key(
        False,
        "Shard inputs over the model-parallel group.",
        notice="there is no model-parallel group, so every rank keeps its inputs whole",
    )
    number_checkpoints: int | None = key(
        None, "Checkpointed calls in one forward.", switch="contiguous_memory_optimization", minimum=1
    )
    contiguous_memory_optimization: bool = key(
        False, "Keep inputs in one buffer of `number_checkpoints` slots, which is then required."
    )
    cpu_checkpointing: bool = key(False, "Keep inputs in host memory.")
    synchronize_checkpoint_boundary: bool = key(False, "Wait for the device before and after each call.")
    profile: bool = key(False, "Time each call and each recomputation; waits for the device.")


@dataclass(frozen=True)
class FlopsProfiler:
    """Counts floating-point operations."""

    enabled: bool = key(
        False, "Profile one step.", refused=f"the flops profiler {_LATER}; onefold.Profiling times a loop today"
    )
    recompute_fwd_factor: float = key(0.0, "Share of forward that is recomputed.", switch="enabled")
    profile_step: int = key(1, "The step to profile.", switch="enabled")
    module_depth: int = key(-1, "Depth of the printed tree.", switch="enabled")
    top_modules: int = key(1, "Modules printed at each depth.", switch="enabled")
    detailed: bool = key(True, "Print every module.", switch="enabled")
    output_file: str | None = key(None, "Where to print.", switch="enabled")


@dataclass(frozen=True)
class CommsLogger:
    """Logs collectives."""

    enabled: bool = key(False, "Log collectives.", notice=_COUNTED)
    prof_all: bool = key(True, "Log all of them.", notice=_COUNTED)
    prof_ops: tuple[str, ...] = key((), "Log these.", notice=_COUNTED)
    verbose: bool = key(False, "Print each as it happens.", notice=_COUNTED)
    debug: bool = key(False, "Name the caller.", notice=_COUNTED)


@dataclass(frozen=True)
class FileMonitor:
    """Writes training events to files."""

    enabled: bool = key(False, "Write events.", refused=_MONITOR)
    output_path: str = key("", "Folder.", switch="enabled")
    job_name: str = key("DeepSpeedJobName", "Sub-folder.", switch="enabled")


@dataclass(frozen=True)
class Wandb:
    """Sends training events to Weights & Biases."""

    enabled: bool = key(False, "Send events.", refused=_MONITOR)
    group: str | None = key(None, "Group of the run.", switch="enabled")
    team: str | None = key(None, "Team of the run.", switch="enabled")
    project: str = key("deepspeed", "Project of the run.", switch="enabled")


@dataclass(frozen=True)
class Comet:
    """Sends training events to Comet."""

    enabled: bool = key(False, "Send events.", refused=_MONITOR)
    samples_log_interval: int = key(100, "Samples between two events.", switch="enabled")
    project: str | None = key(None, "Project of the run.", switch="enabled")
    workspace: str | None = key(None, "Workspace of the run.", switch="enabled")
    api_key: str | None = key(None, "Account of the run.", switch="enabled")
    experiment_name: str | None = key(None, "Name of the run.", switch="enabled")
    experiment_key: str | None = key(None, "Identity of the run.", switch="enabled")
    online: bool | None = key(None, "Send at once or keep in a file.", switch="enabled")
    mode: str | None = key(None, "A new run or an old one.", switch="enabled")


_WRITER = "every rank writes its own file, flushed and checked"


@dataclass(frozen=True)
class ParallelWrite:
    """Who writes a checkpoint."""

    pipeline_stage: bool = key(False, "Each pipeline stage writes.", notice=_WRITER)


@dataclass(frozen=True)
class Writer:
    """How a checkpoint is written."""

    type: str | None = key(None, "FAST, PYTHON or MOCK.", notice=_WRITER)
    io_buffer_size: int = key(64 * 1024 * 1024, "Bytes of one buffer.", notice=_WRITER)
    io_buffer_double: bool = key(True, "Two buffers.", notice=_WRITER)
    io_multiplier: int = key(1, "Files at a time.", notice=_WRITER)
    show_statistics: bool = key(False, "Print times.", notice=_WRITER)
    data_parallel: str | None = key(None, "Who writes.", notice=_WRITER)
    decoupled: bool = key(False, "Write in the background.", notice="checkpoint.async does that")


@dataclass(frozen=True)
class Checkpoint:
    """Saving and loading."""

    async_save: bool = key(
        False,
        "Go on training once the state is copied to host memory; the files are written in the background.",
        aliases=("async",),
    )
    keep_last: int | None = key(
        None, "Keep this many of the newest checkpoints of a folder; all by default.", minimum=1
    )
    keep_every: int | None = key(
        None, "With keep_last: keep also the checkpoints of every so many steps.", switch="keep_last", minimum=1
    )
    tag_validation: Literal["Warn", "Ignore", "Fail"] = key(
        "Warn", "What to do when ranks save under different tags; rank 0's is taken."
    )
    load_universal: bool = key(
        False, "Load for another number of ranks.", notice="any checkpoint loads on any number of ranks"
    )
    use_node_local_storage: bool = key(
        False,
        "Each node has a disk of its own.",
        refused="checkpoints need a file system that all ranks share: a node's own disk is lost with the node",
    )
    checkpoint_serialization: bool = key(True, "Serialise the whole.", notice=_WRITER)
    parallel_write: ParallelWrite = section(ParallelWrite, "Who writes a checkpoint.")
    writer: Writer = section(Writer, "How a checkpoint is written.")


@dataclass(frozen=True)
class Elasticity:
    """Batch sizes that fit several numbers of ranks."""

    enabled: bool = key(
        False, "Choose the batch size by the number of ranks.", refused="elastic batch sizes come with a later release"
    )
    max_train_batch_size: int | None = key(None, "The largest batch.", switch="enabled")
    micro_batch_sizes: tuple[int, ...] = key((), "Micro-batches to choose from.", switch="enabled")
    min_gpus: int = key(1, "The fewest ranks.", switch="enabled")
    max_gpus: int = key(10_000, "The most ranks.", switch="enabled")
    num_gpus_per_node: int = key(1, "Ranks of a node.", switch="enabled")
    model_parallel_size: int = key(1, "Ranks that share a model.", switch="enabled")
    min_time: int = key(0, "Minutes between two changes.", switch="enabled")
    prefer_larger_batch: bool = key(True, "Prefer the larger batch.", aliases=("prefer_large_batch",), switch="enabled")
    ignore_non_elastic_batch_info: bool = key(False, "Ignore the batch keys.", switch="enabled")
    version: float = key(0.2, "Version of the rule.", switch="enabled")


@dataclass(frozen=True)
class Autotuning:
    """Searches for a config by running many."""

    enabled: bool = key(False, "Search.", refused="searching by running is outside onefold's scope; leave it out")
    fast: bool = key(True, "Search micro-batches only.", switch="enabled")
    results_dir: str | None = key(None, "Where results go.", switch="enabled")
    exps_dir: str | None = key(None, "Where experiments go.", switch="enabled")
    overwrite: bool = key(True, "Run again what was run.", switch="enabled")
    start_profile_step: int = key(3, "First step that counts.", switch="enabled")
    end_profile_step: int = key(5, "Last step that counts.", switch="enabled")
    metric: Literal["throughput", "latency", "flops"] = key("throughput", "What is best.", switch="enabled")
    metric_path: str | None = key(None, "Where the metric is read.", switch="enabled")
    tuner_type: Literal["gridsearch", "random", "model_based"] = key("gridsearch", "How to search.", switch="enabled")
    tuner_early_stopping: int = key(5, "Experiments without gain before it ends.", switch="enabled")
    tuner_num_trials: int = key(50, "The most experiments.", switch="enabled")
    arg_mappings: dict[str, str] = key({}, "Arguments of the script by key.", switch="enabled")
    max_train_batch_size: int | None = key(None, "The largest batch.", switch="enabled")
    min_train_batch_size: int | None = key(None, "The smallest batch.", switch="enabled")
    max_train_micro_batch_size_per_gpu: int = key(1024, "The largest micro-batch.", switch="enabled")
    min_train_micro_batch_size_per_gpu: int = key(1, "The smallest micro-batch.", switch="enabled")
    num_tuning_micro_batch_sizes: int = key(3, "Micro-batches to try.", switch="enabled")
    mp_size: int = key(1, "Ranks that share a model.", switch="enabled")
    model_info: dict[str, Any] = key({}, "What is known of the model.", switch="enabled")
    model_info_path: str | None = key(None, "Where that is kept.", switch="enabled")


@dataclass(frozen=True)
class Compile:
    """DeepSpeed's compiler passes."""

    deepcompile: bool = key(
        False,
        "Rewrite the compiled graph.",
        refused="graph passes are outside onefold's scope; compile the blocks instead",
    )
    free_activation: bool = key(False, "Free activations early.", switch="deepcompile")
    free_activation_threshold: int = key(10 * 1024 * 1024, "Bytes above which.", switch="deepcompile")
    offload_activation: bool = key(False, "Offload activations.", switch="deepcompile")
    offload_activation_pin_memory: bool = key(True, "To page-locked memory.", switch="deepcompile")
    offload_opt_states: bool = key(False, "Offload optimizer states.", switch="deepcompile")
    double_buffer: bool = key(True, "Two communication buffers.", switch="deepcompile")
    symmetric_memory: bool = key(False, "Gather through symmetric memory.", switch="deepcompile")
    debug_log: bool = key(False, "Log the passes.", switch="deepcompile")
    offload_parameters: bool = key(False, "Offload parameters.", switch="deepcompile")
    sync_before_reduce: bool = key(False, "Wait before each reduction.", switch="deepcompile")
    sync_after_reduce: bool = key(False, "Wait after each reduction.", switch="deepcompile")
    sync_before_allgather: bool = key(False, "Wait before each gather.", switch="deepcompile")
    sync_after_allgather: bool = key(False, "Wait after each gather.", switch="deepcompile")
    keep_int_input_tensors: bool = key(True, "Keep integer inputs.", switch="deepcompile")
    keep_all_input_tensors: bool = key(False, "Keep all inputs.", switch="deepcompile")
    passes: tuple[str, ...] | None = key(None, "The passes to run.", switch="deepcompile")


@dataclass(frozen=True)
class Nebula:
    """Azure's checkpoint service."""

    enabled: bool = key(False, "Use it.", refused="one vendor's service is outside onefold's scope; leave it out")
    load_path: str | None = key(None, "Where to load from.", switch="enabled")
    enable_nebula_load: bool = key(True, "Load through it.", switch="enabled")
    persistent_storage_path: str | None = key(None, "Where it keeps copies.", switch="enabled")
    persistent_time_interval: int = key(100, "Seconds between two copies.", switch="enabled")
    num_of_version_in_retention: int = key(2, "Copies that are kept.", switch="enabled")


_TIMER = "nothing waits for a device only to time it; wall_clock_breakdown does when asked"


@dataclass(frozen=True)
class ThroughputTimer:
    """DeepSpeed's samples-per-second timer."""

    enabled: bool = key(True, "Time each step.", notice=_TIMER)
    synchronized: bool = key(True, "Wait for the device.", notice=_TIMER)


@dataclass(frozen=True)
class Timers:
    """Timers that always run in DeepSpeed."""

    throughput: ThroughputTimer = section(ThroughputTimer, "DeepSpeed's samples-per-second timer.")
