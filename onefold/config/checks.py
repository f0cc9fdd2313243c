"""What several keys say together: contradictions raise, old spellings become the new ones, sizes fit the ranks."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onefold.config.keys import ConfigError, wrong
from onefold.config.schema import Config, OptimizerSection, SchedulerSection
from onefold.config.support import GivenKeys
from onefold.config.zero_optimization import OffloadOptimizer, OffloadParam

# -- old spellings ---------------------------------------------------------------------------------------------------


def settle_old_spellings(config: Config, given: GivenKeys) -> Config:
    """Rewrites what has two forms into one, so that nobody above has to know the other."""
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
            "zero_optimization.cpu_offload_use_pin_memory: nothing reads it without zero_optimization.cpu_offload"
        )
    return replace(
        config,
        zero_optimization=replace(
            zero,
            offload_optimizer=replace(optimizer, **_settle_offload("offload_optimizer", optimizer, read=True)),
            offload_param=replace(param, **_settle_offload("offload_param", param, read=zero.stage == 3)),
        ),
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
            "export the variable on every node, or write the folder out"
        )
    return folder


def _says_something(section: OptimizerSection | SchedulerSection | None) -> bool:
    """An empty section, or one where all is `auto`, is an absent one."""
    return section is not None and bool(section.type or section.params)


def _move_offload(given: GivenKeys, old: str, new: str) -> None:
    path = f"zero_optimization.{new}"
    if f"{path}.device" in given.values:
        raise ConfigError(f"zero_optimization.{old} and {path}.device say the same in two ways; keep {path}")
    given.values[f"{path}.device"] = "cpu"
    given.mentioned.add(f"{path}.device")
    given.old_spellings.append(f"zero_optimization.{old}: the old spelling of {path}.device = cpu")


# -- contradictions --------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raises for the first contradiction, naming the keys and the fix."""
    contradiction = next(_contradictions(config), None)
    if contradiction is not None:
        raise ConfigError(contradiction)


def _contradictions(config: Config) -> Iterator[str]:
    zero, fp16, bf16, autocast = config.zero_optimization, config.fp16, config.bf16, config.torch_autocast
    enabled = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(enabled) > 1:
        yield f"{' and '.join(enabled)} exclude each other; set all but one of them to false"
    if autocast.enabled and autocast.dtype == "fp32":
        yield "torch_autocast.dtype = fp32: autocast needs a lower precision; write bf16 or fp16"
    wanted, has = config.data_types.param_dtype, config.compute_dtype
    if wanted is not None and wanted != has:
        fix = "leave out data_types.param_dtype" if wanted == "fp32" else f"set {wanted}.enabled to true"
        yield f"data_types.param_dtype = {wanted}, but fp16.enabled and bf16.enabled make it {has}; {fix}"
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads; leave both out"
    masters = {"fp16": fp16.fp16_master_weights_and_grads, "bf16": bf16.bf16_master_weights_and_grads}
    for name, on in masters.items():
        if on and zero.stage == 0:
            yield f"{name}.{name}_master_weights_and_grads needs zero_optimization.stage 1, 2 or 3; leave it out"
    others = {"zero_optimization.zenflow": zero.zenflow, "compile.deepcompile": config.compile.deepcompile}
    for name, asked in others.items():
        if asked and config.gradient_allreduce_op == "sum":
            yield f"gradient_allreduce_op = sum does not go with {name}; write mean, and scale the loss"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer needs stage 1, 2 or 3 (stage is 0); "
            "set zero_optimization.stage, or leave offload_optimizer out"
        )
    for name, offload in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and not offload.nvme_path:
            path = f"zero_optimization.{name}"
            yield f"{path}.device = nvme needs a folder on the drive; add {path}.nvme_path"
    for name, section, example in (
        ("optimizer", config.optimizer, "AdamW"),
        ("scheduler", config.scheduler, "WarmupLR"),
    ):
        if section is not None and not section.type:
            yield f'{name}.type is missing; name the class, for example "{example}"'
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        yield (
            f"optimizer.params.max_grad_norm = {config.optimizer.params['max_grad_norm']!r}: optimizers do not clip; "
            f"write it as the top-level key gradient_clipping"
        )
    # All three batch keys have to leave a whole number of ranks; which number is `solve_batch`'s to check.
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    product = (micro or 1) * (accumulation or 1)
    if train is not None and train % product:
        yield (
            f"train_batch_size {train} is not a multiple of train_micro_batch_size_per_gpu {micro or 'any'} x "
            f"gradient_accumulation_steps {accumulation or 'any'} = {product}, so no number of ranks fits; "
            f"for example train_batch_size {max(1, round(train / product)) * product}"
        )


# -- the batch and the ranks of this job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Sizes that agree: `train` samples a step are `accumulation` micro-batches of `micro` on each of `world` ranks."""

    train: int
    micro: int
    accumulation: int
    world: int


def solve_batch(config: Config, world_size: int) -> Batch:
    """Fills in what the config leaves out, exactly or not at all.

    Any two of the three keys give the third; alone, `train_batch_size` or `train_micro_batch_size_per_gpu` goes with an
    accumulation of 1.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size}: there is at least one rank")
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        has = "" if accumulation is None else f" beside gradient_accumulation_steps {accumulation}"
        raise ConfigError(f"the batch size is open: add train_micro_batch_size_per_gpu or train_batch_size{has}")
    if train is not None and micro is not None and accumulation is None:
        accumulation = _divide(train, micro, world_size, "gradient_accumulation_steps", "micro")
    accumulation = accumulation or 1
    if micro is None:
        assert train is not None
        micro = _divide(train, accumulation, world_size, "train_micro_batch_size_per_gpu", "accumulation")
    product = micro * accumulation * world_size
    if train is not None and product != train:
        raise ConfigError(
            f"train_batch_size {train} is not micro {micro} x accumulation {accumulation} x world {world_size} = "
            f"{product}; write train_batch_size {product}, or leave one of the three keys out"
            f"{_rank_hint(train, micro * accumulation)}"
        )
    return Batch(product, micro, accumulation, world_size)


def _divide(train: int, by: int, world_size: int, missing: str, name: str) -> int:
    product = by * world_size
    if train % product:
        nearest = max(1, round(train / product)) * product
        raise ConfigError(
            f"{missing} = train_batch_size {train} / ({name} {by} x world {world_size} = {product}) is "
            f"{train / product:.4g}, not a whole number; write train_batch_size {nearest}{_rank_hint(train, by)}"
        )
    return train // product


def _rank_hint(train: int, by: int) -> str:
    """The common accident: the ranks do not know of each other, so each of them is a world of 1."""
    return f" (it fits {train // by} ranks: were they all started?)" if train % by == 0 else ""


def check_topology(config: Config, world_size: int) -> None:
    """Raises unless each group of neighbouring ranks divides the job, and only one kind of group is asked for."""
    zero = config.zero_optimization
    sizes = {"onefold.node_size": config.onefold.node_size}
    if zero.stage == 3:
        sizes["zero_optimization.zero_hpz_partition_size"] = zero.zero_hpz_partition_size
        sizes["zero_optimization.mics_shard_size"] = max(zero.mics_shard_size, 0)
    for path, size in sizes.items():
        if size and world_size % size:
            fitting = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise ConfigError(
                f"{path} = {size} does not divide the {world_size} ranks of this job; these do: {fitting}"
            )
    if num_replicas(config, world_size) == 1:
        return
    if zero.mics_shard_size == 1:
        raise ConfigError("zero_optimization.mics_shard_size = 1 shards nothing: that is stage 0")
    others = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for name, asked in others.items():
        if asked:
            raise ConfigError(
                f"zero_optimization.mics_shard_size keeps gathers inside its groups and adds gradients in two hops of "
                f"its own: leave out {name}, or mics_shard_size"
            )


def num_replicas(config: Config, world_size: int) -> int:
    """How many groups of ranks hold a whole model state each."""
    zero = config.zero_optimization
    return world_size // zero.mics_shard_size if zero.stage == 3 and zero.mics_shard_size > 0 else 1
