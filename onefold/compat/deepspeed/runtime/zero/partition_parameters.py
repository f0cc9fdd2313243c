"""Parameters that rest as shards: building a model that way, reading it, writing it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from onefold.compat.parameters import ZeroParamStatus
from onefold.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

__all__ = [
    "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "is_zero_param", "register_external_parameter",
    "unregister_external_parameter",
]  # fmt: skip


class ZeroParamType(Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter rests as shards, or did until it was gathered."""
    return hasattr(parameter, "ds_id")
