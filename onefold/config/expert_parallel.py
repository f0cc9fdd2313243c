"""DeepSpeed's section for expert parallelism of models that know nothing about it (AutoEP)."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from onefold.config.keys import key, noticed, refused

_if_enabled = partial(key, switch="enabled")
_FOUND = "expert layers are found by how they are called; mark others by onefold.experts(module)"
_OWN = "expert layers compute as the model does"
_ROUTER = "tokens are routed by the router of the model, which onefold does not replace; leave it out"
_found = partial(noticed, reason=_FOUND, switch="enabled")
_own = partial(noticed, reason=_OWN, switch="enabled")
_router = partial(refused, reason=_ROUTER)


@dataclass(frozen=True)
class ExpertParallelism:
    """DeepSpeed's AutoEP. `autoep_size` has the effect of `onefold.expert_parallel_size`."""

    enabled: bool = key(False, "Divide the experts of the model over ranks.")
    autoep_size: int = _if_enabled(1, "Number of parts into which experts are divided.", minimum=1)
    expert_tensor_parallel_size: int = refused(
        1, "Number of ranks that divide each expert.", "experts are not divided further; use 1"
    )
    preset_model: str | None = _found(None, "Name of a known model.")
    moe_layer_pattern: str | None = _found(None, "Name pattern of layers with experts.")
    expert_pattern: str | None = _found(None, "Name pattern of experts.")
    router_pattern: str | None = _found(None, "Name pattern of routers.")
    expert_w1: str | None = _found(None, "Name of the gate weights.")
    expert_w2: str | None = _found(None, "Name of the down weights.")
    expert_w3: str | None = _found(None, "Name of the up weights.")
    num_experts_attr: str | None = _found(None, "Name of the number of experts in the model's config.")
    top_k_attr: str | None = _found(None, "Name of the number of experts of a token in the model's config.")
    has_shared_experts: bool | None = _found(None, "Whether layers have shared experts.")
    shared_experts_pattern: str | None = _found(None, "Name pattern of shared experts.")
    shared_experts_gate_pattern: str | None = _found(None, "Name pattern of the gates of shared experts.")
    expert_activation: str | None = _own(None, "Activation of the experts.")
    use_grouped_mm: bool = _own(True, "Multiply by all experts of a rank in one call.")
    disable_triton_grouped_mm: bool = _own(False, "Do not use Triton for that.")
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = _own(
        "auto", "Implementation of the weighted sum."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = _own("auto", "Implementation of the weights of tokens.")
    gate_up_impl: Literal["separate", "fused"] = _own(
        "separate", "Whether gate and up weights are multiplied together."
    )
    validate_folding_routing: bool = _own(False, "Compare the routing of ranks.")
    async_split_plan: bool = _own(False, "Exchange the numbers of tokens asynchronously.")
    comm_backend: Literal["comm", "deepep"] = _own("comm", "Library that sends tokens.")
    comm_num_sm: int = _own(12, "Multiprocessors that send tokens.")
    comm_qp_margin: int = _own(4, "Additional queue pairs.")
    comm_max_tokens_per_rank: int = _own(0, "Tokens that buffers have room for.")
    route_norm: bool | None = _router(None, "Normalize the weights of the experts of a token.")
    route_scale: float = _router(1.0, "Factor of the weights.")
    routed_scaling_factor: float | None = _router(None, "Factor of the weights.", auto=True)
    score_apply: Literal["auto", "pre", "post"] = _router(
        "auto", "Whether tokens or results are multiplied by weights."
    )
    score_func: Literal["auto", "softmax", "sigmoid"] = _router("auto", "Function of the scores.")
    top_k: int | None = _router(None, "Number of experts of a token.", auto=True)
    num_expert_groups: int | None = _router(None, "Number of groups of experts.")
    num_limited_groups: int | None = _router(None, "Number of groups from which a token chooses.")
    load_balance_coeff: float | None = _router(None, "Rate at which the bias of experts follows their load.")
