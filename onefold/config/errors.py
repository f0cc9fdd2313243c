"""The one error a config can end in."""


class ConfigError(ValueError):
    """A config that cannot be used: names the key, what was wrong, and what to write instead."""
