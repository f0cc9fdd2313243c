"""Small questions about parameters and optimizers."""

from __future__ import annotations

from typing import Any

from onefold.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param


class ZeRORuntimeException(Exception):
    pass


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Any elementwise optimizer is; `initialize` refuses the others by name."""
    return True


__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
