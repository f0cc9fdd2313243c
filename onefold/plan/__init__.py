"""All decisions about a run, computed without tensors.

`plan` has the placement of model state, `layout` the offsets in flat parameters, `cut` the units of a model, `program`
the order of collectives, `buffers` the tensors of each flat parameter, `memory` and `traffic` their bytes, `tiers` the
tier of each flat parameter, and `optimizer_spec` the optimizer and the scheduler of the config.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from onefold.config.hyperparameters import HYPERPARAMETERS, READ_NAMES, check_names, read_schedule_param
from onefold.config.signature import check_arguments
from onefold.plan.buffers import BufferKind, BufferSpec, FlatParamSpec, Residency, StateSpec
from onefold.plan.cut import UnitCut, cut, persistent_parameters
from onefold.plan.fp8_plan import Fp8Plan
from onefold.plan.guards import Guards
from onefold.plan.layout import Layout, Member
from onefold.plan.loop_options import Loop, Monitoring
from onefold.plan.memory import BufferBytes, ModelBytes, count_buffers, count_bytes, count_unit_in_use
from onefold.plan.optimizer_spec import OptimizerSpec, SchedulerSpec
from onefold.plan.plan import (
    Feedback,
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
from onefold.plan.traffic import OffloadTraffic, count_offload_traffic
