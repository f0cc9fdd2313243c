"""All decisions about a run, computed without tensors.

`plan` has the placement of model state, `layout` the offsets in flat parameters, `cut` the units of a model, `program`
the order of collectives, `memory` bytes and traffic, and `tiers` the tier of each flat parameter.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from onefold.plan.cut import UnitCut, cut, persistent_parameters
from onefold.plan.layout import Layout, Member
from onefold.plan.memory import (
    BufferBytes,
    FlatParamSpec,
    ModelBytes,
    OffloadTraffic,
    Residency,
    StateSpec,
    count_buffers,
    count_bytes,
    count_offload_traffic,
    count_unit_in_use,
)
from onefold.plan.plan import (
    Feedback,
    Loop,
    Monitoring,
    Placement,
    Plan,
    Precision,
    StatePlan,
    Tier,
    Wire,
    make_plan,
    plan_every_stage,
    plan_with_less,
)
from onefold.plan.program import PassPhase, Program, coalesce, compile_program
from onefold.plan.state_formats import StateFormats
from onefold.plan.tiers import assign_tiers
