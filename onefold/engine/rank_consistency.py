"""The facts that must be the same on all ranks, as a list that `initialize` compares.

Facts of one node or one rank (paths, free memory, device numbers, logging, how its drives are read) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from onefold.comm import Item
from onefold.config import Batch
from onefold.optim.chosen import ChosenOptimizer
from onefold.plan import Plan, cut
from onefold.runtime import unsharded_shape

# Keys that may differ: local facts, keys that only rank 0 acts on, and keys that are compared in another form.
_LOCAL = {
    *"""
    activation_checkpointing aio autotuning checkpoint comet comms_logger csv_monitor dump_state flops_profiler
    gradient_accumulation_steps log_level memory_breakdown nebula notices onefold.device_memory onefold.host_memory
    onefold.report onefold.stall.folder onefold.trace.path optimizer raw refusals steps_per_print tensorboard timers
    train_batch_size train_micro_batch_size_per_gpu unknown wall_clock_breakdown wandb
    zero_optimization.cpu_offload_use_pin_memory zero_optimization.stage3_gather_16bit_weights_on_model_save
    """.split(),  # noqa: SIM905
    *(
        f"zero_optimization.offload_{what}.{key}"
        for what in ("param", "optimizer")
        for key in ("nvme_path", "buffer_count", "buffer_size", "pin_memory", "pipeline_read", "pipeline_write")
    ),
}


def facts_to_compare(
    model: nn.Module, config: Any, plan: Plan, batch: Batch, chosen: ChosenOptimizer | None, scheduler: Any
) -> list[Item]:
    """Return the facts of the config, the optimizer, the parameters, the buffers and the units of a model, in order."""
    facts: list[Item] = [("the config", dict(_keys(config)))]
    facts.append(("the batch", {"micro-batch": str(batch.micro), "accumulation": str(batch.accumulation)}))
    given = type(scheduler).__name__ if scheduler is not None else "none"
    kind, splits = (chosen.name, str(chosen.splits)) if chosen is not None else ("none", "{}")
    facts.append(("the optimizer", {"type": kind, "split_rows": splits, "lr_scheduler": given}))
    for number, group in enumerate(chosen.groups if chosen is not None else ()):
        values = {key: _text(_normalized(group[key])) for key in group if key != "params"}
        facts.append((f"parameter group {number}", values))
    facts += _tensors(model, chosen.group_of_each() if chosen is not None else {})
    sizes = {name: unsharded_shape(parameter).numel() for name, parameter in model.named_parameters()}
    for unit in cut(model, plan.cut.units, plan.cut.leaves, lambda parameter: unsharded_shape(parameter).numel()):
        count = sum(sizes[name] for name in unit.parameters)
        facts.append((f"unit {unit.module or '(root)'}", {"parameters": f"{len(unit.parameters)} of {count} elements"}))
    return facts


def _tensors(model: nn.Module, groups: dict[int, int]) -> Iterator[Item]:
    """Yield the facts of each parameter and buffer of a model."""
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


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of each key of a config section, without local ones."""
    for field in fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if name in _LOCAL:
            continue
        if is_dataclass(value):
            yield from _keys(value, f"{name}.")
        else:
            yield name, _text(value)


def _normalized(value: Any) -> Any:
    """Return a value of a group with whole floats as ints, because 0 and 0.0 are the same value there."""
    if isinstance(value, list | tuple):
        return [_normalized(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    """Return a text that is the same in all processes: of an object without a comparable value, its class name."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < 16 and not value.is_meta else f"tensor of {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in sorted(value.items(), key=str))}}}"
    return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
