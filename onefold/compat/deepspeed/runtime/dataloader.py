"""Loaders of micro-batches."""

from __future__ import annotations

from onefold.loader import ResumableLoader as DeepSpeedDataLoader
from onefold.utils import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
