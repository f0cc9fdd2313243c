"""Pure decisions: what is placed where (table), how it lies in memory (layout), where a model is cut (cut)."""

from onefold.plan.cut import UnitCut, cut
from onefold.plan.layout import Layout, Member
from onefold.plan.memory import ModelBytes, count_bytes
from onefold.plan.table import Part, Placement, Plan, Precision, Tier, Wire, make_plan

__all__ = [
    "Layout",
    "Member",
    "ModelBytes",
    "Part",
    "Placement",
    "Plan",
    "Precision",
    "Tier",
    "UnitCut",
    "Wire",
    "count_bytes",
    "cut",
    "make_plan",
]
