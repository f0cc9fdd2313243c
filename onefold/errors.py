"""The error for configs and optimizers that cannot be used, and the format of values in its messages."""

MAX_DIGITS = 300
"""Maximum number of digits of a value. Python itself fails to parse integers with thousands of digits."""


class ConfigError(ValueError, AssertionError):
    """A config that cannot be used. The message names the key, the problem and the fix."""


def shown(value: object) -> str:
    """Format a value for a message. Long values are truncated."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        return "(a number of many digits)"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"
