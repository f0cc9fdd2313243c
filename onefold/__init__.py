"""onefold: the ZeRO family on torch.distributed, behind the config and the API that DeepSpeed users already have.

Names are loaded when they are first used, so importing this package costs little more than importing torch.
`register_as_deepspeed` is the only name that comes from `onefold.compat`, and only a program that uses it loads that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onefold.version import __version__ as __version__

if TYPE_CHECKING:
    from onefold.comm import init_distributed
    from onefold.compat.as_deepspeed import register_as_deepspeed
    from onefold.config import ConfigError
    from onefold.engine import Engine
    from onefold.moe import experts
    from onefold.optim.matrix_rules import MatrixRule
    from onefold.report.timeline import Profiling
    from onefold.start import add_config_arguments, initialize
    from onefold.tiled_loss import tiled_cross_entropy, use_tiled_loss

_NAMES = {
    "initialize": "onefold.start",
    "add_config_arguments": "onefold.start",
    "Engine": "onefold.engine",
    "init_distributed": "onefold.comm",
    "ConfigError": "onefold.config",
    "experts": "onefold.moe",
    "MatrixRule": "onefold.optim.matrix_rules",
    "Profiling": "onefold.report.timeline",
    "tiled_cross_entropy": "onefold.tiled_loss",
    "use_tiled_loss": "onefold.tiled_loss",
    "register_as_deepspeed": "onefold.compat.as_deepspeed",
}
_MODULES = {"checkpointing", "comm", "config", "fsdp", "utils", "plan", "report", "zero"}

__all__ = [
    "ConfigError", "Engine", "MatrixRule", "Profiling", "add_config_arguments", "experts", "init_distributed",
    "initialize",
    "register_as_deepspeed", "tiled_cross_entropy", "use_tiled_loss",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"onefold.{name}")
    raise AttributeError(f"module 'onefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
