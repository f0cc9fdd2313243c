"""The library's logger. Nothing is configured at import; `initialize` gives it a handler if nobody else has."""

from __future__ import annotations

import logging

logger = logging.getLogger("onefold")


def set_up_logging(level: str | None, *, speaks: bool) -> None:
    """`speaks`: this rank prints. Ranks that do not speak still let warnings through."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[onefold] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if level is not None:
        logger.setLevel(level.upper())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if speaks else logging.WARNING)
