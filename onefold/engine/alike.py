"""What must be the same on every rank before they train, as a list that ranks compare.

Facts of one node or one rank (paths, free memory, device numbers, logging, how its drives are read) stay out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from onefold.comm import Item
from onefold.config import Batch
from onefold.optim.choose import Chosen
from onefold.plan import Plan, cut
from onefold.runtime import unsharded_shape

# Keys that may differ: local facts, what only rank 0 acts on, and what is compared in another form.
_LOCAL = {
    *"""
    activation_checkpointing aio autotuning checkpoint comet comms_logger csv_monitor dump_state flops_profiler
    gradient_accumulation_steps log_level memory_breakdown nebula notices onefold.device_memory onefold.host_memory
    onefold.report onefold.trace.path optimizer raw refusals steps_per_print tensorboard timers train_batch_size unknown
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    """.split(),  # noqa: SIM905
    *(
        f"zero_optimization.offload_{what}.{key}"
        for what in ("param", "optimizer")
        for key in ("nvme_path", "buffer_count", "buffer_size", "pin_memory", "pipeline_read", "pipeline_write")
    ),
}


def items_of(
    model: nn.Module, config: Any, plan: Plan, batch: Batch, chosen: Chosen | None, scheduler: Any
) -> list[Item]:
    """Config, optimizer, parameters, buffers and cut of a model, in their order."""
    items: list[Item] = [("the config", dict(_facts(config)))]
    items.append(("the batch", {"micro-batch": str(batch.micro), "accumulation": str(batch.accumulation)}))
    given = type(scheduler).__name__ if scheduler is not None else "none"
    kind, splits = (chosen.name, str(chosen.splits)) if chosen is not None else ("none", "{}")
    items.append(("the optimizer", {"type": kind, "split_rows": splits, "lr_scheduler": given}))
    for number, group in enumerate(chosen.groups if chosen is not None else ()):
        facts = {key: _text(_evened(group[key])) for key in group if key != "params"}
        items.append((f"parameter group {number}", facts))
    items += _tensors(model, chosen.group_of_each() if chosen is not None else {})
    sizes = {name: unsharded_shape(parameter).numel() for name, parameter in model.named_parameters()}
    for unit in cut(model, plan.cut.units, plan.cut.leaves, lambda parameter: unsharded_shape(parameter).numel()):
        count = sum(sizes[name] for name in unit.parameters)
        items.append((f"unit {unit.module or '(root)'}", {"parameters": f"{len(unit.parameters)} of {count} elements"}))
    return items


def _tensors(model: nn.Module, groups: dict[int, int]) -> Iterator[Item]:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        if tied != name:
            yield f"parameter {name}", {"the weights of": tied}
            continue
        yield (
            f"parameter {name}",
            {
                "shape": str(tuple(unsharded_shape(parameter))),
                "dtype": str(parameter.dtype),
                "requires_grad": str(parameter.requires_grad),
                "optimizer group": str(groups.get(id(parameter), "none")),
            },
        )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name}", {"shape": str(tuple(buffer.shape)), "dtype": str(buffer.dtype)}


def _facts(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if name in _LOCAL:
            continue
        if is_dataclass(value):
            yield from _facts(value, f"{name}.")
        else:
            yield name, _text(value)


def _evened(value: Any) -> Any:
    """Of groups, whose values have no fixed type: 0 and 0.0 are one value."""
    if isinstance(value, list | tuple):
        return [_evened(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    """What two processes write alike: of objects that have no value to compare, their class."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < 16 and not value.is_meta else f"tensor of {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in sorted(value.items(), key=str))}}}"
    return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
