"""Pure decisions: what is placed where (table), how it lies in memory (layout), where a model is cut (cut),
what is launched when (program), what rests in which tier (tiers)."""

from onefold.plan.cut import UnitCut, cut, persistent_parameters
from onefold.plan.layout import Layout, Member
from onefold.plan.memory import Crossing, FlatParamSpec, ModelBytes, Residency, count_bytes, count_crossing
from onefold.plan.program import Limits, Moment, Program, coalesce, compile_program
from onefold.plan.table import Cut, Feedback, Part, Placement, Plan, Precision, Tier, Wire, make_plan, plan_every_stage
from onefold.plan.tiers import TierBudget, assign_tiers

__all__ = [
    "Crossing",
    "Cut",
    "Feedback",
    "FlatParamSpec",
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
    "Residency",
    "Tier",
    "TierBudget",
    "UnitCut",
    "Wire",
    "assign_tiers",
    "coalesce",
    "compile_program",
    "count_bytes",
    "count_crossing",
    "cut",
    "make_plan",
    "persistent_parameters",
    "plan_every_stage",
]
