"""Sections of DeepSpeed features that onefold refuses: their keys are checked before the refusal."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from onefold.config.keys import key, refused

_if_enabled = partial(key, switch="enabled")
_if_compiled = partial(key, switch="deepcompile")


@dataclass(frozen=True)
class FlopsProfiler:
    """Profiler of floating-point operations."""

    enabled: bool = refused(
        False,
        "Profile one step.",
        "the flops profiler comes with a later release; onefold.Profiling times a loop today",
    )
    recompute_fwd_factor: float = _if_enabled(0.0, "Fraction of the forward that is recomputed.")
    profile_step: int = _if_enabled(1, "Step to profile.")
    module_depth: int = _if_enabled(-1, "Depth of the printed module tree.")
    top_modules: int = _if_enabled(1, "Number of modules printed at each depth.")
    detailed: bool = _if_enabled(True, "Print every module.")
    output_file: str | None = _if_enabled(None, "File for the output.")


@dataclass(frozen=True)
class Autotuning:
    """Search for the fastest config by running experiments."""

    enabled: bool = refused(
        False, "Run the search.", "training does not search; `onefold tune` searches before it, so leave this out"
    )
    fast: bool = _if_enabled(True, "Search micro-batch sizes only.")
    results_dir: str | None = _if_enabled(None, "Folder for results.")
    exps_dir: str | None = _if_enabled(None, "Folder for experiments.")
    overwrite: bool = _if_enabled(True, "Repeat experiments that have results.")
    start_profile_step: int = _if_enabled(3, "First measured step.")
    end_profile_step: int = _if_enabled(5, "Last measured step.")
    metric: Literal["throughput", "latency", "flops"] = _if_enabled("throughput", "Metric to optimize.")
    metric_path: str | None = _if_enabled(None, "File with the metric.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = _if_enabled("gridsearch", "Search algorithm.")
    tuner_early_stopping: int = _if_enabled(5, "Number of experiments without improvement after which the search ends.")
    tuner_num_trials: int = _if_enabled(50, "Maximum number of experiments.")
    arg_mappings: dict[str, str] = _if_enabled({}, "Arguments of the script, by config key.")
    max_train_batch_size: int | None = _if_enabled(None, "Maximum batch size.")
    min_train_batch_size: int | None = _if_enabled(None, "Minimum batch size.")
    max_train_micro_batch_size_per_gpu: int = _if_enabled(1024, "Maximum micro-batch size.")
    min_train_micro_batch_size_per_gpu: int = _if_enabled(1, "Minimum micro-batch size.")
    num_tuning_micro_batch_sizes: int = _if_enabled(3, "Number of micro-batch sizes to try.")
    mp_size: int = _if_enabled(1, "Size of the model-parallel group.")
    model_info: dict[str, Any] = _if_enabled({}, "Properties of the model.")
    model_info_path: str | None = _if_enabled(None, "File with the properties of the model.")


@dataclass(frozen=True)
class Compile:
    """DeepSpeed's compiler passes."""

    deepcompile: bool = refused(
        False, "Rewrite the compiled graph.", "graph passes are outside onefold's scope; compile the blocks instead"
    )
    free_activation: bool = _if_compiled(False, "Free activations early.")
    free_activation_threshold: int = _if_compiled(
        10 * 1024 * 1024, "Size in bytes above which activations are freed early."
    )
    offload_activation: bool = _if_compiled(False, "Offload activations.")
    offload_activation_pin_memory: bool = _if_compiled(True, "Offload activations to page-locked memory.")
    offload_opt_states: bool = _if_compiled(False, "Offload optimizer states.")
    double_buffer: bool = _if_compiled(True, "Use two communication buffers.")
    symmetric_memory: bool = _if_compiled(False, "Gather through symmetric memory.")
    debug_log: bool = _if_compiled(False, "Log the passes.")
    offload_parameters: bool = _if_compiled(False, "Offload parameters.")
    sync_before_reduce: bool = _if_compiled(False, "Synchronize before each reduction.")
    sync_after_reduce: bool = _if_compiled(False, "Synchronize after each reduction.")
    sync_before_allgather: bool = _if_compiled(False, "Synchronize before each all-gather.")
    sync_after_allgather: bool = _if_compiled(False, "Synchronize after each all-gather.")
    keep_int_input_tensors: bool = _if_compiled(True, "Keep integer inputs.")
    keep_all_input_tensors: bool = _if_compiled(False, "Keep all inputs.")
    autoep_non_moe: bool = _if_compiled(False, "Compile only layers without experts.")
    passes: tuple[str, ...] | None = _if_compiled(None, "Passes to run.")


@dataclass(frozen=True)
class Nebula:
    """Azure's checkpoint service."""

    enabled: bool = refused(False, "Use the service.", "one vendor's service is outside onefold's scope; leave it out")
    load_path: str | None = _if_enabled(None, "Path to load from.")
    enable_nebula_load: bool = _if_enabled(True, "Load checkpoints through the service.")
    persistent_storage_path: str | None = _if_enabled(None, "Path of persistent copies.")
    persistent_time_interval: int = _if_enabled(100, "Seconds between two copies.")
    num_of_version_in_retention: int = _if_enabled(2, "Number of copies to keep.")
