"""Every section of a config but `zero_optimization`, and `Config` itself, under the names of the JSON file."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule wants.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from onefold.config.keys import Dtype, Key, key, noticed, refused, section
from onefold.config.params import is_8bit
from onefold.config.zero_optimization import ZeroOptimization

_if_enabled = partial(key, switch="enabled")
_if_compiled = partial(key, switch="deepcompile")
_MASTERS = "small steps of fp16 weights are lost without fp32 masters; leave it out, or compute in bf16"
_SCOPE = "it is outside onefold's scope, which is ZeRO data parallelism; leave it out"
_COUNTED = "every call and byte is always counted; read engine.ledger"
_WRITER = "every rank writes its own file, flushed and checked"
_TIMER = "nothing waits for a device only to time it; wall_clock_breakdown does when asked"


@dataclass(frozen=True)
class Fp16:
    """Compute in fp16 with fp32 masters and a loss scale."""

    enabled: bool = key(False, "Compute in fp16 with fp32 masters.")
    auto_cast: bool = _if_enabled(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: float = _if_enabled(0.0, "A fixed loss scale; 0: dynamic.", minimum=0)
    initial_scale_power: int = _if_enabled(16, "The dynamic scale starts at two to this power.", minimum=0)
    loss_scale_window: int = _if_enabled(1000, "Steps without overflow before the dynamic scale doubles.", minimum=1)
    hysteresis: int = _if_enabled(2, "Overflows that are forgiven before the scale halves.", minimum=1)
    consecutive_hysteresis: bool = _if_enabled(False, "A step without overflow forgives all earlier ones.")
    min_loss_scale: float = _if_enabled(1.0, "The dynamic scale never goes below; overflow there raises.", minimum=0)
    fp16_master_weights_and_grads: bool = refused(False, "Keep masters and gradients in fp16.", _MASTERS)


@dataclass(frozen=True)
class Bf16:
    """Compute in bf16 with fp32 masters."""

    enabled: bool = key(False, "Compute in bf16 with fp32 masters.")
    check_grad_overflow: bool = _if_enabled(True, "Skip the step, on all ranks alike, when a gradient is not finite.")
    immediate_grad_update: bool = noticed(
        False, "Accumulate as each gradient lands.", "gradients always accumulate in place as they land"
    )
    bf16_master_weights_and_grads: bool = _if_enabled(
        False,
        "No masters beside the bf16 weights, which are rounded at random at every step; gradients accumulate in bf16.",
    )
    bf16_optimizer_states: bool = _if_enabled(False, "Keep states in bf16, rounded at random at every step.")
    loss_scale: float | None = noticed(None, "A loss scale.", "bf16 has the range of fp32 and needs no loss scale")


@dataclass(frozen=True)
class TorchAutocast:
    """`torch.autocast` picks the format of each operation. Parameters are fp32, or what `bf16` or `fp16` says."""

    enabled: bool = key(False, "Run forward under `torch.autocast`.")
    dtype: Dtype | None = _if_enabled(
        None, "The lower precision, bf16 or fp16; left out: that of the parameters, else bf16."
    )
    lower_precision_safe_modules: tuple[str, ...] = _if_enabled(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        "Classes whose gradients may travel in the lower precision.",
        notice="gradients travel in the parameters' format, or in communication_data_type, whatever the class",
    )


@dataclass(frozen=True)
class DataTypes:
    """Number formats beside the compute format."""

    grad_accum_dtype: Dtype | None = key(None, "Gradients accumulate in it; fp32 when left out.")
    param_dtype: Dtype | None = key(None, "The compute format; must agree with the enabled section.")
    buffer_dtype: Dtype | None = key(
        None,
        "Cast floating-point buffers to it; left out: buffers of torch.nn layers (batch norms, spectral norms) "
        "follow the parameters, others are kept as they are.",
    )
    keep_in_fp32_modules: tuple[str, ...] = key(
        (),
        "Patterns of names of buffers (`*` stands for any characters, and a pattern may match anywhere in a name) that "
        "are fp32 in bf16 and fp16. Left out or `auto`: buffers of models keep their dtype.",
        or_one=True,
    )


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer that the engine builds."""

    type: str = key(
        "",
        "Adam, AdamW, SGD, Adagrad, Lion, Muon, Shampoo or any class of `torch.optim`. Required. AdamW8bit, adamw_8bit "
        "and their kin are AdamW with `onefold.state_dtype` int8.",
    )
    params: dict[str, Any] = key({}, "Handed to the optimizer; keys that are `auto` are dropped.")
    legacy_fusion: bool = noticed(False, "The old fused optimizer.", "there is one optimizer step, over flat shards")


@dataclass(frozen=True)
class SchedulerSection:
    """The learning-rate scheduler that the engine builds and steps."""

    type: str = key(
        "", "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or a `torch.optim.lr_scheduler`. Required."
    )
    params: dict[str, Any] = key({}, "Handed to the scheduler; keys that are `auto` are dropped.")


@dataclass(frozen=True)
class TraceSection:
    """A timeline of some steps, without a change to the program; `onefold.Profiling` is the same by hand."""

    steps: tuple[int, int] | None = key(
        None, "The first and the last optimizer step that are traced, counted from 1; left out: none.", minimum=1
    )
    path: str = key("trace.json", "The file, of all ranks, which rank 0 writes; others lie beside it.")
    torch_profiler: bool = key(
        False, "torch.profiler's trace of the same steps too, a file a rank (`trace.torch.rank0.json`).", switch="steps"
    )
    memory_snapshot: bool = key(
        False,
        "CUDA memory with the history of its allocations, after the last of these steps and when memory runs out, a "
        "file a rank for pytorch.org/memory_viz (`trace.memory.rank0.pickle`). The history is kept from `initialize` "
        "on until then. There is none on a CPU.",
    )


@dataclass(frozen=True)
class OnefoldSection:
    """Keys of onefold's own; DeepSpeed does not know them."""

    collective: Literal["auto", "native", "exchange"] = key(
        "auto",
        "How gradients are added. auto: in one order, in fp32, over several nodes inside each of them first, so that "
        "traffic crosses between nodes once a node; exchange: the same bits, each rank's slice straight from all "
        "others; native: by the backend's own reduce-scatter.",
    )
    node_sums_dtype: Dtype = key(
        "fp32",
        "In what sums of a node's gradients cross to other nodes. Below fp32 less travels, and results depend on how "
        "ranks are spread over nodes.",
    )
    node_size: int | None = key(None, "Ranks of a node, neighbours by rank. Left out: the launcher's.", minimum=1)
    units: tuple[str, ...] = key((), "Classes, names or patterns (`*`) of modules that are units; empty: by structure.")
    device_memory: float | None = key(
        None,
        "GB (1e9 bytes) of device memory that model state may take; `ratio: auto` fills it first. Left out: what is "
        "free at the start, less a quarter for activations.",
        above=0,
    )
    host_memory: float | None = key(
        None,
        "GB of host memory that offloaded state may take, over all ranks of this node. Left out: what is available, "
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
    state_dtype: Literal["fp32", "int8", "bf16"] = key(
        "fp32",
        "In what optimizer states are held. int8: a byte a value and a scale for every 256, so that Adam keeps 2 bytes "
        "a parameter instead of 8; bf16: rounded at random at every step.",
    )
    master_dtype: Literal["fp32", "bf16_int16", "bf16_int8", "bf16"] = key(
        "fp32",
        "In what masters of bf16 weights are held. bf16_int16: the weight and the other 16 bits of the fp32 value, 2 "
        "bytes less where weights are held anyway (stages 0 to 2, one rank), with the bits of fp32 masters but for "
        "ties; bf16_int8: 8 of these bits; bf16: the weight alone, rounded at random at every step.",
    )
    int8_min_numel: int = key(4096, "Parameters of fewer elements keep fp32 states.", minimum=0)
    fp32_state_names: tuple[str, ...] = key(
        (), "Patterns of names of parameters (`*embed*`) whose states stay fp32 whatever `state_dtype` says."
    )
    offloaded_step: Literal["auto", "host", "device", "both"] = key(
        "auto",
        "Who steps states below a GPU. host: its cores, where they rest; device: they pass through the GPU, gradient, "
        "master and states up, master and states down, with the bits of states on the GPU; both: some units each, at "
        "the same time. auto: the GPU where states or masters are in fewer bytes; else the host where its memory is "
        "not page-locked; else both.",
    )
    delayed_host_step: bool = key(
        False,
        "Let the host step run beside the next forward and backward, which then use weights one step old. Inexact: "
        "it changes the training.",
    )
    nccl_error_handling: Literal["onefold", "torch"] = key(
        "onefold",
        "Who ends NCCL collectives that hang. onefold: the hang detector, which names the ranks; torch's watchdog and "
        "flight recorder are then off in the whole process. torch: both stay on. No effect on an existing group.",
    )
    report: str | None = key(
        None,
        "A folder for the record of a run, `run.jsonl`, which the first rank writes: facts, then a line a step. "
        "`onefold report` and `onefold watch` show it. Left out: none.",
    )
    trace: TraceSection = section(TraceSection)


@dataclass(frozen=True)
class Aio:
    """How NVMe is read and written; a notice says so when nothing rests there."""

    block_size: int = key(1_048_576, "Bytes of one request.", minimum=1)
    queue_depth: int = key(8, "Requests in flight.", minimum=1)
    intra_op_parallelism: int = key(1, "Threads of `queue_depth` requests each.", aliases=("thread_count",), minimum=1)
    single_submit: bool = key(False, "One request at a time in each transfer.")
    overlap_events: bool = key(True, "false: each transfer is finished where it is started.")
    use_gds: bool = noticed(False, "GPU-direct storage.", "transfers go through page-locked host memory")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """What `onefold.checkpointing.checkpoint` does with the inputs of the functions that it computes again."""

    partition_activations: bool = noticed(
        False, "Shard inputs over a group.", "there is no model-parallel group, so every rank keeps its inputs whole"
    )
    number_checkpoints: int | None = key(
        None, "Checkpointed calls in one forward.", switch="contiguous_memory_optimization", minimum=1, or_false=True
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

    enabled: bool = refused(
        False, "Profile a step.", "the flops profiler comes with a later release; onefold.Profiling times a loop today"
    )
    recompute_fwd_factor: float = _if_enabled(0.0, "Share of forward that is recomputed.")
    profile_step: int = _if_enabled(1, "The step to profile.")
    module_depth: int = _if_enabled(-1, "Depth of the printed tree.")
    top_modules: int = _if_enabled(1, "Modules printed at each depth.")
    detailed: bool = _if_enabled(True, "Print every module.")
    output_file: str | None = _if_enabled(None, "Where to print.")


@dataclass(frozen=True)
class CommsLogger:
    """Logs collectives."""

    enabled: bool = noticed(False, "Log collectives.", _COUNTED)
    prof_all: bool = noticed(True, "Log all of them.", _COUNTED)
    prof_ops: tuple[str, ...] = noticed((), "Log these.", _COUNTED)
    verbose: bool = noticed(False, "Print each as it happens.", _COUNTED)
    debug: bool = noticed(False, "Name the caller.", _COUNTED)


@dataclass(frozen=True)
class FileMonitor:
    """Writes events of training to files, on the first rank."""

    enabled: bool = key(False, "Write events: loss, learning rate, gradient norm, memory, traffic.")
    output_path: str = _if_enabled("", "The folder; left out: where the job was started.")
    job_name: str = _if_enabled("DeepSpeedJobName", "A folder in it, for this job.")


@dataclass(frozen=True)
class Wandb:
    """Sends events of training to Weights & Biases, from the first rank. Needs the package `wandb`."""

    enabled: bool = key(False, "Send events.")
    group: str | None = _if_enabled(None, "Group of the run.")
    team: str | None = _if_enabled(None, "Team of the run.")
    project: str = _if_enabled("deepspeed", "Project of the run.")


@dataclass(frozen=True)
class Comet:
    """Sends events of training to Comet, from the first rank. Needs the package `comet_ml`."""

    enabled: bool = key(False, "Send events.")
    samples_log_interval: int = _if_enabled(100, "Samples between two events of one name.", minimum=0)
    project: str | None = _if_enabled(None, "Project of the run.")
    workspace: str | None = _if_enabled(None, "Workspace of the run.")
    api_key: str | None = _if_enabled(None, "Account of the run.")
    experiment_name: str | None = _if_enabled(None, "Name of the run.")
    experiment_key: str | None = _if_enabled(None, "Identity of the run.")
    online: bool | None = _if_enabled(None, "Send at once or keep in a file.")
    mode: str | None = _if_enabled(None, "A new run or an old one.")


@dataclass(frozen=True)
class ParallelWrite:
    """Who writes a checkpoint."""

    pipeline_stage: bool = noticed(False, "Each pipeline stage writes.", _WRITER)


@dataclass(frozen=True)
class WriterSection:
    """How a checkpoint is written."""

    type: str | None = noticed(None, "FAST, PYTHON or MOCK.", _WRITER)
    io_buffer_size: int = noticed(64 * 1024 * 1024, "Bytes of one buffer.", _WRITER)
    io_buffer_double: bool = noticed(True, "Two buffers.", _WRITER)
    io_multiplier: int = noticed(1, "Files at a time.", _WRITER)
    show_statistics: bool = noticed(False, "Print times.", _WRITER)
    data_parallel: str | None = noticed(None, "Who writes.", _WRITER)
    decoupled: bool = noticed(False, "Write in the background.", "checkpoint.async does that")


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and loading."""

    async_save: bool = key(
        False, "Go on once states are copied to the host; files are written in the background.", aliases=("async",)
    )
    keep_last: int | None = key(None, "Keep so many of the newest checkpoints of a folder; all by default.", minimum=1)
    keep_every: int | None = key(None, "Keep also checkpoints of every so many steps.", switch="keep_last", minimum=1)
    tag_validation: Literal["Warn", "Ignore", "Fail"] = key("Warn", "What to do when tags differ; rank 0's is taken.")
    load_universal: bool = noticed(False, "Load on any number of ranks.", "any checkpoint loads on any number of ranks")
    use_node_local_storage: bool = refused(
        False,
        "Each node has a disk of its own.",
        "checkpoints need a file system that all ranks share: a node's own disk is lost with the node",
    )
    checkpoint_serialization: bool = noticed(True, "Serialise the whole.", _WRITER)
    parallel_write: ParallelWrite = section(ParallelWrite)
    writer: WriterSection = section(WriterSection)


@dataclass(frozen=True)
class Elasticity:
    """Batch sizes that fit several numbers of ranks."""

    enabled: bool = refused(False, "Choose the batch size by ranks.", "elastic batch sizes come with a later release")
    max_train_batch_size: int | None = _if_enabled(None, "The largest batch.")
    micro_batch_sizes: tuple[int, ...] = _if_enabled((), "Micro-batches to choose from.")
    min_gpus: int = _if_enabled(1, "The fewest ranks.")
    max_gpus: int = _if_enabled(10_000, "The most ranks.")
    num_gpus_per_node: int = _if_enabled(1, "Ranks of a node.")
    model_parallel_size: int = _if_enabled(1, "Ranks that share a model.")
    min_time: int = _if_enabled(0, "Minutes between two changes.")
    prefer_larger_batch: bool = _if_enabled(True, "Prefer the larger batch.", aliases=("prefer_large_batch",))
    ignore_non_elastic_batch_info: bool = _if_enabled(False, "Ignore the batch keys.")
    version: float = _if_enabled(0.2, "Version of the rule.")


@dataclass(frozen=True)
class Autotuning:
    """Searches for a config by running many."""

    enabled: bool = refused(
        False, "Search.", "training does not search; `onefold tune` searches before it, so leave this out"
    )
    fast: bool = _if_enabled(True, "Search micro-batches only.")
    results_dir: str | None = _if_enabled(None, "Where results go.")
    exps_dir: str | None = _if_enabled(None, "Where experiments go.")
    overwrite: bool = _if_enabled(True, "Run again what was run.")
    start_profile_step: int = _if_enabled(3, "First step that counts.")
    end_profile_step: int = _if_enabled(5, "Last step that counts.")
    metric: Literal["throughput", "latency", "flops"] = _if_enabled("throughput", "What is best.")
    metric_path: str | None = _if_enabled(None, "Where the metric is read.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = _if_enabled("gridsearch", "How to search.")
    tuner_early_stopping: int = _if_enabled(5, "Experiments without gain before it ends.")
    tuner_num_trials: int = _if_enabled(50, "The most experiments.")
    arg_mappings: dict[str, str] = _if_enabled({}, "Arguments of the script by key.")
    max_train_batch_size: int | None = _if_enabled(None, "The largest batch.")
    min_train_batch_size: int | None = _if_enabled(None, "The smallest batch.")
    max_train_micro_batch_size_per_gpu: int = _if_enabled(1024, "The largest micro-batch.")
    min_train_micro_batch_size_per_gpu: int = _if_enabled(1, "The smallest micro-batch.")
    num_tuning_micro_batch_sizes: int = _if_enabled(3, "Micro-batches to try.")
    mp_size: int = _if_enabled(1, "Ranks that share a model.")
    model_info: dict[str, Any] = _if_enabled({}, "What is known of the model.")
    model_info_path: str | None = _if_enabled(None, "Where that is kept.")


@dataclass(frozen=True)
class Compile:
    """DeepSpeed's compiler passes."""

    deepcompile: bool = refused(
        False, "Rewrite the compiled graph.", "graph passes are outside onefold's scope; compile the blocks instead"
    )
    free_activation: bool = _if_compiled(False, "Free activations early.")
    free_activation_threshold: int = _if_compiled(10 * 1024 * 1024, "Bytes above which.")
    offload_activation: bool = _if_compiled(False, "Offload activations.")
    offload_activation_pin_memory: bool = _if_compiled(True, "To page-locked memory.")
    offload_opt_states: bool = _if_compiled(False, "Offload optimizer states.")
    double_buffer: bool = _if_compiled(True, "Two communication buffers.")
    symmetric_memory: bool = _if_compiled(False, "Gather through symmetric memory.")
    debug_log: bool = _if_compiled(False, "Log the passes.")
    offload_parameters: bool = _if_compiled(False, "Offload parameters.")
    sync_before_reduce: bool = _if_compiled(False, "Wait before each reduction.")
    sync_after_reduce: bool = _if_compiled(False, "Wait after each reduction.")
    sync_before_allgather: bool = _if_compiled(False, "Wait before each gather.")
    sync_after_allgather: bool = _if_compiled(False, "Wait after each gather.")
    keep_int_input_tensors: bool = _if_compiled(True, "Keep integer inputs.")
    keep_all_input_tensors: bool = _if_compiled(False, "Keep all inputs.")
    autoep_non_moe: bool = _if_compiled(False, "Compile only layers without experts.")
    passes: tuple[str, ...] | None = _if_compiled(None, "The passes to run.")


@dataclass(frozen=True)
class Nebula:
    """Azure's checkpoint service."""

    enabled: bool = refused(False, "Use it.", "one vendor's service is outside onefold's scope; leave it out")
    load_path: str | None = _if_enabled(None, "Where to load from.")
    enable_nebula_load: bool = _if_enabled(True, "Load through it.")
    persistent_storage_path: str | None = _if_enabled(None, "Where it keeps copies.")
    persistent_time_interval: int = _if_enabled(100, "Seconds between two copies.")
    num_of_version_in_retention: int = _if_enabled(2, "Copies that are kept.")


@dataclass(frozen=True)
class ThroughputTimer:
    """DeepSpeed's samples-per-second timer."""

    enabled: bool = noticed(True, "Time each step.", _TIMER)
    synchronized: bool = noticed(True, "Wait for the device.", _TIMER)


@dataclass(frozen=True)
class Timers:
    """Timers that always run in DeepSpeed."""

    throughput: ThroughputTimer = section(ThroughputTimer)


# -- the whole config ------------------------------------------------------------------------------------------------

FREE_KEYS: dict[str, tuple[type, Key]] = {
    "enabled": (bool, Key("")),
    "autotp_size": (int, Key("", minimum=0)),
    "tp_size": (int, Key("", minimum=0)),
}
"""What is read of the sections outside the scope, wherever it stands in them."""


def _switched_on(value: Any) -> bool:
    """Whether a feature outside the scope is asked for: by any `enabled` in it, or, without one, by being there."""
    switches = list(_find("enabled", value))
    return any(switches) if switches else bool(value)


def _find(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner_name, inner in value.items():
            if inner_name == name:
                yield inner
            else:
                yield from _find(name, inner)


def _tensor_parallel(value: Any) -> bool:
    sizes = [*_find("autotp_size", value), *_find("tp_size", value)]
    return any(size > 1 for size in sizes)


def _outside(doc: str, reason: str = _SCOPE) -> Any:
    """A section that belongs to another part of DeepSpeed: any keys, refused when it asks for something."""
    return refused({}, doc, reason, asks=_switched_on, asks_text="it asks for something")


@dataclass(frozen=True)
class Config:
    """A config as it was read: every key with its value or default, and what there is to say about it."""

    train_batch_size: int | None = key(None, "Samples in one step: micro-batch x accumulation x ranks.", minimum=1)
    train_micro_batch_size_per_gpu: int | None = key(None, "Samples in one forward of one rank.", minimum=1)
    gradient_accumulation_steps: int | None = key(None, "Forwards and backwards in one optimizer step.", minimum=1)
    managed_gradient_accumulation: bool = key(True, "Count micro-steps; false: every `step()` is a boundary.")
    gradient_clipping: float = key(1.0, "The largest global gradient norm; 0: no clipping.", minimum=0, infinite=True)
    prescale_gradients: bool = key(False, "Divide gradients before they are added instead of after.")
    gradient_predivide_factor: float = key(1.0, "Divide by this before, by the rest after adding.", above=0)
    gradient_allreduce_op: Literal["mean", "sum"] = key("mean", "Average or add the gradients (sum: stages 0-2).")
    communication_data_type: Dtype | None = key(None, "Gradients travel in it; the compute format when left out.")
    seq_parallel_communication_data_type: Dtype = noticed(
        "fp32", "Gradients travel in it with sequence parallelism.", "there is no sequence parallelism here"
    )
    sparse_gradients: bool = refused(False, "Sparse gradients.", "gradients lie in flat dense buffers; leave it out")
    steps_per_print: int | None = key(
        None, "Steps between two progress lines; left out, 0 or Infinity: never.", minimum=0, infinite=True
    )
    wall_clock_breakdown: bool = key(False, "Time forward, backward and step.")
    memory_breakdown: bool = key(False, "Report memory at each phase of a step.")
    disable_python_gc: bool = key(
        False, "Turn Python's garbage collector off, after one collection, until the engine is closed."
    )
    max_grad_norm: float | None = refused(
        None, "Not read by DeepSpeed either.", "nothing would be clipped by it; write gradient_clipping"
    )
    dump_state: bool = noticed(False, "Print the engine's state.", "the plan of a config says what the engine holds")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = key(None, "The logger's level.")
    dataloader_drop_last: bool = key(False, "Drop the last, incomplete batch.")
    zero_allow_untested_optimizer: bool = key(False, "Step optimizers not known to be elementwise.", from_stage=1)
    zero_force_ds_cpu_optimizer: bool = noticed(
        True, "Insist on DeepSpeed's host optimizer.", "any elementwise optimizer runs on the host"
    )
    disable_allgather: bool = noticed(
        False, "Never read by DeepSpeed.", "updated shards are always gathered; DeepSpeed never read this key either"
    )
    vocabulary_size: int | None = noticed(None, "For an alignment warning.", "parameters are aligned by construction")
    graph_harvesting: bool = noticed(False, "CUDA graphs of one optimizer.", "the step is already a few fused kernels")
    sequence_parallel_size: int = refused(
        1, "Ranks that share a sequence.", "sequence parallelism is outside onefold's scope; leave it out", minimum=1
    )
    data_parallel_size: int | None = noticed(
        None, "Ranks that share the data.", "data parallelism always spans all ranks", minimum=1
    )
    use_data_before_expert_parallelism: bool = noticed(False, "Mesh order.", "there is no expert parallelism here")
    zero_optimization: ZeroOptimization = section(ZeroOptimization)
    onefold: OnefoldSection = section(OnefoldSection)
    optimizer: OptimizerSection | None = key(None, "The optimizer that the engine builds.")
    scheduler: SchedulerSection | None = key(None, "The learning-rate scheduler that the engine builds and steps.")
    fp16: Fp16 = section(Fp16)
    bf16: Bf16 = section(Bf16, aliases=("bfloat16",))
    torch_autocast: TorchAutocast = section(TorchAutocast)
    data_types: DataTypes = section(DataTypes)
    aio: Aio = section(Aio)
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    checkpoint: CheckpointSection = section(CheckpointSection)
    comms_logger: CommsLogger = section(CommsLogger)
    timers: Timers = section(Timers)
    flops_profiler: FlopsProfiler = section(FlopsProfiler)
    tensorboard: FileMonitor = section(
        FileMonitor, "Writes events of training for TensorBoard, on the first rank. Needs the package `tensorboard`."
    )
    csv_monitor: FileMonitor = section(
        FileMonitor, "Writes events of training as CSV, one file a metric, on the first rank."
    )
    wandb: Wandb = section(Wandb)
    comet: Comet = section(Comet)
    elasticity: Elasticity = section(Elasticity)
    autotuning: Autotuning = section(Autotuning)
    compile: Compile = section(Compile)
    nebula: Nebula = section(Nebula)
    amp: dict[str, Any] = _outside(
        "Mixed precision by Apex.", "Apex is superseded by bf16, fp16 and torch_autocast; use one of those"
    )
    tensor_parallel: dict[str, Any] = refused(
        {},
        "Splits layers over ranks.",
        "tensor parallelism is outside onefold's scope; leave it out",
        asks=_tensor_parallel,
        asks_text="`autotp_size` is above 1",
    )
    pipeline: dict[str, Any] = _outside("Pipeline parallelism.")
    progressive_layer_drop: dict[str, Any] = _outside("Drops layers during training.")
    eigenvalue: dict[str, Any] = _outside("Curvature estimates.")
    sparse_attention: dict[str, Any] = _outside("Sparse attention kernels.")
    curriculum_learning: dict[str, Any] = _outside("Curriculum over the data.")
    data_efficiency: dict[str, Any] = _outside("Sampling and routing of data.")
    compression_training: dict[str, Any] = _outside("Compression while training.")
    hybrid_engine: dict[str, Any] = _outside("Generation inside training.")
    expert_parallel: dict[str, Any] = _outside("Spreads experts over ranks.")
    weight_quantization: dict[str, Any] = _outside("Quantized inference weights.")
    datastates_ckpt: dict[str, Any] = _outside("An asynchronous checkpoint engine.")

    notices: tuple[str, ...] = ()
    """One line for each key that is accepted but has nothing to do here."""
    refusals: tuple[str, ...] = ()
    """One line for each feature that is asked for and not offered; `check_built` raises when there is one."""
    unknown: tuple[str, ...] = ()
    """Top-level keys that resemble no known key, where the reader was asked to list them."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The config as it was given, in DeepSpeed's schema, before anything was filled in."""

    @property
    def compute_dtype(self) -> Dtype:
        """The format of the model's parameters in forward and backward."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> Dtype:
        """The lower precision of `torch_autocast`: that of the parameters where they have one, else bf16."""
        own = "fp16" if self.fp16.enabled else "bf16"
        return self.torch_autocast.dtype or own  # type: ignore[return-value]

    @property
    def state_dtype(self) -> Literal["fp32", "int8", "bf16"]:
        """What optimizer states are held in: as DeepSpeed's switch, the name of the optimizer, or our key says."""
        if self.bf16.enabled and self.bf16.bf16_optimizer_states:
            return "bf16"
        if self.optimizer is not None and is_8bit(self.optimizer.type):
            return "int8"
        return self.onefold.state_dtype
