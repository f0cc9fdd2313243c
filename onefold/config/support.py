"""The support status of the keys that a config gives: a notice or a refusal each, in words ([Note: support status])."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from onefold.config.keys import SectionKey, walk
from onefold.config.schema import FREE_KEYS, Config

_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


@dataclass
class GivenKeys:
    """What a config gives: values by the path of their key, and the keys that were there even if only as `auto`."""

    values: dict[str, Any] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    old_spellings: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    """Keys as the file spells them, by path."""
    params: dict[str, type] = field(default_factory=dict)
    """The sections that `optimizer.params` and `scheduler.params` are read as, by path."""


def find_refusals(given: GivenKeys) -> list[str]:
    """One line for each value that asks for something that is not offered."""
    return [
        f"{_shown(given, path, entry)}: {entry.key.refused}"
        for path, entry, value in _entries(given)
        if entry.key.refused is not None and entry.asks(value)
    ]


def find_notices(config: Config, given: GivenKeys) -> list[str]:
    """One line for each value that is accepted and has nothing to do here."""
    lines = list(given.old_spellings)
    zero = config.zero_optimization
    devices = {name: getattr(zero, name).device for name in ("offload_param", "offload_optimizer")}
    uses_nvme = "nvme" in devices.values()
    for path, entry, value in _entries(given):
        if uses_nvme or not path.startswith("aio."):
            lines += _notice(config, given, path, entry, value)
    if not uses_nvme and any(path.startswith("aio.") for path in given.values):
        lines.append("aio: nothing rests on NVMe, so nothing reads it")
    for name, device in devices.items():
        if getattr(zero, name).nvme_path and device != "nvme":
            lines.append(f"zero_optimization.{name}.nvme_path: only device nvme reads it (device is {device})")
    lines += _without_effect(config, {path for path, entry, value in _entries(given) if entry.asks(value)})
    return lines


def _without_effect(config: Config, asked: set[str]) -> Iterator[str]:
    """Keys that others leave without work, beyond what a switch or a stage says; `asked`: not given as the default."""
    zero, own = config.zero_optimization, config.onefold
    if zero.stage == 3 and zero.offload_param.device != "none" and zero.offload_optimizer.device == "none":
        yield (
            "zero_optimization.offload_param: shards are cast from masters, which rest on the device without "
            "zero_optimization.offload_optimizer; only frozen parameters leave it"
        )
    fills_tiers = zero.offload_optimizer.device != "none" and zero.offload_optimizer.ratio is None
    for name in ("device_memory", "host_memory"):
        if getattr(own, name) is not None and not fills_tiers:
            yield f'onefold.{name}: only zero_optimization.offload_optimizer.ratio "auto" reads it'
    if fills_tiers and zero.offload_optimizer.max_in_cpu:
        yield (
            "zero_optimization.offload_optimizer.max_in_cpu: with ratio "
            '"auto" the host is filled up to onefold.host_memory'
        )
    if own.delayed_host_step and zero.offload_optimizer.device == "none":
        yield "onefold.delayed_host_step: nothing reads it without zero_optimization.offload_optimizer"
    if zero.zero_quantized_gradients and config.communication_data_type is not None:
        yield "communication_data_type: with zero_optimization.zero_quantized_gradients gradients are integers"
    if zero.mics_shard_size == 0:
        yield "zero_optimization.mics_shard_size = 0: shards lie over all ranks, as with -1"
    if zero.stage == 3 and zero.overlap_comm is False and "zero_optimization.stage3_prefetch_bucket_size" in asked:
        yield "zero_optimization.stage3_prefetch_bucket_size: nothing is gathered ahead where overlap_comm is false"
    if config.gradient_allreduce_op == "sum":
        divides = ("prescale_gradients", "gradient_predivide_factor")
        yield from (f"{name}: gradient_allreduce_op sum divides nothing" for name in divides if name in asked)
    elif config.prescale_gradients and "gradient_predivide_factor" in asked:
        yield "gradient_predivide_factor: prescale_gradients divides by the number of ranks before adding"
    if config.fp16.loss_scale > 0 and _scales_loss(config):
        fixed = (f"fp16.{name}" for name in _DYNAMIC)
        yield from (f"{path}: a fixed fp16.loss_scale never moves" for path in fixed if path in asked)


def _entries(given: GivenKeys) -> Iterator[tuple[str, SectionKey, Any]]:
    params = (walk(kind, section) for section, kind in given.params.items())
    for path, entry in chain(walk(Config), *params):
        if path in given.values:
            yield path, entry, given.values[path]


def _notice(config: Config, given: GivenKeys, path: str, entry: SectionKey, value: Any) -> Iterator[str]:
    key, stage = entry.key, config.zero_optimization.stage
    shown = _shown(given, path, entry)
    if key.refused is not None and entry.asks(value):
        return  # The refusal says it.
    if key.notice is not None and entry.asks(value):
        yield f"{shown}: {key.notice}"
    elif key.from_stage > stage and _expects_something(entry, value):
        stages = "stage 3 reads it" if key.from_stage == 3 else f"stages {key.from_stage} to 3 read it"
        yield f"{shown}: only {stages} (stage is {stage})"
    elif key.switch is not None and entry.asks(value) and not _is_on(config, path, entry):
        switch = f"{path.rpartition('.')[0]}.{key.switch}"
        needed = switch if key.needs is None else f"{switch} = {key.needs}"
        has = f" (it is {json.dumps(attrgetter(switch)(config))})" if switch in given.mentioned else ""
        yield f"{shown}: nothing reads it without {needed}{has}"
    elif entry.is_free and key.refused is not None and value and not _only_switches(value):
        yield f"{path}: it is off, so nothing else in it is read"


def _is_on(config: Config, path: str, entry: SectionKey) -> bool:
    """Whether what makes a key count does so."""
    section, key = path.rpartition(".")[0], entry.key
    if section == "fp16" and entry.name != "auto_cast":
        return _scales_loss(config)
    value = attrgetter(f"{section}.{key.switch}")(config)
    return bool(value == key.needs) if key.needs is not None else value not in (None, False, "none")


def _scales_loss(config: Config) -> bool:
    # Autocast to fp16 scales its loss by the same keys.
    return config.fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")


def _only_switches(value: Any) -> bool:
    """Whether an object outside the scope says no more than that it is off."""
    if isinstance(value, dict):
        return all(name in FREE_KEYS or _only_switches(inner) for name, inner in value.items())
    return False


def _expects_something(entry: SectionKey, value: Any) -> bool:
    # A number was written because somebody expects it to count, though it be the default.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return True if is_number and entry.key.asks is None else entry.asks(value)


def _shown(given: GivenKeys, path: str, entry: SectionKey) -> str:
    """The key as the file spells it, with its value where that is short."""
    spelled, value = given.spelled.get(path, path), given.values[path]
    if entry.key.auto and value is None:
        value = "auto"
    return f"{spelled} = {json.dumps(value)}" if isinstance(value, bool | int | float | str) else spelled
