"""Sizes of groups of ranks that a config names, held against the job's."""

from __future__ import annotations

from onefold.config.errors import ConfigError
from onefold.config.schema import Config


def check_topology(config: Config, world_size: int) -> None:
    """Groups of neighbouring ranks are all of one size, and one kind of them at a time."""
    zero = config.zero_optimization
    sizes = {"onefold.node_size": config.onefold.node_size}
    if zero.stage == 3:
        sizes["zero_optimization.zero_hpz_partition_size"] = zero.zero_hpz_partition_size
        sizes["zero_optimization.mics_shard_size"] = _shard_size(config)
    for path, size in sizes.items():
        if size is not None and world_size % size:
            fitting = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise ConfigError(
                f"{path} = {size} does not divide the {world_size} ranks of this job; these do: {fitting}"
            )
    if num_replicas(config, world_size) == 1:
        return
    if _shard_size(config) == 1:
        raise ConfigError("zero_optimization.mics_shard_size = 1 shards nothing: that is stage 0")
    others = {"zero_hpz_partition_size": zero.zero_hpz_partition_size > 1}
    others["zero_quantized_gradients"] = zero.zero_quantized_gradients
    for name, asked in others.items():
        if asked:
            raise ConfigError(
                f"zero_optimization.mics_shard_size keeps gathers inside its groups and adds gradients in two hops of "
                f"its own: leave out {name}, or mics_shard_size"
            )


def num_replicas(config: Config, world_size: int) -> int:
    """How many groups of ranks hold a whole model state each."""
    size = _shard_size(config) if config.zero_optimization.stage == 3 else None
    return world_size // size if size is not None else 1


def _shard_size(config: Config) -> int | None:
    size = config.zero_optimization.mics_shard_size
    return size if size > 0 else None
