"""onefold's logger, where DeepSpeed scripts look for one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

from onefold.log import logger

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}

__all__ = ["log_dist", "log_levels", "logger", "print_dist", "set_log_level_from_string", "warning_once"]


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks alone; on all where none is named or -1 is."""
    ranks = list(ranks or ())
    if _speaks(ranks):
        logger.log(level, "[Rank %d] %s", _rank(), message)


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    if _speaks(list(ranks or ())):
        print(f"[Rank {_rank()}] {message}", flush=True)


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    logger.warning(*args, **kwargs)


# Tools call it as a method of the logger.
vars(logger)["warning_once"] = warning_once


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str} is not one of the log levels {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(level)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _speaks(ranks: list[int]) -> bool:
    return not ranks or -1 in ranks or _rank() in ranks
