"""Units and when they move."""

from onefold.runtime.build import build_units, draft_units
from onefold.runtime.homes import Home, about_to_write, gathered, home_of, whole_shape
from onefold.runtime.hooks import Hooks
from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Run, Unit

__all__ = [
    "Home",
    "Hooks",
    "Run",
    "Schedule",
    "Unit",
    "about_to_write",
    "build_units",
    "draft_units",
    "gathered",
    "home_of",
    "whole_shape",
]
