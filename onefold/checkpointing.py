"""Activation checkpointing under DeepSpeed's names.

torch performs the recomputation, and handles random state, autocast and nesting. The settings select where the inputs
are stored in the meantime (`offload/activation_offload.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onefold.config import ActivationCheckpointing as Settings
from onefold.config import Config, ConfigError, load_config
from onefold.log import logger
from onefold.offload.activation_offload import HostCopies, Inputs, OffloadedInput, forget_buffers
from onefold.offload.torch_checkpoints import current_copies, own_checkpoint

_SECTION = "activation_checkpointing"

_settings = Settings()
_configured_by: Literal["nobody", "config", "call"] = "nobody"
_inside: ContextVar[bool] = ContextVar("onefold_inside_checkpoint", default=False)
_copies = HostCopies()
"""Copies of calls outside of forwards of engines with host checkpoints."""
_times = {"forward": 0.0, "recompute": 0.0, "calls": 0}


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | PathLike[str] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure all later calls of `checkpoint`. Arguments override the section of the config."""
    global _configured_by
    if mpu_ is not None and (size := mpu_.get_model_parallel_world_size()) != 1:
        raise ValueError(f"mpu_: the model-parallel size is {size}, but tensor parallelism is not supported.")
    section = Settings() if deepspeed_config is None else load_config(deepspeed_config).activation_checkpointing
    given: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    _set(replace(section, **{name: value for name, value in given.items() if value is not None}))
    _configured_by = "call"
    partition_activations_in_checkpoint(_settings.partition_activations)


def read_config(config: Config) -> None:
    """Apply the section of the config in `initialize`, unless the script has called `configure`."""
    global _configured_by
    if not any(name.partition(".")[0] == _SECTION for name in config.raw):
        return
    if _configured_by == "call":
        logger.info("%s: the settings of checkpointing.configure remain in effect", _SECTION)
        return
    _set(config.activation_checkpointing)
    _configured_by = "config"


def is_configured() -> bool:
    """Return whether settings were made by `configure` or by a config."""
    return _configured_by != "nobody"


def settings() -> Settings:
    """Return the current settings, under the names of the config's section."""
    return _settings


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints of one forward, `number_checkpoints` of the config."""
    _set(replace(_settings, number_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations`, which has no effect.

    DeepSpeed shards inputs over the model-parallel group, but onefold has no such group.
    """
    _set(replace(_settings, partition_activations=partition_activation))
    if partition_activation:
        logger.info("partition_activations: there is no model-parallel group, so every rank keeps its inputs whole")


def reset() -> None:
    """Drop buffers and times. The settings do not change."""
    forget_buffers()
    _times.update(forward=0.0, recompute=0.0, calls=0)


def times() -> dict[str, float]:
    """Return the seconds in `forward` and `recompute` and the number of `calls` since the last `reset`.

    They are measured if `profile` is set.
    """
    return dict(_times)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` and recompute its activations in backward instead of storing them.

    All keywords are passed to the function. Tensors inside lists, dicts and tuples are not offloaded.
    """
    if torch.compiler.is_compiling():  # The compiler handles checkpoints itself.
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    # `run` must not reference a value, because torch holds `run` for as long as the graph.
    here, num_args, names, phase = _settings, len(args), tuple(kwargs), iter(["forward"])

    def run(*values: Any) -> Any:
        with _boundary(function, next(phase, "recompute"), here):
            return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    # Keywords are passed by position, because torch saves random states only for the devices of positional arguments.
    values = (*args, *kwargs.values())
    # Inside another checkpoint, inputs are activations that the outer one recomputes, so they are not stored.
    if _inside.get() or not (here.cpu_checkpointing or here.contiguous_memory_optimization):
        with own_checkpoint():
            return torch_checkpoint(run, *values, use_reentrant=False)
    num_slots = here.number_checkpoints if here.contiguous_memory_optimization else None
    if here.contiguous_memory_optimization and num_slots is None:
        raise ConfigError(
            f"{_SECTION}.contiguous_memory_optimization needs the number of checkpointed calls per forward. "
            f"Set {_SECTION}.number_checkpoints (num_checkpoints= of configure)."
        )
    inputs = Inputs(values, on_host=here.cpu_checkpointing, num_slots=num_slots, copies=current_copies() or _copies)
    with own_checkpoint(), saved_tensors_hooks(inputs.pack, OffloadedInput.back):
        outputs = torch_checkpoint(run, *values, use_reentrant=False)
    inputs.wait_for_copies()
    return outputs


non_reentrant_checkpoint = checkpoint


def _set(settings: Settings) -> None:
    global _settings
    # As in DeepSpeed, `set_num_layers` may be called before or after the other settings are made.
    num = _settings.number_checkpoints if settings.number_checkpoints is None else settings.number_checkpoints
    if num is not None and num < 1:
        raise ConfigError(f"{_SECTION}.number_checkpoints = {num}: expected at least 1")
    _settings = replace(settings, number_checkpoints=num)


@contextmanager
def _boundary(function: Callable[..., Any], phase: str, settings: Settings) -> Iterator[None]:
    """Time one run of a checkpointed function. Nested checkpoints count as part of the outer one."""
    nested, token = _inside.get(), _inside.set(True)
    waits = (settings.synchronize_checkpoint_boundary or settings.profile) and torch.cuda.is_initialized()
    if waits:
        torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        yield
    finally:
        _inside.reset(token)
        if waits:
            torch.cuda.synchronize()
        if settings.profile and not nested:
            seconds = time.perf_counter() - start
            _times[phase] += seconds
            _times["calls"] += phase == "forward"
            name = getattr(function, "__qualname__", type(function).__name__)
            logger.info("checkpoint of %s: %s %.3f ms", name, phase, 1000 * seconds)
