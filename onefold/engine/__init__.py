"""The engine that a training loop calls, and its parts."""

from onefold.engine.core import Engine

__all__ = ["Engine"]
