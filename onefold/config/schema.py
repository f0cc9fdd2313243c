"""`Config`, and its sections for the optimizer, NVMe access, activation checkpointing and checkpoints."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onefold.config.elasticity import Elasticity
from onefold.config.expert_parallel import ExpertParallelism
from onefold.config.keys import Dtype, Key, key, noticed, refused, section
from onefold.config.monitoring import Comet, CommsLogger, FileMonitor, Timers, Wandb
from onefold.config.onefold_section import OnefoldSection
from onefold.config.params import is_8bit
from onefold.config.precision import Bf16, DataTypes, Fp8, Fp16, TorchAutocast
from onefold.config.refused_sections import Autotuning, Compile, FlopsProfiler, Nebula
from onefold.config.zero_optimization import ZeroOptimization

_SCOPE = "it is outside onefold's scope, which is ZeRO data parallelism; leave it out"
_WRITER = "every rank writes its own file, flushed and checked"


@dataclass(frozen=True)
class OptimizerSection:
    """Optimizer that the engine builds."""

    type: str = key(
        "",
        "Adam, AdamW, SGD, Adagrad, Lion, Muon, Shampoo or any class of `torch.optim`. Required. AdamW8bit, adamw_8bit "
        "and similar names select AdamW with `onefold.state_dtype` int8.",
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer. Keys with the value `auto` are dropped.")
    legacy_fusion: bool = noticed(
        False, "Use DeepSpeed's old fused optimizer.", "there is one optimizer step, over flat shards"
    )


@dataclass(frozen=True)
class SchedulerSection:
    """Learning rate scheduler that the engine builds and steps."""

    type: str = key(
        "",
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or any class of `torch.optim.lr_scheduler`. "
        "Required.",
    )
    params: dict[str, Any] = key({}, "Arguments of the scheduler. Keys with the value `auto` are dropped.")


@dataclass(frozen=True)
class Aio:
    """Settings of NVMe reads and writes. They have no effect, and get a notice, unless states are offloaded to NVMe."""

    block_size: int = key(
        1_048_576, "Bytes per request, and per unit of the division among several folders.", minimum=1
    )
    queue_depth: int = key(8, "Requests in flight per thread.", minimum=1)
    intra_op_parallelism: int = key(
        1, "Threads per transfer, each with `queue_depth` requests.", aliases=("thread_count",), minimum=1
    )
    single_submit: bool = key(False, "Submit one request at a time in each transfer.")
    overlap_events: bool = key(True, "Overlap transfers with computation. false: wait for each transfer at its start.")
    use_gds: bool = noticed(False, "Use GPUDirect Storage.", "transfers go through page-locked host memory")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Storage of the inputs of functions that are recomputed by `onefold.checkpointing.checkpoint`."""

    partition_activations: bool = noticed(
        False,
        "Shard inputs over a model-parallel group.",
        "there is no model-parallel group, so every rank keeps its inputs whole",
    )
    number_checkpoints: int | None = key(
        None,
        "Number of checkpointed calls per forward.",
        switch="contiguous_memory_optimization",
        minimum=1,
        or_false=True,
    )
    contiguous_memory_optimization: bool = key(
        False, "Keep inputs in one buffer of `number_checkpoints` slots. Requires `number_checkpoints`."
    )
    cpu_checkpointing: bool = key(
        False,
        "Keep inputs in host memory. This applies to `torch.utils.checkpoint` in forwards of the engine's model too, "
        "such as after `gradient_checkpointing_enable()` of transformers.",
    )
    synchronize_checkpoint_boundary: bool = key(False, "Synchronize the device before and after each call.")
    profile: bool = key(False, "Time each call and each recomputation. This synchronizes the device.")


@dataclass(frozen=True)
class ParallelWrite:
    """Ranks that write a checkpoint in DeepSpeed."""

    pipeline_stage: bool = noticed(False, "Write from each pipeline stage.", _WRITER)


@dataclass(frozen=True)
class WriterSection:
    """DeepSpeed's checkpoint writer."""

    type: str | None = noticed(None, "Writer type: FAST, PYTHON or MOCK.", _WRITER)
    io_buffer_size: int = noticed(64 * 1024 * 1024, "Bytes per buffer.", _WRITER)
    io_buffer_double: bool = noticed(True, "Use two buffers.", _WRITER)
    io_multiplier: int = noticed(1, "Number of files written at a time.", _WRITER)
    show_statistics: bool = noticed(False, "Print write times.", _WRITER)
    data_parallel: str | None = noticed(None, "Data-parallel ranks that write.", _WRITER)
    decoupled: bool = noticed(False, "Write in the background.", "checkpoint.async does that")


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and loading of checkpoints."""

    async_save: bool = key(
        False, "Copy the states to host memory, and write the files in the background.", aliases=("async",)
    )
    keep_last: int | None = key(
        None, "Number of newest checkpoints to keep in a folder. By default, all are kept.", minimum=1
    )
    keep_every: int | None = key(
        None,
        "Also keep checkpoints whose step is a multiple of this number.",
        switch="keep_last",
        minimum=1,
    )
    private: bool = key(
        False,
        "Create the folders of a checkpoint with mode 0700 and its files with mode 0600. false: with the modes that "
        "the umask leaves.",
    )
    tag_validation: Literal["Warn", "Ignore", "Fail"] = key(
        "Warn", "Reaction to tags that differ between ranks. The tag of rank 0 is used."
    )
    load_universal: bool = noticed(False, "Load universal checkpoints.", "any checkpoint loads on any number of ranks")
    use_node_local_storage: bool = refused(
        False,
        "Save to the local disk of each node.",
        "checkpoints need a file system that all ranks share: a node's own disk is lost with the node",
    )
    checkpoint_serialization: bool = noticed(True, "Serialize the whole checkpoint.", _WRITER)
    parallel_write: ParallelWrite = section(ParallelWrite)
    writer: WriterSection = section(WriterSection)


# -- the whole config ------------------------------------------------------------------------------------------------

FREE_KEYS: dict[str, tuple[type, Key]] = {
    "enabled": (bool, Key("")),
    "autotp_size": (int, Key("", minimum=0)),
    "tp_size": (int, Key("", minimum=0)),
}
"""Keys that are read at any depth of the sections outside the scope, with their types."""


def _is_enabled(value: Any) -> bool:
    """Return whether a feature outside the scope is enabled.

    A section without any `enabled` key counts as enabled if it is not empty.
    """
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
    """Declare a section of DeepSpeed that is outside the scope. It may have any keys and is refused if enabled."""
    return refused({}, doc, reason, requested_if=_is_enabled, requested_text="it is enabled")


@dataclass(frozen=True)
class Config:
    """Parsed config: the value or default of every key, with the notices and refusals that it causes."""

    train_batch_size: int | None = key(
        None, "Samples per optimizer step: micro-batch size x accumulation steps x ranks.", minimum=1
    )
    train_micro_batch_size_per_gpu: int | None = key(None, "Samples per forward on one rank.", minimum=1)
    gradient_accumulation_steps: int | None = key(None, "Forward and backward passes per optimizer step.", minimum=1)
    managed_gradient_accumulation: bool = key(
        True, "Count micro-steps, and run the optimizer at accumulation boundaries only. false: at every `step()`."
    )
    gradient_clipping: float = key(1.0, "Maximum global gradient norm. 0 disables clipping.", minimum=0, infinite=True)
    prescale_gradients: bool = key(False, "Divide gradients before the reduction instead of after it.")
    gradient_predivide_factor: float = key(
        1.0, "Divide gradients by this factor before the reduction, and by the remaining factor after it.", above=0
    )
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean", "Average or sum the gradients. sum is available in stages 0 to 2."
    )
    communication_data_type: Dtype | None = key(
        None, "Data type in which gradients are communicated. The default is the compute format."
    )
    seq_parallel_communication_data_type: Dtype = noticed(
        "fp32",
        "Data type in which gradients are communicated with sequence parallelism.",
        "gradients of all ranks are reduced in communication_data_type",
    )
    sparse_gradients: bool = refused(
        False, "Communicate sparse gradients.", "onefold stores gradients in flat dense buffers; leave it out"
    )
    steps_per_print: int | None = key(
        None, "Steps between two progress lines. By default, and for 0 or Infinity: none.", minimum=0, infinite=True
    )
    wall_clock_breakdown: bool = key(False, "Time forward, backward and step.")
    memory_breakdown: bool = key(False, "Report memory at each phase of a step.")
    disable_python_gc: bool = key(
        False, "Run Python's garbage collector once, then disable it until the engine is closed."
    )
    max_grad_norm: float | None = refused(
        None, "A key that DeepSpeed ignores.", "it does not clip gradients; write gradient_clipping"
    )
    dump_state: bool = noticed(False, "Print the engine's state.", "`onefold plan` shows the states of a config")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = key(None, "Level of the logger.")
    dataloader_drop_last: bool = key(False, "Drop the last, incomplete batch.")
    zero_allow_untested_optimizer: bool = key(
        False, "Allow optimizers that are not known to be elementwise.", from_stage=1
    )
    zero_force_ds_cpu_optimizer: bool = noticed(
        True, "Require DeepSpeed's CPU optimizer.", "any elementwise optimizer runs on the host"
    )
    disable_allgather: bool = noticed(
        False,
        "A key that DeepSpeed ignores.",
        "updated shards are always gathered; DeepSpeed never read this key either",
    )
    vocabulary_size: int | None = noticed(
        None, "Vocabulary size, for an alignment warning.", "parameters are aligned by construction"
    )
    graph_harvesting: bool = noticed(
        False, "Capture the optimizer step in CUDA graphs.", "the step is already a few fused kernels"
    )
    sequence_parallel_size: int = key(
        1,
        "Number of neighbouring ranks that compute parts of the same sequences and exchange attention heads. "
        "`engine.sequence_parallel` divides batches. It must divide the number of ranks and of attention heads.",
        minimum=1,
    )
    data_parallel_size: int | None = noticed(
        None,
        "Size of the data-parallel group.",
        "it follows from the number of ranks and sequence_parallel_size",
        minimum=1,
    )
    use_data_before_expert_parallelism: bool = noticed(
        False, "Order of the mesh dimensions.", "ranks with the same experts are neighbours"
    )
    zero_optimization: ZeroOptimization = section(ZeroOptimization)
    onefold: OnefoldSection = section(OnefoldSection)
    optimizer: OptimizerSection | None = key(None, "Optimizer that the engine builds.")
    scheduler: SchedulerSection | None = key(None, "Learning rate scheduler that the engine builds and steps.")
    fp16: Fp16 = section(Fp16)
    bf16: Bf16 = section(Bf16, aliases=("bfloat16",))
    fp8: Fp8 = section(Fp8)
    torch_autocast: TorchAutocast = section(TorchAutocast)
    data_types: DataTypes = section(DataTypes)
    aio: Aio = section(Aio)
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    checkpoint: CheckpointSection = section(CheckpointSection)
    comms_logger: CommsLogger = section(CommsLogger)
    timers: Timers = section(Timers)
    flops_profiler: FlopsProfiler = section(FlopsProfiler)
    tensorboard: FileMonitor = section(
        FileMonitor, "Training events that rank 0 writes for TensorBoard. Requires the package `tensorboard`."
    )
    csv_monitor: FileMonitor = section(FileMonitor, "Training events that rank 0 writes as CSV, one file per metric.")
    wandb: Wandb = section(Wandb)
    comet: Comet = section(Comet)
    elasticity: Elasticity = section(Elasticity)
    autotuning: Autotuning = section(Autotuning)
    compile: Compile = section(Compile)
    nebula: Nebula = section(Nebula)
    amp: dict[str, Any] = _outside(
        "Mixed precision with Apex.", "Apex is superseded by bf16, fp16 and torch_autocast; use one of those"
    )
    tensor_parallel: dict[str, Any] = refused(
        {},
        "Tensor parallelism.",
        "tensor parallelism is outside onefold's scope; leave it out",
        requested_if=_tensor_parallel,
        requested_text="`autotp_size` is above 1",
    )
    pipeline: dict[str, Any] = _outside("Pipeline parallelism.")
    progressive_layer_drop: dict[str, Any] = _outside("Progressive layer dropping.")
    eigenvalue: dict[str, Any] = _outside("Curvature estimates.")
    sparse_attention: dict[str, Any] = _outside("Sparse attention kernels.")
    curriculum_learning: dict[str, Any] = _outside("Curriculum learning.")
    data_efficiency: dict[str, Any] = _outside("Data sampling and routing.")
    compression_training: dict[str, Any] = _outside("Compression during training.")
    hybrid_engine: dict[str, Any] = _outside("Text generation during training.")
    expert_parallel: ExpertParallelism = section(ExpertParallelism)
    weight_quantization: dict[str, Any] = _outside("Quantized weights for inference.")
    datastates_ckpt: dict[str, Any] = _outside("DataStates' asynchronous checkpoint engine.")

    notices: tuple[str, ...] = ()
    """One line for each given key that is accepted without effect."""
    refusals: tuple[str, ...] = ()
    """One line for each requested feature that onefold does not offer. `check_built` raises if there is one."""
    unknown: tuple[str, ...] = ()
    """Top-level keys that resemble no known key, if `load_config` was called with `lists_unknown`."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The given config in DeepSpeed's schema, without defaults."""

    @property
    def compute_dtype(self) -> Dtype:
        """Data type of the model's parameters in forward and backward."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> Dtype:
        """Data type of `torch_autocast`: by default the 16-bit type of the parameters, otherwise bf16."""
        own = "fp16" if self.fp16.enabled else "bf16"
        return self.torch_autocast.dtype or own  # type: ignore[return-value]

    @property
    def state_dtype(self) -> Literal["fp32", "int8", "bf16"]:
        """Data type of the optimizer states, from `bf16.bf16_optimizer_states`, `optimizer.type` or `onefold`."""
        if self.bf16.enabled and self.bf16.bf16_optimizer_states:
            return "bf16"
        if self.optimizer is not None and is_8bit(self.optimizer.type):
            return "int8"
        return self.onefold.state_dtype

    @property
    def expert_parallel_size(self) -> int:
        """Number of parts of experts, from `onefold.expert_parallel_size` or DeepSpeed's `expert_parallel`."""
        return max(
            self.onefold.expert_parallel_size, self.expert_parallel.autoep_size if self.expert_parallel.enabled else 1
        )
