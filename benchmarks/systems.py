"""The systems under test: each builds a model its own way and returns a function that trains it on one micro-batch.

All use the same AdamW hyperparameters and no clipping. In fp32 everything is fp32; in bf16 each system runs in its
natural mode: autocast for plain torch and DDP, a mixed-precision policy for FSDP2, 16-bit weights with fp32 masters
in the others. Gradients are then added in fp32, or, where the name ends so (FSDP2's `-bf16`, our `-native`), in bf16.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Construct = Callable[[], nn.Module]

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Workload:
    """What one run trains, and for how long."""

    preset: str
    dtype: str
    batch: int
    sequence: int
    num_steps: int
    num_warmup_steps: int
    device: str
    recompute: bool = False
    seed: int = 1
    micro_steps: int = 1
    """Micro-steps per step. Each has `batch` sequences."""
    device_memory: float | None = None
    """`onefold.device_memory` of offloaded systems, in GB."""
    batch_chunks: int | str = 0
    """`onefold.batch_chunks` of onefold's systems, which then also compute the loss in tiles."""
    compiled: bool = False
    """Blocks are compiled."""


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own for the matrices of blocks, and its AdamW for the rest."""
    inside = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon([p for p in model.parameters() if id(p) in inside], LEARNING_RATE, WEIGHT_DECAY),
        torch.optim.AdamW(others, LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, fused=True),
    ]


MUON = {
    "type": "Muon",
    "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
}


def _torch_loop(
    model: nn.Module, workload: Workload, autocast: bool, optimizers: list[torch.optim.Optimizer] | None = None
) -> Step:
    optimizers = optimizers or [adamw(model)]

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(workload.device, torch.bfloat16) if autocast else nullcontext()

    num_calls = 0

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        with precision():
            loss = model(tokens, targets)
        (loss / workload.micro_steps).backward()
        if num_calls % workload.micro_steps == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def compile_blocks(model: nn.Module, workload: Workload) -> nn.Module:
    for block in model.blocks if workload.compiled else ():  # type: ignore[union-attr]
        block.compile()  # type: ignore[operator]
    return model


def _plain(construct: Construct, workload: Workload) -> Step:
    return _torch_loop(compile_blocks(construct(), workload), workload, autocast=workload.dtype == "bf16")


def _torchao_fp8(recipe: str) -> Callable[[Construct, Workload], Step]:
    """Plain torch, with the linear layers of blocks converted by torchao."""

    def build(construct: Construct, workload: Workload) -> Step:
        float8 = importlib.import_module("torchao.float8")
        model = construct()
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "blocks" in name)
        return _torch_loop(compile_blocks(model, workload), workload, autocast=workload.dtype == "bf16")

    return build


def _plain_graph(construct: Construct, workload: Workload) -> Step:
    """Plain torch, with the whole step in one CUDA graph."""
    model = construct()
    settings = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True, capturable=True)
    eager = _torch_loop(model, workload, workload.dtype == "bf16", [optimizer])
    graph, stream, num_calls = torch.cuda.CUDAGraph(), torch.cuda.Stream(), 0
    given: list[torch.Tensor] = []
    found: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = eager(tokens, targets)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if not given:
            given.extend([tokens.clone(), targets.clone()])
            with torch.cuda.graph(graph):
                found.append(eager(*given))
        given[0].copy_(tokens)
        given[1].copy_(targets)
        graph.replay()
        return found[0].clone()

    return step


def _plain_muon(construct: Construct, workload: Workload) -> Step:
    model = construct()
    return _torch_loop(model, workload, workload.dtype == "bf16", muon(model))


def _plain_8bit(module: str) -> Callable[[Construct, Workload], Step]:
    """`AdamW8bit` of bitsandbytes or torchao on fp32 weights under autocast."""

    def build(construct: Construct, workload: Workload) -> Step:
        kind = importlib.import_module(module).AdamW8bit
        model = construct()
        settings = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
        return _torch_loop(model, workload, workload.dtype == "bf16", [kind(model.parameters(), **settings)])

    return build


def _ddp(construct: Construct, workload: Workload) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(construct())
    return _torch_loop(wrapped, workload, autocast=workload.dtype == "bf16")


def _fsdp2(
    reshard: bool,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    offload: bool = False,
    ours: dict[str, Any] | None = None,
    in_16_bits: bool = False,
) -> Callable[[Construct, Workload], Step]:
    """FSDP2: by itself, with its own offload of everything, or with our offload of the optimizer states (`ours`).

    `in_16_bits`: parameters are bf16, with fp32 masters in host memory. Otherwise fp32, computed with in bf16.
    """

    def build(construct: Construct, workload: Workload) -> Step:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        model = construct()
        if in_16_bits and workload.dtype == "bf16":
            model.to(torch.bfloat16)
        mesh = dist.init_device_mesh(workload.device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if workload.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        rest = CPUOffloadPolicy() if offload else OffloadPolicy()
        compile_blocks(model, workload)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=rest)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=rest)
        if ours is None:
            return _torch_loop(model, workload, autocast=False)
        import onefold

        optimizer = onefold.fsdp.offload(model, adamw(model), **ours)
        return _torch_loop(model, workload, autocast=False, optimizers=[optimizer])

    return build


def zero_config(stage: int, workload: Workload) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": workload.micro_steps,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": {"stage": stage},
    }


def _engine_loop(engine: Any) -> Step:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _deepspeed(stage: int, **offload: Any) -> Callable[[Construct, Workload], Step]:
    def build(construct: Construct, workload: Workload) -> Step:
        import deepspeed

        config = zero_config(stage, workload)
        config["zero_optimization"] |= offload
        model = construct()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return _engine_loop(engine)

    return build


# Nothing is kept whole but what is being used: the least memory, and the most traffic.
NOTHING_KEPT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
# The next unit on its way while one computes, as in FSDP2, and a unit that is used again at once kept for that.
ONE_AHEAD = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 1,
    "stage3_prefetch_bucket_size": 1,
}


def _onefold(
    stage: int,
    limits: dict[str, int] | None = None,
    optimizer: dict[str, Any] | None = None,
    fp8: dict[str, Any] | None = None,
    **own: Any,
) -> Callable[[Construct, Workload], Step]:
    def build(construct: Construct, workload: Workload) -> Step:
        import onefold

        config = {**zero_config(stage, workload), "onefold": {**own, "batch_chunks": workload.batch_chunks}}
        config["optimizer"] = optimizer or config["optimizer"]
        config |= {"fp8": {"enabled": True, **fp8}} if fp8 is not None else {}
        config["zero_optimization"] |= {"overlap_comm": True, **(limits or {})}  # as DDP and FSDP2 do unasked
        with onefold.zero.Init(config_dict_or_path=config, enabled=limits is not None):
            model = construct()
        if "expert_parallel_size" in own:
            for block in model.blocks:
                onefold.experts(block.routed.experts)
        engine, *_ = onefold.initialize(model=model, model_parameters=model.parameters(), config=config)
        if workload.compiled:
            engine.compile()
        return _engine_loop(engine)

    return build


CPU = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": os.environ.get("ONEFOLD_BENCH_DISK", tempfile.gettempdir()), "max_in_cpu": 0}
AUTO_RATIO = {"ratio": "auto"}
AUTO = {"device": "cpu", **AUTO_RATIO}
# Whatever fits under the budget stays on the device: parameters at 2 bytes, states and gradients at 14, and what is on
# its way down. Of 1.3B parameters 72% leaves the states of 8 blocks, 30%, on the host.
SOME_BUDGET, ROOMY_BUDGET, LARGEST_BUDGET = "bytes of 72% of the states", 60.0, 118.0
# Masters and states in fewer bytes.
INT8 = {"state_dtype": "int8"}
SPLIT_16, SPLIT_8 = {"master_dtype": "bf16_int16"}, {"master_dtype": "bf16_int8"}
BF16 = {"state_dtype": "bf16", "master_dtype": "bf16"}


def _offloaded(
    stage: int, budget: float | str | None = None, own: dict[str, Any] | None = None, **offload: Any
) -> Callable[[Construct, Workload], Step]:
    def build(construct: Construct, workload: Workload) -> Step:
        import onefold

        own_section = {**(own or {}), "batch_chunks": workload.batch_chunks}
        config = {**zero_config(stage, workload), "onefold": own_section}
        config["zero_optimization"] |= {"overlap_comm": True, **offload}
        with onefold.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            model = construct()
        if budget is not None:
            from onefold.runtime import unsharded_shape

            num = sum(unsharded_shape(parameter).numel() for parameter in model.parameters())
            room = budget if isinstance(budget, float) else (2 + 0.72 * 14) * num / 1e9
            config["onefold"]["device_memory"] = room
        if workload.device_memory is not None:
            config["onefold"]["device_memory"] = workload.device_memory
        engine, *_ = onefold.initialize(model=model, model_parameters=model.parameters(), config=config)
        return _engine_loop(engine)

    return build


IN_BACKWARD = {"step_in_backward": True, "nonfinite_gradients": "ignore"}
SPECULATIVE = {"step_in_backward": True, "nonfinite_gradients": "skip"}

# The same with gradients that are added in bf16. These are run where they are named, and are no members of a family.
REDUCING_IN_BF16: dict[str, Callable[[Construct, Workload], Step]] = {
    "fsdp2-keep-bf16": _fsdp2(reshard=False, reduce_dtype=torch.bfloat16),
    "fsdp2-reshard-bf16": _fsdp2(reshard=True, reduce_dtype=torch.bfloat16),
    "onefold-1-native": _onefold(1, collective="native"),
    "onefold-2-native": _onefold(2, collective="native"),
    "onefold-3-native": _onefold(3, NOTHING_KEPT, collective="native"),
    "onefold-3-ahead-native": _onefold(3, ONE_AHEAD, collective="native"),
}
SYSTEMS: dict[str, Callable[[Construct, Workload], Step]] = {
    "torch": _plain,
    "ddp": _ddp,
    "fsdp2-keep": _fsdp2(reshard=False),
    "fsdp2-reshard": _fsdp2(reshard=True),
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"onefold-{stage}": _onefold(stage) for stage in (0, 1, 2)},
    "onefold-3": _onefold(3, NOTHING_KEPT),
    "onefold-3-ahead": _onefold(3, ONE_AHEAD),
    "onefold-3-default": _onefold(3, {}),
    "graph-torch": _plain_graph,
    "graph-onefold-2": _onefold(2, cuda_graphs="on"),
    "graph-onefold-2-blocks": _onefold(2, cuda_graphs="blocks"),
    "graph-onefold-3": _onefold(3, NOTHING_KEPT, cuda_graphs="on"),
    "muon-torch": _plain_muon,
    "muon-onefold-0": _onefold(0, optimizer=MUON),
    "muon-onefold-2": _onefold(2, optimizer=MUON),
    "muon-onefold-3": _onefold(3, NOTHING_KEPT, optimizer=MUON),
    "fp8-torchao": _torchao_fp8("tensorwise"),
    "fp8-torchao-rowwise": _torchao_fp8("rowwise"),
    "fp8-onefold-2": _onefold(2, fp8={}),
    "fp8-onefold-2-rowwise": _onefold(2, fp8={"recipe": "rowwise"}),
    "fp8-onefold-3": _onefold(3, NOTHING_KEPT, fp8={}),
    "fp8-onefold-3-bf16-gathers": _onefold(3, NOTHING_KEPT, fp8={"all_gather": False}),
    "experts-onefold-3-2": _onefold(3, NOTHING_KEPT, expert_parallel_size=2),
    "experts-onefold-3-4": _onefold(3, NOTHING_KEPT, expert_parallel_size=4),
    "experts-onefold-2-2": _onefold(2, expert_parallel_size=2),
    "experts-onefold-2-4": _onefold(2, expert_parallel_size=4),
    "8bit-bitsandbytes": _plain_8bit("bitsandbytes.optim"),
    "8bit-torchao": _plain_8bit("torchao.optim"),
    "8bit-onefold-2": _onefold(2, **INT8),
    "8bit-onefold-2-split": _onefold(2, **INT8, **SPLIT_16),
    "8bit-onefold-2-split8": _onefold(2, **INT8, **SPLIT_8),
    "8bit-onefold-3": _onefold(3, NOTHING_KEPT, **INT8, **SPLIT_8),
    "split-onefold-2": _onefold(2, **SPLIT_16),
    "bf16-onefold-2": _onefold(2, **BF16),
    "offload-fsdp2": _fsdp2(reshard=True, offload=True),
    "offload-fsdp2-onefold": _fsdp2(reshard=True, ours={"ratio": 1.0}),
    "offload-fsdp2-onefold-async": _fsdp2(reshard=True, ours={"ratio": 1.0, "non_blocking": True}),
    "offload-fsdp2-onefold-auto": _fsdp2(reshard=True, ours={"ratio": "auto"}),
    "offload-fsdp2-onefold-8bit": _fsdp2(reshard=True, ours={"ratio": 1.0, "states": "int8"}),
    "offload-fsdp2-onefold-16bit": _fsdp2(reshard=True, ours={"ratio": 1.0}, in_16_bits=True),
    "offload-deepspeed-2": _deepspeed(2, offload_optimizer=CPU),
    "offload-deepspeed-3": _deepspeed(3, offload_optimizer=CPU, offload_param=CPU),
    "offload-deepspeed-disk": _deepspeed(3, offload_optimizer={**DISK, "pipeline_read": True, "pipeline_write": True}),
    "offload-onefold-2": _offloaded(2, offload_optimizer=CPU),
    "offload-onefold-2-8bit": _offloaded(2, None, INT8, offload_optimizer=CPU),
    "offload-onefold-2-host": _offloaded(2, None, {"offloaded_step": "host"}, offload_optimizer=CPU),
    "offload-onefold-2-through": _offloaded(2, None, {"offloaded_step": "device"}, offload_optimizer=CPU),
    "offload-onefold-2-in-backward": _offloaded(2, None, IN_BACKWARD, offload_optimizer=CPU),
    "offload-onefold-3": _offloaded(3, offload_optimizer=CPU, offload_param=CPU),
    "offload-onefold-3-in-backward": _offloaded(3, None, IN_BACKWARD, offload_optimizer=CPU, offload_param=CPU),
    "offload-onefold-2-speculative": _offloaded(2, None, SPECULATIVE, offload_optimizer=CPU),
    "offload-onefold-3-speculative": _offloaded(3, None, SPECULATIVE, offload_optimizer=CPU, offload_param=CPU),
    "offload-onefold-3-no-cache": _offloaded(3, None, {"device_cache": 0}, offload_optimizer=CPU, offload_param=CPU),
    "offload-onefold-auto": _offloaded(2, SOME_BUDGET, offload_optimizer=AUTO),
    "offload-onefold-roomy": _offloaded(2, ROOMY_BUDGET, offload_optimizer=AUTO),
    "offload-onefold-disk": _offloaded(3, offload_optimizer=DISK),
    "offload-onefold-largest": _offloaded(3, LARGEST_BUDGET, offload_optimizer=AUTO),
    "offload-onefold-largest-in-backward": _offloaded(3, LARGEST_BUDGET, IN_BACKWARD, offload_optimizer=AUTO),
    "offload-onefold-largest-8bit": _offloaded(
        3, LARGEST_BUDGET, {**INT8, **SPLIT_8}, offload_optimizer=AUTO, offload_param=CPU
    ),
    "offload-onefold-largest-8bit-in-backward": _offloaded(
        3, LARGEST_BUDGET, {**INT8, **SPLIT_8, **IN_BACKWARD}, offload_optimizer=AUTO, offload_param=CPU
    ),
    "offload-onefold-largest-8bit-disk": _offloaded(
        3,
        LARGEST_BUDGET,
        {**INT8, **SPLIT_8, **IN_BACKWARD},
        offload_optimizer={**DISK, **AUTO_RATIO},
        offload_param=CPU,
    ),
    **REDUCING_IN_BF16,
}


# What reports say beside figures of stage 3.
LIMITS = (
    "onefold-3: persistence threshold, live and reuse limits 0; -ahead: persistence 0, live 1e9, reuse 1, prefetch 1 "
    "(one unit ahead, as in FSDP2); -default: persistence 1e5, live 1e9, reuse 1e9, prefetch 5e7; all three built "
    "under zero.Init"
)


def parse_systems(text: str) -> list[str]:
    """A comma-separated list of names; a family name ('onefold') stands for its members."""
    chosen: list[str] = []
    for name in text.split(","):
        family = [each for each in SYSTEMS if each.startswith(f"{name}-") and each not in REDUCING_IN_BF16]
        members = [name] if name in SYSTEMS else family
        if not members:
            raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}")
        chosen += [member for member in members if member not in chosen]
    return chosen


def missing_reason(system: str) -> str | None:
    """Why a system cannot run here at all, or None."""
    for package in ("deepspeed", "onefold", "torchao"):
        if package in system.split("-") and importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None
