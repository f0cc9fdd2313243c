"""Checks across the keys of a config: old spellings, contradictions, notices and refusals.

[Note: support status], in `keys.py`, explains notices and refusals.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from onefold.config.elasticity import check_elasticity
from onefold.config.keys import SectionKey, walk, wrong
from onefold.config.params import is_8bit
from onefold.config.schema import FREE_KEYS, Config, OptimizerSection, SchedulerSection
from onefold.config.zero_optimization import OffloadOptimizer, OffloadParam
from onefold.errors import ConfigError
from onefold.redaction import HIDDEN, is_secret_name
from onefold.storage.object_path import StorageError
from onefold.storage.place import place

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


@dataclass
class GivenKeys:
    """The keys that a config gives: values by path, and all mentioned keys, including those with the value `auto`."""

    values: dict[str, Any] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    old_spellings: list[str] = field(default_factory=list)
    names_in_file: dict[str, str] = field(default_factory=dict)
    """The names that the file uses, by path."""
    params: dict[str, type] = field(default_factory=dict)
    """The section classes of `optimizer.params` and `scheduler.params`, by path."""


# -- old spellings ---------------------------------------------------------------------------------------------------


def settle_old_spellings(config: Config, given: GivenKeys) -> Config:
    """Replace old spellings by their current form, so that the rest of onefold handles one form only."""
    zero = config.zero_optimization
    pin = zero.cpu_offload_use_pin_memory
    pins: dict[str, Any] = {} if pin is None else {"pin_memory": pin}
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if zero.cpu_offload:
        _move_offload(given, "cpu_offload", "offload_optimizer")
        optimizer = replace(optimizer, device="cpu", **pins)
    if zero.cpu_offload_param:
        _move_offload(given, "cpu_offload_param", "offload_param")
        param = replace(param, device="cpu", **pins)
    if pins and not (zero.cpu_offload or zero.cpu_offload_param):
        given.old_spellings.append(
            "zero_optimization.cpu_offload_use_pin_memory: it has no effect without zero_optimization.cpu_offload"
        )
    optimizer = replace(optimizer, **_settle_offload("offload_optimizer", optimizer, read=True))
    param = replace(param, **_settle_offload("offload_param", param, read=zero.stage == 3))
    own = config.onefold
    if own.report is not None:
        own = replace(own, report=_folder("onefold.report", own.report, may_be_url=True))
    if own.stall.folder is not None:
        own = replace(own, stall=replace(own.stall, folder=_folder("onefold.stall.folder", own.stall.folder)))
    if config.optimizer is not None and is_8bit(config.optimizer.type):
        asked = given.values.get("onefold.state_dtype", "int8")
        if asked != "int8":
            raise ConfigError(
                f"optimizer.type = {config.optimizer.type} selects 8-bit states, but onefold.state_dtype = {asked}. "
                "Keep one of them."
            )
    return replace(
        config,
        onefold=own,
        zero_optimization=replace(zero, offload_optimizer=optimizer, offload_param=param),
        steps_per_print=config.steps_per_print or None,
        optimizer=config.optimizer if _has_content(config.optimizer) else None,
        scheduler=config.scheduler if _has_content(config.scheduler) else None,
    )


def _settle_offload(name: str, offload: OffloadParam | OffloadOptimizer, *, read: bool) -> dict[str, Any]:
    """Return the changes to an offload section: expanded folders, and `pin_memory` reset if nothing is offloaded."""
    settled: dict[str, Any] = {}
    if offload.device == "nvme":
        path = f"zero_optimization.{name}.nvme_path"
        settled["nvme_path"] = tuple(_folder(path, folder) for folder in offload.nvme_path)
    if offload.device == "none" or not read:
        settled["pin_memory"] = True
    return settled


def _folder(path: str, given: str, *, may_be_url: bool = False) -> str:
    folder = os.path.expanduser(os.path.expandvars(given.strip()))
    if not folder:
        raise wrong(path, given, "the name of a folder")
    if may_be_url:
        try:
            folder = str(place(folder))
        except StorageError as error:
            raise ConfigError(f"{path}: {error}") from None
    elif "://" in folder:
        raise ConfigError(f"{path} = {given!r}: must be a path of a file system, not a URL")
    if "$" in folder or folder.startswith("~"):
        raise ConfigError(
            f"{path} = {given!r}: {folder!r} contains a variable or a user that is not known on this node; export the "
            "variable on every node, or write the whole path"
        )
    return folder


def _has_content(section: OptimizerSection | SchedulerSection | None) -> bool:
    """Return whether a section has any content. An empty section, or one with only `auto` values, counts as absent."""
    return section is not None and bool(section.type or section.params)


def _move_offload(given: GivenKeys, old: str, new: str) -> None:
    path = f"zero_optimization.{new}"
    if f"{path}.device" in given.values:
        raise ConfigError(f"zero_optimization.{old} and {path}.device are two spellings of one key. Keep {path}.")
    given.values[f"{path}.device"] = "cpu"
    given.mentioned.add(f"{path}.device")
    given.old_spellings.append(f"zero_optimization.{old}: an old spelling of {path}.device = cpu")


# -- contradictions --------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raise a ConfigError for the first contradiction, with the keys and the fix."""
    check_elasticity(config.elasticity, [name for name in _BATCH if getattr(config, name) is not None])
    contradiction = next(_contradictions(config), None)
    if contradiction is not None:
        raise ConfigError(contradiction)


def _contradictions(config: Config) -> Iterator[str]:
    zero, fp16, bf16, autocast = config.zero_optimization, config.fp16, config.bf16, config.torch_autocast
    if fp16.enabled and bf16.enabled:
        yield "fp16.enabled and bf16.enabled are both true. Set one of them to false."
    if autocast.enabled and config.compute_dtype not in ("fp32", config.autocast_dtype):
        yield (
            f"torch_autocast.dtype = {config.autocast_dtype}, but the parameters are {config.compute_dtype}. Write "
            f"{config.compute_dtype}, or set {config.compute_dtype}.enabled to false."
        )
    if autocast.enabled and autocast.dtype == "fp32":
        yield "torch_autocast.dtype = fp32, but autocast needs a lower precision. Write bf16 or fp16."
    wanted, has = config.data_types.param_dtype, config.compute_dtype
    if wanted is not None and wanted != has:
        fix = "Leave out data_types.param_dtype" if wanted == "fp32" else f"Set {wanted}.enabled to true"
        yield f"data_types.param_dtype = {wanted}, but fp16.enabled and bf16.enabled select {has}. {fix}."
    if bf16.enabled and bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads. Set both, or onefold.state_dtype."
    if config.fp8.enabled and config.fp8.all_gather and (conflict := fp8_gather_conflict(config)):
        yield f"fp8.all_gather is true, but {conflict}. Leave one of them out."
    yield from _state_contradictions(config)
    masters = {"fp16": fp16.fp16_master_weights_and_grads, "bf16": bf16.bf16_master_weights_and_grads}
    for name, on in masters.items():
        if on and zero.stage == 0:
            yield f"{name}.{name}_master_weights_and_grads needs zero_optimization.stage 1, 2 or 3. Leave it out."
    others = {"zero_optimization.zenflow": zero.zenflow, "compile.deepcompile": config.compile.deepcompile}
    for name, asked in others.items():
        if asked and config.gradient_allreduce_op == "sum":
            yield f"gradient_allreduce_op = sum cannot be combined with {name}; write mean, and scale the loss"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer needs stage 1, 2 or 3 (stage is 0). "
            "Set zero_optimization.stage, or leave offload_optimizer out."
        )
    for name, offload in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and not offload.nvme_path:
            path = f"zero_optimization.{name}"
            yield f"{path}.device = nvme needs a folder on the NVMe drive. Set {path}.nvme_path."
    examples = ("optimizer", config.optimizer, "AdamW"), ("scheduler", config.scheduler, "WarmupLR")
    for name, section, example in examples:
        if section is not None and not section.type:
            yield f'{name}.type is missing. Name the class, for example "{example}".'
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        yield (
            f"optimizer.params.max_grad_norm = {config.optimizer.params['max_grad_norm']!r}: optimizers do not clip. "
            f"Set the top-level key gradient_clipping instead."
        )
    steps = config.onefold.trace.steps
    if steps is not None and steps[0] > steps[1]:
        yield f"onefold.trace.steps = {list(steps)}: the first step is after the last. Write {[*reversed(steps)]}."
    # The batch keys must allow some whole number of ranks. `solve_batch` checks the actual number.
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    product = (micro or 1) * (accumulation or 1)
    if train is not None and train % product and not config.elasticity.enabled:
        yield (
            f"train_batch_size {train} is not a multiple of train_micro_batch_size_per_gpu {micro or 'any'} x "
            f"gradient_accumulation_steps {accumulation or 'any'} = {product}, so no number of ranks fits. "
            f"Write for example train_batch_size {max(1, round(train / product)) * product}."
        )


def _state_contradictions(config: Config) -> Iterator[str]:
    own, bf16 = config.onefold, config.bf16
    if own.master_dtype != "fp32" and not bf16.enabled:
        yield (
            f"onefold.master_dtype = {own.master_dtype} needs bf16 weights; set bf16.enabled to true, or leave "
            "master_dtype out"
        )
    if bf16.enabled and bf16.bf16_master_weights_and_grads and own.master_dtype not in ("fp32", "bf16"):
        yield f"bf16.bf16_master_weights_and_grads and onefold.master_dtype = {own.master_dtype} differ. Keep one."
    if bf16.enabled and bf16.bf16_optimizer_states and own.state_dtype not in ("fp32", "bf16"):
        yield f"bf16.bf16_optimizer_states and onefold.state_dtype = {own.state_dtype} differ. Keep one of them."
    name = config.optimizer.type if config.optimizer is not None else ""
    if is_8bit(name) and bf16.enabled and bf16.bf16_optimizer_states:
        yield f"optimizer.type = {name} selects 8-bit states, but bf16.bf16_optimizer_states is set. Keep one of them."


def fp8_gather_conflict(config: Config) -> str | None:
    """Return the key that excludes all-gathers in FP8, or None."""
    zero, fp8 = config.zero_optimization, config.fp8
    return next(
        (
            f"{name} = {value}"
            for name, value, excludes in (
                ("fp8.recipe", fp8.recipe, fp8.recipe == "rowwise"),
                ("onefold.delayed_host_step", "true", config.onefold.delayed_host_step),
                (
                    "zero_optimization.offload_param.device",
                    zero.offload_param.device,
                    zero.offload_param.device != "none",
                ),
                (
                    "zero_optimization.zero_hpz_partition_size",
                    zero.zero_hpz_partition_size,
                    zero.zero_hpz_partition_size > 1,
                ),
                ("zero_optimization.zero_quantized_weights", "true", zero.zero_quantized_weights),
            )
            if excludes
        ),
        None,
    )


# -- notices and refusals for the given keys -------------------------------------------------------------------------


def find_refusals(given: GivenKeys) -> list[str]:
    """Return one line for each value that requests an unsupported feature."""
    return [
        f"{_shown(given, path, entry)}: {entry.key.refused}"
        for path, entry, value in _entries(given)
        if entry.key.refused is not None and entry.is_requested(value)
    ]


def find_notices(config: Config, given: GivenKeys) -> list[str]:
    """Return one line for each value that is accepted without effect."""
    lines = list(given.old_spellings)
    zero = config.zero_optimization
    devices = {name: getattr(zero, name).device for name in ("offload_param", "offload_optimizer")}
    uses_nvme = "nvme" in devices.values()
    for path, entry, value in _entries(given):
        if uses_nvme or not path.startswith("aio."):
            lines += _notice(config, given, path, entry, value)
    if not uses_nvme and any(path.startswith("aio.") for path in given.values):
        lines.append("aio: it has no effect unless states are offloaded to NVMe")
    for name, device in devices.items():
        if getattr(zero, name).nvme_path and device != "nvme":
            lines.append(
                f"zero_optimization.{name}.nvme_path: it has no effect unless device is nvme (device is {device})"
            )
    lines += _without_effect(config, {path for path, entry, value in _entries(given) if entry.is_requested(value)})
    return lines


def _without_effect(config: Config, asked: set[str]) -> Iterator[str]:
    """Iterate over notices for keys that other keys disable, other than by a switch or the stage.

    `asked` contains the paths of keys whose values request something.
    """
    zero, own = config.zero_optimization, config.onefold
    if zero.stage == 3 and zero.offload_param.device != "none" and zero.offload_optimizer.device == "none":
        yield (
            "zero_optimization.offload_param: shards are cast from master weights, which stay on the device without "
            "zero_optimization.offload_optimizer; only frozen parameters are offloaded"
        )
    if config.data_types.keep_in_fp32_modules and config.compute_dtype == "fp32":
        yield "data_types.keep_in_fp32_modules: it has no effect without bf16.enabled or fp16.enabled"
    fills_tiers = zero.offload_optimizer.device != "none" and zero.offload_optimizer.ratio is None
    for name in ("device_memory", "host_memory"):
        limits_speculation = name == "host_memory" and own.step_in_backward
        if getattr(own, name) is not None and not fills_tiers and not limits_speculation:
            yield f'onefold.{name}: it has no effect unless zero_optimization.offload_optimizer.ratio is "auto"'
    if fills_tiers and zero.offload_optimizer.max_in_cpu:
        yield (
            'zero_optimization.offload_optimizer.max_in_cpu: it has no effect with ratio "auto", which fills host '
            "memory up to onefold.host_memory"
        )
    if "onefold.trace.path" in asked and own.trace.steps is None and not own.trace.memory_snapshot:
        yield "onefold.trace.path: it has no effect without onefold.trace.steps or onefold.trace.memory_snapshot"
    rolls_back = "rollback" in (
        own.nonfinite_gradients,
        *(spike.factor and spike.action for spike in (own.loss_spike, own.grad_norm_spike)),
    )
    if "onefold.max_rollbacks" in asked and not rolls_back:
        yield (
            "onefold.max_rollbacks: it has no effect unless onefold.nonfinite_gradients, onefold.loss_spike.action or "
            'onefold.grad_norm_spike.action is "rollback"'
        )
    if "onefold.stop.seconds" in asked and not own.stop.handled:
        yield "onefold.stop.seconds: it has no effect without onefold.stop.save_to or onefold.stop.signals"
    if "onefold.int8_min_numel" in asked and config.state_dtype != "int8":
        yield f"onefold.int8_min_numel: it has no effect without onefold.state_dtype = int8 (it is {own.state_dtype})"
    if own.fp32_state_names and config.state_dtype == "fp32":
        yield "onefold.fp32_state_names: it has no effect, because all states are fp32 without onefold.state_dtype"
    if own.offloaded_step != "auto" and (zero.offload_optimizer.device == "none" or own.delayed_host_step):
        cause = "with" if own.delayed_host_step else "without"
        other = "onefold.delayed_host_step" if own.delayed_host_step else "zero_optimization.offload_optimizer"
        yield f"onefold.offloaded_step: it has no effect {cause} {other}"
    if own.delayed_host_step and zero.offload_optimizer.device == "none":
        yield "onefold.delayed_host_step: it has no effect without zero_optimization.offload_optimizer"
    if "onefold.device_cache" in asked and zero.offload_optimizer.device == zero.offload_param.device == "none":
        yield "onefold.device_cache: it has no effect without zero_optimization.offload_optimizer or offload_param"
    if own.step_in_backward and zero.offload_optimizer.device == "none":
        yield "onefold.step_in_backward: it has no effect without zero_optimization.offload_optimizer"
    if config.elasticity.enabled and config.elasticity.version == 0.1 and "elasticity.num_gpus_per_node" in asked:
        yield "elasticity.num_gpus_per_node: it has no effect with elasticity.version 0.1, which counts ranks"
    if zero.zero_quantized_gradients and config.communication_data_type is not None:
        yield "communication_data_type: it has no effect with zero_optimization.zero_quantized_gradients"
    if "onefold.node_sums_dtype" in asked and (own.collective != "auto" or zero.zero_quantized_gradients):
        cause = "zero_optimization.zero_quantized_gradients" if own.collective == "auto" else "onefold.collective"
        yield f"onefold.node_sums_dtype: it has no effect with this {cause}"
    if zero.mics_shard_size == 0:
        yield "zero_optimization.mics_shard_size = 0: states are sharded over all ranks, as with -1"
    if zero.stage == 3 and zero.overlap_comm is False and "zero_optimization.stage3_prefetch_bucket_size" in asked:
        yield "zero_optimization.stage3_prefetch_bucket_size: it has no effect if overlap_comm is false"
    if config.gradient_allreduce_op == "sum":
        divides = ("prescale_gradients", "gradient_predivide_factor")
        yield from (f"{name}: it has no effect with gradient_allreduce_op sum" for name in divides if name in asked)
    elif config.prescale_gradients and "gradient_predivide_factor" in asked:
        yield "gradient_predivide_factor: it has no effect with prescale_gradients, which divides by all ranks"
    if config.fp16.loss_scale > 0 and _scales_loss(config):
        fixed = (f"fp16.{name}" for name in _DYNAMIC)
        yield from (f"{path}: it has no effect with a fixed fp16.loss_scale" for path in fixed if path in asked)


def _entries(given: GivenKeys) -> Iterator[tuple[str, SectionKey, Any]]:
    params = (walk(kind, section) for section, kind in given.params.items())
    for path, entry in chain(walk(Config), *params):
        if path in given.values:
            yield path, entry, given.values[path]


def _notice(config: Config, given: GivenKeys, path: str, entry: SectionKey, value: Any) -> Iterator[str]:
    key, stage = entry.key, config.zero_optimization.stage
    shown = _shown(given, path, entry)
    if key.refused is not None and entry.is_requested(value):
        return  # reported as a refusal
    if key.notice is not None and entry.is_requested(value):
        yield f"{shown}: {key.notice}"
    elif key.from_stage > stage and _is_intended(entry, value):
        yield f"{shown}: it has no effect below stage {key.from_stage} (stage is {stage})"
    elif key.switch is not None and entry.is_requested(value) and not _is_on(config, path, entry):
        switch = f"{path.rpartition('.')[0]}.{key.switch}"
        needed = switch if key.needs is None else f"{switch} = {key.needs}"
        has = f" (it is {json.dumps(attrgetter(switch)(config))})" if switch in given.mentioned else ""
        yield f"{shown}: it has no effect without {needed}{has}"
    elif entry.is_free and key.refused is not None and value and not _only_switches(value):
        yield f"{path}: the feature is off, so its other keys have no effect"


def _is_on(config: Config, path: str, entry: SectionKey) -> bool:
    """Return whether the switch that enables a key is on."""
    section, key = path.rpartition(".")[0], entry.key
    if section == "fp16" and entry.name != "auto_cast":
        return _scales_loss(config)
    value = attrgetter(f"{section}.{key.switch}")(config)
    return bool(value == key.needs) if key.needs is not None else value not in (None, False, "none")


def _scales_loss(config: Config) -> bool:
    # Autocast to fp16 uses the same keys for its loss scale.
    return config.fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")


def _only_switches(value: Any) -> bool:
    """Return whether an object outside the scope contains only the keys that are read (`FREE_KEYS`)."""
    if isinstance(value, dict):
        return all(name in FREE_KEYS or _only_switches(inner) for name, inner in value.items())
    return False


def _is_intended(entry: SectionKey, value: Any) -> bool:
    # A user who writes a number expects it to have an effect, even if it equals the default.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return True if is_number and entry.key.requested_if is None else entry.is_requested(value)


def _shown(given: GivenKeys, path: str, entry: SectionKey) -> str:
    """Format a key under the name that the file uses, with its value if that is a scalar."""
    name, value = given.names_in_file.get(path, path), given.values[path]
    if entry.key.auto and value is None:
        value = "auto"
    if is_secret_name(name):
        return f"{name} = {HIDDEN}"
    return f"{name} = {json.dumps(value)}" if isinstance(value, bool | int | float | str) else name
