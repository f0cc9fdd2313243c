"""Sizes of groups of ranks that a config names, held against the job's."""

from __future__ import annotations

from onefold.config.errors import ConfigError
from onefold.config.schema import Config


def check_topology(config: Config, world_size: int) -> None:
    """Groups of neighbouring ranks are all of one size."""
    zero = config.zero_optimization
    sizes = {"onefold.node_size": config.onefold.node_size}
    if zero.stage == 3:
        sizes["zero_optimization.zero_hpz_partition_size"] = zero.zero_hpz_partition_size
    for path, size in sizes.items():
        if size is not None and world_size % size:
            fitting = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise ConfigError(
                f"{path} = {size} does not divide the {world_size} ranks of this job; these do: {fitting}"
            )
