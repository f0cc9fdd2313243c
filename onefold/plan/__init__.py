"""Pure decisions: what is placed where (table), how it lies in memory (layout), where a model is cut (cut),
what is launched when (program), what rests in which tier (tiers)."""

from onefold.plan.cut import UnitCut, cut, persistent_parameters
from onefold.plan.layout import Layout, Member
from onefold.plan.memory import Counting, Crossing, ModelBytes, Rest, RunShape, count_bytes, count_crossing
from onefold.plan.program import Limits, Moment, Program, coalesce, compile_program
from onefold.plan.table import Part, Placement, Plan, Precision, Tier, Wire, make_plan
from onefold.plan.tiers import Room, settle_tiers

__all__ = [
    "Counting",
    "Crossing",
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
    "Rest",
    "Room",
    "RunShape",
    "Tier",
    "UnitCut",
    "Wire",
    "coalesce",
    "compile_program",
    "count_bytes",
    "count_crossing",
    "cut",
    "make_plan",
    "persistent_parameters",
    "settle_tiers",
]
