"""Count model states as tutorials and the ZeRO paper do.

Tutorials count 2 bytes per parameter for 16-bit parameters, 2 for gradients, and for Adam either two fp32 moments (8
bytes) or the moments and an fp32 master (12 bytes). The plan counts exactly: gradients are accumulated in fp32 where
several ranks or micro-steps contribute, and padding is included.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.plan import Placement
from onefold.plan.plan import TABLE

MOMENTS, MOMENTS_AND_MASTER = 8, 12


@dataclass(frozen=True)
class TextbookBytes:
    """Bytes of model states on one GPU."""

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        """Bytes of all model states."""
        return self.parameters + self.gradients + self.states


def count_as_textbook(
    num_parameters: float, num_gpus: int, stage: int, state_bytes: int = MOMENTS_AND_MASTER
) -> TextbookBytes:
    """Count 2 bytes of parameters, 2 of gradients and `state_bytes` of states, each sharded or not by the stage.

    Gradients are not sharded in stage 1, as in backward.
    """
    shares = [num_gpus if placement is Placement.SHARDED else 1 for placement in TABLE[stage]]
    parameters, gradients, states = (
        num_parameters * width / share for width, share in zip((2, 2, state_bytes), shares, strict=True)
    )
    return TextbookBytes(parameters, gradients, states)
