"""DeepSpeed's layer of experts, `deepspeed.moe.layer.MoE`, whose experts `onefold.moe` divides over ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.compat.moe_gate import TopKGate
from onefold.log import logger
from onefold.moe import experts as mark_experts

POLICIES = (None, "None", "Jitter", "RSample")


class Experts(nn.Module):
    """Copies of an expert, in a list. With an engine, each rank computes a part of them."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        for each in self.deepspeed_experts:
            each.register_forward_hook(_without_bias)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return the results of rows that are sorted by expert, by the number of rows of each expert.

        Without `counts`, the second dimension is divided between the experts, as in DeepSpeed.
        """
        dim = 1 if counts is None else 0
        parts = inputs.chunk(self.num_local_experts, dim=1) if counts is None else inputs.split(list(counts))
        pairs = zip(self.deepspeed_experts, parts, strict=True)
        return torch.cat([expert(part) for expert, part in pairs], dim=dim)


def _without_bias(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the output of an expert that returns its bias next to it. The bias is ignored, as in DeepSpeed."""
    return output[0] if isinstance(output, tuple) else output


class MOELayer(nn.Module):
    """A gate, and the experts that it chooses, of which `experts` has all."""

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        num_experts = len(experts.deepspeed_experts)
        if num_experts != gate.num_experts:
            raise ValueError(
                f"MOELayer: the gate chooses among {gate.num_experts} experts, but the list has {num_experts}. Use "
                "MoE, which makes all experts on every rank."
            )
        if use_tutel:
            logger.warning("MoE: use_tutel has no effect, because onefold has its own exchange of tokens")
        if num_experts > 1:
            mark_experts(experts, parallel_size=ep_size if ep_size > 1 else None)
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size, self.num_local_experts = ep_group_name, ep_size, num_local_experts
        self.l_aux: Tensor | None = None
        """The loss that balances experts, of the last call."""
        self.exp_counts: Tensor | None = None
        """The number of choices of each expert in the last call."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the results of the last call: a tensor with a graph cannot be copied."""
        return {**self.__dict__, "l_aux": None, "exp_counts": None}

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = routing.loss, routing.counts
        k, num_experts = routing.index.shape[1], self.gate.num_experts
        if tokens.is_meta:  # a dry run assumes that every expert gets as many tokens
            each = len(tokens) * k // num_experts
            order, counts = routing.index.flatten()[: each * num_experts], [each] * num_experts
        else:
            chosen = routing.index.masked_fill(~routing.kept, num_experts).flatten()
            counts = torch.bincount(chosen, minlength=num_experts + 1).tolist()[:num_experts]
            order = chosen.argsort(stable=True)[: sum(counts)]
        results = self.experts(tokens[order // k], counts)
        weights = routing.weights.flatten()[order].unsqueeze(1).to(results.dtype)
        output = torch.zeros_like(tokens, dtype=results.dtype).index_add(0, order // k, results * weights)
        return output.to(hidden_states.dtype).view(hidden_states.shape)


class MoE(nn.Module):
    """A layer of `num_experts` copies of `expert`, of which a gate chooses `k` for each token.

    `ep_size` has the effect of `onefold.expert_parallel_size`, in every stage. The list of experts has all of them on
    every rank. See [Note: gating within a capacity] for the other arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise ValueError(
                "MoE: enable_expert_tensor_parallelism divides each expert, which is not supported. Leave it out; "
                "ep_size divides the experts between ranks."
            )
        if num_experts % ep_size:
            raise ValueError(f"MoE: ep_size = {ep_size} does not divide num_experts = {num_experts}. Use a divisor.")
        if noisy_gate_policy not in POLICIES:
            raise ValueError(f"MoE: noisy_gate_policy = {noisy_gate_policy!r}. Use 'Jitter', 'RSample' or None.")
        self.ep_size, self.num_experts, self.num_local_experts = ep_size, num_experts, num_experts // ep_size
        self.use_residual, self.expert_group_name = use_residual, f"ep_size_{ep_size}"
        self.enable_expert_tensor_parallelism = False
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        experts = Experts(expert, num_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `initialize` divides the experts."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the loss that balances experts, and the number of choices of each expert."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            found = self.mlp(hidden_states)
            residual = found[0] if isinstance(found, tuple) else found
            coefficients = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * coefficients[..., 0:1] + residual * coefficients[..., 1:]
        loss, counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert loss is not None
        assert counts is not None
        return output, loss, counts
