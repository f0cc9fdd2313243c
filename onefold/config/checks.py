"""What several keys say together: contradictions raise, old spellings become the new ones."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onefold.config.errors import ConfigError
from onefold.config.fates import Found
from onefold.config.schema import Config
from onefold.config.sections import OptimizerSection, SchedulerSection
from onefold.config.values import wrong
from onefold.config.zero import OffloadOptimizer, OffloadParam


def settle_old_spellings(config: Config, found: Found) -> Config:
    """Rewrites what has two forms into one, so that nobody above has to know the other."""
    zero = config.zero_optimization
    pins: dict[str, Any] = (
        {} if zero.cpu_offload_use_pin_memory is None else {"pin_memory": zero.cpu_offload_use_pin_memory}
    )
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if zero.cpu_offload:
        _move_offload(found, "cpu_offload", "offload_optimizer")
        optimizer = replace(optimizer, device="cpu", **pins)
    if zero.cpu_offload_param:
        _move_offload(found, "cpu_offload_param", "offload_param")
        param = replace(param, device="cpu", **pins)
    if pins and not (zero.cpu_offload or zero.cpu_offload_param):
        found.old_spellings.append(
            "zero_optimization.cpu_offload_use_pin_memory: nothing reads it without zero_optimization.cpu_offload"
        )
    optimizer = replace(optimizer, **_settle_offload("offload_optimizer", optimizer, read=True))
    param = replace(param, **_settle_offload("offload_param", param, read=zero.stage == 3))
    return replace(
        config,
        zero_optimization=replace(zero, offload_optimizer=optimizer, offload_param=param),
        steps_per_print=config.steps_per_print or None,
        optimizer=config.optimizer if _says_something(config.optimizer) else None,
        scheduler=config.scheduler if _says_something(config.scheduler) else None,
    )


def _settle_offload(name: str, offload: OffloadParam | OffloadOptimizer, *, read: bool) -> dict[str, Any]:
    """Folders as they are to be made. A section that offloads nothing has no say in how the other one does."""
    settled: dict[str, Any] = {}
    if offload.device == "nvme":
        path = f"zero_optimization.{name}.nvme_path"
        settled["nvme_path"] = tuple(_folder(path, folder) for folder in offload.nvme_path)
    if offload.device == "none" or not read:
        settled["pin_memory"] = True
    return settled


def _folder(path: str, given: str) -> str:
    folder = os.path.expanduser(os.path.expandvars(given.strip()))
    if not folder:
        raise wrong(path, given, "the name of a folder on the drive")
    if "$" in folder or folder.startswith("~"):
        raise ConfigError(
            f"{path} = {given!r}: {folder!r} is left of it, so it names a variable or a user that is not known here; "
            "export the variable on every host, or write the folder out"
        )
    return folder


def _says_something(section: OptimizerSection | SchedulerSection | None) -> bool:
    """An empty section, or one where all is `auto`, is an absent one."""
    return section is not None and bool(section.type or section.params)


def _move_offload(found: Found, old: str, new: str) -> None:
    path = f"zero_optimization.{new}"
    if f"{path}.device" in found.given:
        raise ConfigError(f"zero_optimization.{old} and {path}.device say the same in two ways; keep {path}")
    found.given[f"{path}.device"] = "cpu"
    found.mentioned.add(f"{path}.device")
    found.old_spellings.append(f"zero_optimization.{old}: the old spelling of {path}.device = cpu")


def check(config: Config) -> None:
    """Raises for the first contradiction, naming the keys and the fix."""
    for rule in _RULES:
        rule(config)


def _one_precision(config: Config) -> None:
    enabled = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(enabled) > 1:
        keys = " and ".join(f"{name}.enabled" for name in enabled)
        raise ConfigError(f"{keys} exclude each other; set all but one of them to false")
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp32":
        raise ConfigError("torch_autocast.dtype = fp32: autocast needs a lower precision; write bf16 or fp16")


def _param_dtype(config: Config) -> None:
    wanted, has = config.data_types.param_dtype, config.compute_dtype
    if wanted is None or wanted == has:
        return
    fix = "leave out data_types.param_dtype" if wanted == "fp32" else f"set {wanted}.enabled to true"
    raise ConfigError(f"data_types.param_dtype = {wanted}, but fp16.enabled and bf16.enabled make it {has}; {fix}")


def _masters(config: Config) -> None:
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        raise ConfigError("bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads; leave both out")
    for name, on in (
        ("fp16.fp16_master_weights_and_grads", config.fp16.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", config.bf16.bf16_master_weights_and_grads),
    ):
        if on and config.zero_optimization.stage == 0:
            raise ConfigError(f"{name} needs zero_optimization.stage 1, 2 or 3; leave it out")


def _sum(config: Config) -> None:
    if config.gradient_allreduce_op != "sum":
        return
    for name, on in (
        ("zero_optimization.zenflow", config.zero_optimization.zenflow is not None),
        ("compile.deepcompile", config.compile.deepcompile),
    ):
        if on:
            raise ConfigError(f"gradient_allreduce_op = sum does not go with {name}; write mean, and scale the loss")


def _offload(config: Config) -> None:
    zero = config.zero_optimization
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        raise ConfigError(
            "zero_optimization.offload_optimizer needs stage 1, 2 or 3 (stage is 0); "
            "set zero_optimization.stage, or leave offload_optimizer out"
        )
    for name, offload in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and not offload.nvme_path:
            raise ConfigError(
                f"zero_optimization.{name}.device = nvme needs a folder on the drive; "
                f"add zero_optimization.{name}.nvme_path"
            )


def _named(config: Config) -> None:
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if section is not None and not section.type:
            raise ConfigError(f"{name}.type is missing; name the class, for example {_EXAMPLE[name]}")
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        value = config.optimizer.params["max_grad_norm"]
        raise ConfigError(
            f"optimizer.params.max_grad_norm = {value!r}: optimizers do not clip; "
            f"write it as the top-level key gradient_clipping"
        )


_EXAMPLE = {"optimizer": '"AdamW"', "scheduler": '"WarmupLR"'}


def _batch(config: Config) -> None:
    """All three batch keys have to leave a whole number of ranks; which number is `solve_batch`'s to check."""
    train = config.train_batch_size
    micro, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if train is None or (micro is None and accumulation is None):
        return
    product = (micro or 1) * (accumulation or 1)
    if train % product:
        raise ConfigError(
            f"train_batch_size {train} is not a multiple of train_micro_batch_size_per_gpu {micro or 'any'} x "
            f"gradient_accumulation_steps {accumulation or 'any'} = {product}, so no number of ranks fits; "
            f"for example train_batch_size {max(1, round(train / product)) * product}"
        )


_RULES: tuple[Callable[[Config], None], ...] = (_one_precision, _param_dtype, _masters, _sum, _offload, _named, _batch)
