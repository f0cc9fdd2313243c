"""What a training loop calls."""

from onefold.engine.core import Engine

__all__ = ["Engine"]
