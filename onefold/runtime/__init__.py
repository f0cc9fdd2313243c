"""Units and when they move."""

from onefold.runtime.build import build_units
from onefold.runtime.hooks import Hooks
from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Run, Unit

__all__ = ["Hooks", "Run", "Schedule", "Unit", "build_units"]
