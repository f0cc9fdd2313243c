"""The one logger of the library, and bytes in words.

Nothing is configured at import; `initialize` gives the logger a handler if nobody else has.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

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
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"


def parse_size(size: int | str) -> int:
    """Parse a size in bytes: 1000, "500MB" and "5GB" (powers of ten), "2GiB" (of two)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(i?))?B?", str(size).strip())
    unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0
    if not match or Fraction(match[1]) * unit < 1:
        raise ValueError(f"a size is a positive number of bytes (500000000, '500MB', '5GB', '2GiB'), not {size!r}")
    return int(Fraction(match[1]) * unit)
