"""Elastic batch sizes with DeepSpeed's functions and errors, over the rules of `config/elasticity.py`."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from onefold.config import ConfigError, load_config
from onefold.config.elasticity import (
    Elasticity,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    check_elasticity,
    solve_elastic,
)

__all__ = [
    "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize", "compute_elastic_config",
    "elasticity_enabled", "ensure_immutable_elastic_config",
]  # fmt: skip

# The first release of DeepSpeed with elastic batch sizes.
_FIRST_RELEASE = (0, 3, 8)
_ENVIRONMENT = "DEEPSPEED_ELASTICITY_CONFIG"


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the train batch, the valid numbers of data-parallel ranks, and the micro-batch of `world_size` GPUs.

    Without `world_size`, it is read from WORLD_SIZE for version 0.2 and for `return_microbatch`; the micro-batch is
    then only returned with `return_microbatch`.
    """
    if not isinstance(ds_config, dict):
        raise ValueError(f"compute_elastic_config expects the config as a dict, not {type(ds_config).__name__}.")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("the config has no elasticity.enabled = true. Set it.")
    release = tuple(int(part) for part in re.findall(r"\d+", target_deepspeed_version)[:3])
    if release < _FIRST_RELEASE:
        raise ElasticityError(f"DeepSpeed {target_deepspeed_version} has no elasticity. Pass 0.3.8 or a later release.")
    elastic = _read(ds_config["elasticity"])
    num_gpus = world_size
    if not num_gpus and (elastic.version == 0.2 or return_microbatch):
        num_gpus = int(os.environ.get("WORLD_SIZE", "0"))
        if not num_gpus:
            raise ElasticityConfigError(
                "the number of GPUs is not known. Pass world_size, or set the environment variable WORLD_SIZE."
            )
    num_ranks = num_gpus // elastic.model_parallel_size or None
    solved = solve_elastic(elastic, num_ranks)
    if num_ranks is not None and (world_size or return_microbatch):
        return solved.train, list(solved.valid), solved.micro(elastic, num_ranks)
    return solved.train, list(solved.valid)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Raise if the scheduler of the job has published another elastic config in the environment."""
    if _ENVIRONMENT not in os.environ:
        return
    theirs, ours = _read(json.loads(os.environ[_ENVIRONMENT])), _read(runtime_elastic_config_dict)
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        one, other = getattr(theirs, name), getattr(ours, name)
        if one != other:
            raise ElasticityConfigError(
                f"elasticity.{name} is {other} in the config, but {one} in {_ENVIRONMENT}. Use the same config."
            )


def _read(section: dict[str, Any]) -> Elasticity:
    """Read and check the section. Errors have DeepSpeed's class."""
    try:
        elastic = load_config({"elasticity": section}).elasticity
    except ElasticityError:
        raise
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    check_elasticity(elastic)
    return elastic
