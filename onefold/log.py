"""The one logger of the library, and bytes in words.

Nothing is configured at import; `initialize` gives the logger a handler if nobody else has.
"""

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


def format_bytes(value: float) -> str:
    """A number of bytes for a person: 1.50 GB, 2.0 MB, 0.5 kB."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} GB"
    return f"{value / 1e6:.1f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB"
