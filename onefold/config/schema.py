"""The whole config: top-level keys, and one attribute a section, all under the names of the JSON file."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule wants.

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onefold.config.keys import Key, key, section
from onefold.config.precision import Bf16, DataTypes, Dtype, Fp16, TorchAutocast
from onefold.config.sections import (
    ActivationCheckpointing,
    Aio,
    Autotuning,
    Checkpoint,
    Comet,
    CommsLogger,
    Compile,
    Elasticity,
    FileMonitor,
    FlopsProfiler,
    Nebula,
    OnefoldSection,
    OptimizerSection,
    SchedulerSection,
    Timers,
    Wandb,
)
from onefold.config.zero import ZeroOptimization

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


def _find(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        for inner_name, inner in value.items():
            if inner_name == name:
                yield inner
            else:
                yield from _find(name, inner)


def _tensor_parallel(value: Any) -> bool:
    sizes = [*_find("autotp_size", value), *_find("tp_size", value)]
    return any(size > 1 for size in sizes)


def _outside(doc: str) -> Any:
    """A section that belongs to another part of DeepSpeed: any keys, refused when it asks for something."""
    reason = "it is outside onefold's scope, which is ZeRO data parallelism; leave it out"
    return key({}, doc, refused=reason, asks=_switched_on, asks_text="it asks for something")


@dataclass(frozen=True)
class Config:
    """A config as it was read: every key with its value or default, and what there is to say about it."""

    train_batch_size: int | None = key(
        None, "Samples in one optimizer step, over all ranks: micro-batch x accumulation x ranks.", minimum=1
    )
    train_micro_batch_size_per_gpu: int | None = key(None, "Samples in one forward of one rank.", minimum=1)
    gradient_accumulation_steps: int | None = key(None, "Forwards and backwards in one optimizer step.", minimum=1)
    managed_gradient_accumulation: bool = key(
        True, "The engine counts micro-steps; false: every `step()` is a boundary."
    )
    gradient_clipping: float = key(1.0, "The largest global gradient norm; 0: no clipping.", minimum=0, infinite=True)
    prescale_gradients: bool = key(False, "Divide gradients before they are added instead of after.")
    gradient_predivide_factor: float = key(1.0, "Divide by this before, by the rest after adding.", above=0)
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean", "Average or add the ranks' gradients (sum: stages 0-2)."
    )
    communication_data_type: Dtype | None = key(None, "Gradients travel in it; the compute format when left out.")
    seq_parallel_communication_data_type: Dtype = key(
        "fp32", "Gradients travel in it with sequence parallelism.", notice="there is no sequence parallelism here"
    )
    sparse_gradients: bool = key(
        False, "Sparse embedding gradients.", refused="gradients lie in flat dense buffers; leave it out"
    )
    steps_per_print: int | None = key(
        None, "Steps between two progress lines; left out, 0 or Infinity: never.", minimum=0, infinite=True
    )
    wall_clock_breakdown: bool = key(False, "Time forward, backward and step.")
    memory_breakdown: bool = key(False, "Report memory at each phase of a step.")
    dump_state: bool = key(False, "Print the engine's state.", notice="the plan of a config says what the engine holds")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = key(
        None, "Level of the `onefold` logger."
    )
    dataloader_drop_last: bool = key(False, "Drop the last, incomplete batch.")
    zero_allow_untested_optimizer: bool = key(
        False, "Step optimizer classes that are not known to be elementwise.", from_stage=1
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True, "Insist on DeepSpeed's host optimizer.", notice="any elementwise optimizer runs on the host"
    )
    disable_allgather: bool = key(
        False,
        "Never read by DeepSpeed.",
        notice="updated shards are always gathered; DeepSpeed never read this key either",
    )
    vocabulary_size: int | None = key(
        None, "For an alignment warning.", notice="parameters are aligned by construction"
    )
    graph_harvesting: bool = key(
        False, "CUDA graphs of one optimizer.", notice="the step is already a few fused kernels"
    )
    sequence_parallel_size: int = key(
        1,
        "Ranks that share a sequence.",
        refused="sequence parallelism is outside onefold's scope; leave it out",
        minimum=1,
    )
    data_parallel_size: int | None = key(
        None, "Ranks that share the data.", notice="data parallelism always spans all ranks", minimum=1
    )
    use_data_before_expert_parallelism: bool = key(
        False, "Order of the mesh.", notice="there is no expert parallelism here"
    )
    zero_optimization: ZeroOptimization = section(
        ZeroOptimization, "What is sharded, where it rests, and how it travels."
    )
    onefold: OnefoldSection = section(OnefoldSection, "Keys of onefold's own.")
    optimizer: OptimizerSection | None = key(None, "The optimizer that the engine builds.")
    scheduler: SchedulerSection | None = key(None, "The learning-rate scheduler that the engine builds and steps.")
    fp16: Fp16 = section(Fp16, "Compute in fp16 with fp32 masters and a loss scale.")
    bf16: Bf16 = section(Bf16, "Compute in bf16 with fp32 masters.", aliases=("bfloat16",))
    torch_autocast: TorchAutocast = section(TorchAutocast, "Parameters stay fp32, `torch.autocast` picks formats.")
    data_types: DataTypes = section(DataTypes, "Number formats beside the compute format.")
    aio: Aio = section(Aio, "How NVMe is read and written; a notice says so when nothing rests there.")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing,
        "What `onefold.checkpointing.checkpoint` does with the inputs of the functions that it computes again.",
    )
    checkpoint: Checkpoint = section(Checkpoint, "Saving and loading.")
    comms_logger: CommsLogger = section(CommsLogger, "Logs collectives.")
    timers: Timers = section(Timers, "Timers that always run in DeepSpeed.")
    flops_profiler: FlopsProfiler = section(FlopsProfiler, "Counts floating-point operations.")
    tensorboard: FileMonitor = section(FileMonitor, "Writes events for TensorBoard.")
    csv_monitor: FileMonitor = section(FileMonitor, "Writes events as CSV.")
    wandb: Wandb = section(Wandb, "Sends events to Weights & Biases.")
    comet: Comet = section(Comet, "Sends events to Comet.")
    elasticity: Elasticity = section(Elasticity, "Batch sizes that fit several numbers of ranks.")
    autotuning: Autotuning = section(Autotuning, "Searches for a config by running many.")
    compile: Compile = section(Compile, "DeepSpeed's compiler passes.")
    nebula: Nebula = section(Nebula, "Azure's checkpoint service.")
    amp: dict[str, Any] = key(
        {},
        "Mixed precision by Apex.",
        refused="Apex is superseded by bf16, fp16 and torch_autocast; use one of those",
        asks=_switched_on,
        asks_text="it asks for something",
    )
    tensor_parallel: dict[str, Any] = key(
        {},
        "Splits layers over ranks.",
        refused="tensor parallelism is outside onefold's scope; leave it out",
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
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The config as it was given, in DeepSpeed's schema, before anything was filled in."""

    @property
    def compute_dtype(self) -> Dtype:
        """The format of the model's parameters in forward and backward."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"
