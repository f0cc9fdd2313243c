"""Mixtures of experts trained by an engine and by plain torch, for tests of expert parallelism."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from listed_cases import Mixture
from models import config, rank, start
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.comm import local_device

VOCABULARY, LENGTH, MICRO, STEPS, NUM_EXPERTS = 37, 12, 2, 3, 8
SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}
# How tokens are routed, by name: the experts of token t on a rank.
ROUTINGS: dict[str, Any] = {
    "all to one": lambda tokens, rank: torch.full_like(tokens, 5),
    "none to some": lambda tokens, rank: tokens % 3,
    "other on each rank": lambda tokens, rank: (tokens % 2 + 2 * rank) % NUM_EXPERTS,
    "even": lambda tokens, rank: tokens % NUM_EXPERTS,
}


class StackedExperts(nn.Module):
    """Experts with biases. `width` and `hidden` decide whether weights have whole shards; biases have none."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.num_parts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, hidden) / width**0.5)
        self.up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, hidden) / 10)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, hidden, width) / hidden**0.5)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(self.num_parts):
            place, k = torch.where(index == expert)
            hidden = torch.tanh(tokens[place] @ self.up[expert] + self.up_bias[expert])
            output = output.index_add(0, place, hidden @ self.down[expert] * weights[place, k, None])
        return output


class Routed(nn.Module):
    """A model of one expert layer whose routing is given."""

    def __init__(self, routing: str, width: int = 16, hidden: int = 64, skips: bool = False) -> None:
        super().__init__()
        self.routing, self.rank, self.skips = routing, 0, skips
        self.embed = nn.Embedding(VOCABULARY, width)
        self.scale = nn.Linear(width, 2)
        self.experts = onefold.experts(StackedExperts(width, hidden), count="num_parts")
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        place = torch.arange(len(x), device=x.device)
        first = ROUTINGS[self.routing](place, self.rank)
        index = torch.stack([first, (first + 1) % NUM_EXPERTS], 1)
        routed = 0 if self.skips and self.rank == 1 else len(x)
        y = self.experts(x[:routed], index[:routed], self.scale(x[:routed]).softmax(-1))
        x = torch.cat([x[:routed] + y, x[routed:]])
        return F.cross_entropy(self.head(x), labels.flatten())


def make_model(kind: str, **changes: Any) -> nn.Module:
    """Return `Routed` with a routing, a `Mixture` of listed experts, or a small model of transformers."""
    torch.manual_seed(3)
    if kind in ("listed", "MoE"):
        return Mixture(kind, **changes)
    if kind in ROUTINGS:
        return Routed(kind, **changes)
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    losses = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    experts = {
        "Mixtral": {"intermediate_size": 64, "num_local_experts": NUM_EXPERTS},
        "Qwen3Moe": {"intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": NUM_EXPERTS},
        "GptOss": {"intermediate_size": 64, "num_local_experts": NUM_EXPERTS},
        "Qwen2Moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "num_experts": NUM_EXPERTS},
        "DeepseekV3": {
            "moe_intermediate_size": 64,
            "n_routed_experts": NUM_EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 2,
        },
    }
    recomputes = changes.pop("recomputes", False)
    settings = getattr(transformers, f"{kind}Config")(
        **{**sizes, **heads, **losses, **experts[kind], "use_cache": False, **changes}
    )
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(settings)
    if recomputes:
        model.gradient_checkpointing_enable()
    model.train()
    return model


def batch_of(step: int, of_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    ids = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator).to(local_device())
    return {"input_ids": ids, "labels": ids}


def loss_of(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found.loss


def train_plainly(
    model: nn.Module, world: int, micro_steps: int = 1, clipping: float = 0.0
) -> tuple[list[float], list[float]]:
    """Train on the batches of all ranks in plain torch. Return the losses of this rank's batches, and the norms."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_steps):
            for of_rank in range(world):
                model.rank = of_rank  # type: ignore[assignment]
                loss = loss_of(model(**batch_of(step * micro_steps + micro, of_rank)))
                (loss / world / micro_steps).backward()
                losses += [loss.item()] if of_rank == rank() else []
        for parameter in model.parameters():  # an engine steps experts without tokens, too
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def settings_of(stage: int, size: int, **keys: Any) -> dict[str, Any]:
    own = {"expert_parallel_size": size, **keys.pop("onefold", {})}
    return config(stage, **{"optimizer": SGD, "train_micro_batch_size_per_gpu": MICRO, "onefold": own} | keys)


def train(engine: onefold.Engine, steps: int = STEPS, first: int = 0) -> tuple[list[float], list[float]]:
    """Train an engine. Return the losses of this rank and the gradient norms."""
    model, micro_steps = engine.module, engine.batch.accumulation
    model.rank = rank()
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(micro_steps):
            loss = loss_of(engine(**batch_of(step * micro_steps + micro, rank())))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the whole weights. All ranks call this together."""
    with onefold.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone().cpu() for name, value in model.named_parameters()}


def train_beside_torch(
    kind: str, size: int, stage: int, changes: dict[str, Any], keys: dict[str, Any]
) -> dict[str, Any]:
    """Train with divided experts and compare with plain torch. Return what stages are compared by, and traffic."""
    model, world = make_model(kind, **changes), dist.get_world_size()
    reference = copy.deepcopy(model).to(local_device())
    engine = start(model, settings_of(stage, size, **keys))
    divided = [p for unit in engine.state.schedule.units for p in unit.params if p.spec.num_expert_parts > 1]
    losses, norms = train(engine)
    rows = [row for row in engine.ledger.rows() if row.group == "data" or row.operation == "tokens"]
    all_elements = sum(param.layout.total for unit in engine.state.schedule.units for param in unit.params)
    weights = weights_of(model)
    engine.destroy()
    expected_losses, expected_norms = train_plainly(
        reference, world, keys.get("gradient_accumulation_steps", 1), keys.get("gradient_clipping", 0.0)
    )
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-5)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value.detach().cpu(), rtol=1e-4, atol=1e-5, msg=name)
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "divided": sum(param.layout.total for param in divided),
        "rest": all_elements - sum(param.layout.total for param in divided),
        "bytes": {row.operation: row.bytes for row in rows},
        "num_gathers": sum(row.calls for row in rows if row.operation == "gather"),
    }


def save_and_load(folder: str, kind: str, size: int, stage: int, saves: bool, exports: bool) -> dict[str, Any]:
    """Save after two steps, or load what was saved; train one more step."""
    engine = start(make_model(kind), settings_of(stage, size, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}))
    if saves:
        train(engine, 2)
        engine.save_checkpoint(folder, tag="two")
    else:
        engine.load_checkpoint(folder, tag="two")
    before = weights_of(engine.module)
    if exports:
        engine.save_16bit_model(folder)
    losses, norms = train(engine, 1, first=2)
    after = weights_of(engine.module)
    engine.destroy()
    return {"before": before, "losses": losses, "norms": norms, "after": after}
