"""The batch sizes of a job, and checks of the sizes of its groups of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onefold.config.elasticity import ElasticityConfigError, solve_elastic
from onefold.config.schema import Config
from onefold.errors import ConfigError

_SEQUENCE = "sequence_parallel_size"
_EXPERTS = "onefold.expert_parallel_size"


@dataclass(frozen=True)
class Batch:
    """Consistent batch sizes: `train` = `micro` x `accumulation` x `world`.

    `world` is the number of ranks with different samples: the ranks of a sequence count once.
    """

    train: int
    micro: int
    accumulation: int
    world: int
    notices: tuple[str, ...] = ()
    """Facts about the batch that the user should see, one line each."""


def solve_batch(config: Config, world_size: int) -> Batch:
    """Compute the missing batch sizes from the given ones. Raise if there is no exact solution.

    Any two of the three keys determine the third. With `train_batch_size` or `train_micro_batch_size_per_gpu` alone,
    the accumulation is 1. With `elasticity.enabled`, the elastic train batch and the number of ranks determine all.
    """
    if world_size < 1:
        raise ConfigError(f"the world size is {world_size}. Pass at least 1.")
    _check_divides(world_size, {_SEQUENCE: config.sequence_parallel_size})
    world_size //= config.sequence_parallel_size
    if config.elasticity.enabled:
        return _solve_elastic(config, world_size)
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        has = "" if accumulation is None else f" in addition to gradient_accumulation_steps {accumulation}"
        raise ConfigError(f"the batch size is not set. Add train_micro_batch_size_per_gpu or train_batch_size{has}.")
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
            f"{product}. Write train_batch_size {product}, or leave one of the three keys out"
            f"{_rank_hint(train, micro * accumulation, world_size)}"
        )
    return Batch(product, micro, accumulation, world_size)


def _solve_elastic(config: Config, num_ranks: int) -> Batch:
    elastic, sequence = config.elasticity, config.sequence_parallel_size
    if elastic.model_parallel_size not in (1, sequence):
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size = {elastic.model_parallel_size} differs from {_SEQUENCE} = {sequence}, "
            "the number of ranks that compute parts of the same samples. "
            f"Write 1 or {sequence}."
        )
    solved = solve_elastic(elastic, num_ranks)
    micro, usual, notices = solved.micro(elastic, num_ranks), solved.instead_of, tuple[str, ...]()
    if usual is not None:
        notices = (
            f"elasticity: the train batch is {solved.train}, because {num_ranks} ranks do not divide the train batch "
            f"{usual.train} of the valid numbers of ranks ({usual.names})",
        )
    return Batch(solved.train, micro, solved.train // (micro * num_ranks), num_ranks, notices)


def _divide(train: int, by: int, world_size: int, missing: str, name: str) -> int:
    product = by * world_size
    if train % product:
        nearest = max(1, round(train / product)) * product
        raise ConfigError(
            f"{missing} = train_batch_size {train} / ({name} {by} x world {world_size} = {product}) is "
            f"{train / product:.4g}, not a whole number. Write train_batch_size {nearest}"
            f"{_rank_hint(train, by, world_size)}"
        )
    return train // product


def _rank_hint(train: int, by: int, world_size: int) -> str:
    """Return a hint for two common mistakes in the number of ranks.

    Either the ranks were started separately, each with a world size of 1, or a library assumes one process, as
    Accelerate does without a GPU.
    """
    if train == by:
        return (
            f" (it fits 1 rank, but there are {world_size}. Without a GPU, accelerate detects one process: pass "
            "use_cpu=True to TrainingArguments, or to Accelerator "
            "kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')])"
        )
    return f" (it fits {train // by} ranks: check that all of them are started)" if train % by == 0 else ""


def check_topology(config: Config, world_size: int) -> None:
    """Raise unless all group sizes divide the world size and only one kind of group is requested."""
    zero = config.zero_optimization
    if config.onefold.node_sums_dtype == "fp16" and not config.fp16.enabled:
        raise ConfigError(
            'onefold.node_sums_dtype = "fp16" needs fp16.enabled, because sums overflow without a loss scale. Use '
            '"bf16" or "fp32".'
        )
    sizes = {
        "onefold.node_size": config.onefold.node_size,
        _SEQUENCE: config.sequence_parallel_size,
        _EXPERTS: config.expert_parallel_size,
    }
    if zero.stage == 3:
        sizes["zero_optimization.zero_hpz_partition_size"] = zero.zero_hpz_partition_size
        sizes["zero_optimization.mics_shard_size"] = max(zero.mics_shard_size, 0)
    _check_divides(world_size, sizes)
    if config.expert_parallel_size > 1:
        _check_experts(config)
    if num_replicas(config, world_size) == 1:
        return
    if zero.mics_shard_size == 1:
        raise ConfigError("zero_optimization.mics_shard_size = 1 does not shard anything; use stage 0")
    hpz, quantized = zero.zero_hpz_partition_size > 1, zero.zero_quantized_gradients
    for name, is_requested in (("zero_hpz_partition_size", hpz), ("zero_quantized_gradients", quantized)):
        if is_requested:
            raise ConfigError(
                f"zero_optimization.mics_shard_size and {name} cannot be combined, because MiCS has its own groups for "
                f"all-gathers and its own two-hop reduction; leave out {name} or mics_shard_size"
            )


def with_expert_parallel_size(config: Config, size: int | None) -> Config:
    """Return the config with the `expert_parallel_size` that the expert layers of a model request, if they do."""
    given = config.expert_parallel_size
    if size is None or given == size:
        return config
    if given > 1:
        raise ConfigError(
            f"expert_parallel_size is {given} in the config, but the expert layers of the model ask for {size}. Use "
            "one of the two."
        )
    return replace(config, onefold=replace(config.onefold, expert_parallel_size=size))


def _check_experts(config: Config) -> None:
    """Raise for keys that cannot be combined with expert parallelism."""
    zero, own, auto = config.zero_optimization, config.onefold, config.expert_parallel
    if auto.enabled and own.expert_parallel_size > 1 and auto.autoep_size != own.expert_parallel_size:
        raise ConfigError(
            f"{_EXPERTS} = {own.expert_parallel_size}, but expert_parallel.autoep_size = {auto.autoep_size}. Use one "
            "of the two."
        )
    requested = {
        "zero_optimization.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_optimization.mics_shard_size": zero.mics_shard_size > 0,
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
        "onefold.batch_chunks": own.batch_chunks != 0,
        "onefold.cuda_graphs": own.cuda_graphs != "off",
        _SEQUENCE: config.sequence_parallel_size > 1,
    }
    for name, is_requested in requested.items():
        if is_requested:
            raise ConfigError(
                f"{_EXPERTS} = {config.expert_parallel_size} and {name} cannot be combined yet. Leave out one of them."
            )


def _check_divides(world_size: int, sizes: Mapping[str, int | None]) -> None:
    """Raise unless the sizes of groups, by key, divide the number of ranks."""
    for path, size in sizes.items():
        if size and world_size % size:
            fit = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise ConfigError(f"{path} = {size} does not divide the {world_size} ranks of this job. Use one of {fit}.")


def num_replicas(config: Config, world_size: int) -> int:
    """Return the number of groups of ranks that each hold all model states."""
    zero = config.zero_optimization
    return world_size // zero.mics_shard_size if zero.stage == 3 and zero.mics_shard_size > 0 else 1
