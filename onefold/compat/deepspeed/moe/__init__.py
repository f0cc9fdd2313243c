"""Models of experts; expert-parallel layers are not offered."""

from onefold.compat.lazy import names

__getattr__, __dir__ = names(__name__, {})
