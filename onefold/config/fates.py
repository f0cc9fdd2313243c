"""What there is to say about the keys of a config that was read: notices and refusals (see the note in keys.py)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onefold.config.keys import Entry, walk
from onefold.config.schema import Config
from onefold.config.zero import OffloadOptimizer, OffloadParam


@dataclass
class Found:
    """What the reader met: values by the path of their key, and the keys that were there even if only as `auto`."""

    given: dict[str, Any] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    old_spellings: list[str] = field(default_factory=list)


def find_refusals(found: Found) -> list[str]:
    """One line for each value that asks for something that is not offered."""
    return [
        f"{path}{_shown(entry, value)}: {entry.key.refused}"
        for path, entry, value in _given(found)
        if entry.key.refused is not None and entry.asks(value)
    ]


def find_notices(config: Config, found: Found) -> list[str]:
    """One line for each value that is accepted and has nothing to do here."""
    lines = list(found.old_spellings)
    offloads: dict[str, OffloadParam | OffloadOptimizer] = {
        "offload_param": config.zero_optimization.offload_param,
        "offload_optimizer": config.zero_optimization.offload_optimizer,
    }
    uses_nvme = any(offload.device == "nvme" for offload in offloads.values())
    for path, entry, value in _given(found):
        if uses_nvme or not path.startswith("aio."):
            lines += _notice(config, found, path, entry, value)
    if not uses_nvme and any(path.startswith("aio.") for path in found.given):
        lines.append("aio: nothing rests on NVMe, so nothing reads it")
    for name, offload in offloads.items():
        if offload.nvme_path and offload.device != "nvme":
            lines.append(f"zero_optimization.{name}.nvme_path: only device nvme reads it (device is {offload.device})")
    zero, own = config.zero_optimization, config.onefold
    if zero.stage == 3 and zero.offload_param.device != "none" and zero.offload_optimizer.device == "none":
        lines.append(
            "zero_optimization.offload_param: shards are cast from masters, which rest on the device without "
            "zero_optimization.offload_optimizer; only frozen parameters leave it"
        )
    fills_tiers = zero.offload_optimizer.device != "none" and zero.offload_optimizer.ratio is None
    for name in ("device_memory", "host_memory"):
        if getattr(own, name) is not None and not fills_tiers:
            lines.append(f'onefold.{name}: only zero_optimization.offload_optimizer.ratio "auto" reads it')
    if own.delayed_host_step and zero.offload_optimizer.device == "none":
        lines.append("onefold.delayed_host_step: nothing reads it without zero_optimization.offload_optimizer")
    if zero.zero_quantized_gradients and config.communication_data_type is not None:
        lines.append("communication_data_type: with zero_optimization.zero_quantized_gradients gradients are integers")
    return lines


def _given(found: Found) -> Iterator[tuple[str, Entry, Any]]:
    for path, entry in walk(Config):
        if path in found.given:
            yield path, entry, found.given[path]


def _notice(config: Config, found: Found, path: str, entry: Entry, value: Any) -> Iterator[str]:
    key = entry.key
    section = path.rpartition(".")[0]
    shown = f"{path}{_shown(entry, value)}"
    if key.refused is not None and entry.asks(value):
        return  # The refusal says it.
    if key.notice is not None and entry.asks(value):
        yield f"{shown}: {key.notice}"
    elif key.stage3 and config.zero_optimization.stage != 3 and _expects_something(entry, value):
        yield f"{shown}: only stage 3 reads it (stage is {config.zero_optimization.stage})"
    elif key.switch is not None and entry.asks(value) and f"{section}.{key.switch}" not in found.mentioned:
        yield f"{shown}: nothing reads it without {section}.{key.switch}"


def _expects_something(entry: Entry, value: Any) -> bool:
    # false and "none" ask for nothing in any stage; a number was written because somebody expects it to count.
    if entry.key.asks is not None:
        return entry.asks(value)
    return value is not False if isinstance(value, bool | int) else bool(value != entry.default)


def _shown(entry: Entry, value: Any) -> str:
    """The value as the file spells it, where that is short."""
    if entry.key.auto and value is None:
        value = "auto"
    if isinstance(value, bool | int | float | str):
        return f" = {json.dumps(value)}"
    return ""
