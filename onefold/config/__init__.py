"""The config floor: DeepSpeed's JSON (or Accelerate's YAML) to one frozen `Config`. No tensors, no process groups."""

from onefold.config.batch import Batch, solve_batch
from onefold.config.errors import ConfigError
from onefold.config.precision import Bf16, DataTypes, Dtype, Fp16, TorchAutocast
from onefold.config.read import check_built, load_config
from onefold.config.schema import Config
from onefold.config.sections import Aio, OnefoldSection, OptimizerSection, SchedulerSection
from onefold.config.topology import check_topology, num_replicas
from onefold.config.zero import Device, OffloadOptimizer, OffloadParam, ZeroOptimization

__all__ = [
    "Aio",
    "Batch",
    "Bf16",
    "Config",
    "ConfigError",
    "DataTypes",
    "Device",
    "Dtype",
    "Fp16",
    "OffloadOptimizer",
    "OffloadParam",
    "OnefoldSection",
    "OptimizerSection",
    "SchedulerSection",
    "TorchAutocast",
    "ZeroOptimization",
    "check_built",
    "check_topology",
    "load_config",
    "num_replicas",
    "solve_batch",
]
