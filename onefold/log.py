"""The logger of the library, and formatting and parsing of sizes and counts.

Nothing is configured at import, except that secrets of the environment are removed from messages. `initialize` adds a
handler if the program has not configured logging.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from onefold.redaction import RedactingFilter

logger = logging.getLogger("onefold")
logger.addFilter(RedactingFilter())


def set_up_logging(level: str | None, *, speaks: bool) -> None:
    """Configure the logger. Ranks with `speaks` False log only warnings and errors by default."""
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
    """Format a number of bytes: 1.50 GB, 2.0 MB, 0.5 kB."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} GB"
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"


def parse_size(size: int | str) -> int:
    """Parse a size in bytes: 1000, "500MB" and "5GB" (powers of ten), "2GiB" (of two)."""
    try:
        parsed = 0 if "e" in str(size).lower() else parse_bytes(str(size), unit="B")
    except ValueError:
        parsed = 0
    if parsed < 1:
        raise ValueError(f"{size!r} is not a size. Give a number of bytes: 500000000, '500MB', '5GB' or '2GiB'.")
    return parsed


def parse_bytes(text: str, unit: str = "GB") -> int:
    """Parse a number of bytes: 80GB and 80G (powers of ten), 80GiB (powers of two), 1.5TB.

    `unit` applies to a number without a unit. Raise ValueError for other texts.
    """
    number, written = _split_number(text)
    # 5Gb is rejected, because a lower-case b after an upper-case letter means bits.
    found = re.fullmatch(r"([kmgt]?)(i?)b?|([kKMGT]?)(i?)B?", written or unit)
    letter, binary = ("", "") if found is None else (found[1] or found[3] or "", found[2] or found[4])
    if found is None or (binary and not letter):
        raise ValueError(f"{text!r} is not a size. Give a number with a unit, as in 80GB, 80GiB or 1.5TB.")
    return int(number * (1024 if binary else 1000) ** _power(letter))


def parse_rate(text: str) -> int:
    """Parse a rate in bytes per second: 50 and 50GB/s, 400Gbit/s and 400Gbps (eight bits per byte)."""
    number, written = _split_number(text)
    bits = re.fullmatch(r"([kKMGT]?)(?:bit/s|bps)", written)
    if bits is not None:
        return int(number * 1000 ** _power(bits[1]) / 8)
    if re.fullmatch(r"|[kKMGT]?i?B(/s)?", written) is None:
        raise ValueError(f"{text!r} is not a rate. Give a number with a unit, as in 50GB/s or 400Gbit/s.")
    return parse_bytes(text.strip().removesuffix("/s"))


def parse_count(text: str) -> int:
    """Parse a count: 7B, 1.3b, 350M, 10k, 7e9 or 7_000_000_000."""
    number, written = _split_number(text)
    if re.fullmatch(r"[kmbtKMBT]?", written) is None:
        raise ValueError(f"{text!r} is not a number of parameters. Give a number such as 7B, 350M or 7e9.")
    scale: int = 1000 ** _power(written)
    return round(number * scale)


def _power(letter: str) -> int:
    """Return the power of a thousand of a letter. B is a billion, like G."""
    return ["", "k", "m", "g", "t"].index(letter.lower().replace("b", "g"))


def _split_number(text: str) -> tuple[Fraction, str]:
    number = r"([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    found = re.fullmatch(rf"\s*{number}\s*([a-zA-Z/]*)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a number")
    return Fraction(found[1].replace("_", "")), found[2]
