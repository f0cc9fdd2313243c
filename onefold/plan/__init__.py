"""Pure decisions: what is placed where (table), how it lies in memory (layout), where a model is cut (cut),
what is launched when (program)."""

from onefold.plan.cut import UnitCut, cut, persistent_parameters
from onefold.plan.layout import Layout, Member
from onefold.plan.memory import ModelBytes, count_bytes
from onefold.plan.program import Limits, Moment, Program, coalesce, compile_program
from onefold.plan.table import Part, Placement, Plan, Precision, Tier, Wire, make_plan

__all__ = [
    "Layout",
    "Limits",
    "Member",
    "ModelBytes",
    "Moment",
    "Part",
    "Placement",
    "Plan",
    "Precision",
    "Program",
    "Tier",
    "UnitCut",
    "Wire",
    "coalesce",
    "compile_program",
    "count_bytes",
    "cut",
    "make_plan",
    "persistent_parameters",
]
