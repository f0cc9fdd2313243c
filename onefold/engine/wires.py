"""What the engine makes of the plan's wires."""

from __future__ import annotations

from onefold.comm import Feedback, Wires
from onefold.comm.codec import Codec
from onefold.config import Config
from onefold.plan import Plan, Wire


def wires_of(plan: Plan, config: Config) -> Wires:
    """How what may be rounded travels."""
    codes = {Wire.INT8: Codec(8), Wire.INT4: Codec(4)}
    loco = config.zero_optimization.zeropp_loco_param
    coded = plan.gradients.wire is not Wire.NATIVE
    return Wires(
        parameters=codes.get(plan.frozen_wire),
        inside=Codec(8) if coded else None,
        across=codes.get(plan.gradients.wire),
        feedback=Feedback(loco.err_beta, loco.reset_T) if loco is not None and plan.makes_up else None,
    )
