"""Expert parallelism: the ranks of a group have different experts, and send each other the tokens for them."""

from onefold.moe.active_parameters import ParameterCounts, count_parameters, describe_layers, experts_per_token
from onefold.moe.divided_experts import ExpertParallel, make_expert_parallel
from onefold.moe.expert_layers import (
    ExpertLayer,
    check_division,
    expert_layers,
    expert_parameters,
    experts,
    requested_parallel_size,
)

__all__ = [
    "ExpertLayer",
    "ExpertParallel",
    "ParameterCounts",
    "check_division",
    "count_parameters",
    "describe_layers",
    "expert_layers",
    "expert_parameters",
    "experts",
    "experts_per_token",
    "make_expert_parallel",
    "requested_parallel_size",
]
