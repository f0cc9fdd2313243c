"""Where events of training go."""

from onefold.compat.lazy import names

__getattr__, __dir__ = names(__name__, {})
