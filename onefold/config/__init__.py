"""Reading of DeepSpeed's JSON or Accelerate's YAML into a frozen `Config`, without tensors or process groups."""

from onefold.config.batch import Batch, check_topology, num_replicas, solve_batch, with_expert_parallel_size
from onefold.config.checks import fp8_gather_conflict
from onefold.config.read import check_built, load_config
from onefold.config.schema import ActivationCheckpointing, Aio, Config
from onefold.config.zero_optimization import LeafModule, OffloadOptimizer, OffloadParam
from onefold.errors import ConfigError

__all__ = [
    "ActivationCheckpointing", "Aio", "Batch", "Config", "ConfigError", "LeafModule", "OffloadOptimizer",
    "OffloadParam", "check_built", "check_topology", "fp8_gather_conflict", "load_config", "num_replicas",
    "solve_batch", "with_expert_parallel_size",
]  # fmt: skip
