"""Accumulation over three micro-steps in every tier: the bits of no offload, and the bytes of the plan.

Every kind of step is covered: clipping, fp16 overflow, whole matrices and quantized states. `test_device_pass.py` runs
the same cases next to a simulated GPU, and `test_gpu_offload.py` next to a real one.
"""

from __future__ import annotations

from typing import Any

import torch
from covering import covering
from models import Trace, batches, config, first_difference, more, net, precision, start, weights_of
from test_offload import CPU, nvme
from test_offload_cases import NOTHING_KEPT, below

import onefold
from onefold.plan import Tier

ACCUMULATION, NUM_STEPS = 3, 5
CLIPPED = {"gradient_clipping": 0.3, **precision("bf16")}
# The first steps overflow.
OVERFLOWS = {"gradient_clipping": 0.3, "fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}}
INT8 = {"state_dtype": "int8", "int8_min_numel": 256}
MUON = {"type": "Muon", "params": {"lr": 1e-2}}

KINDS: dict[str, dict[str, Any]] = {
    "clipping": CLIPPED,
    "fp32": {"gradient_clipping": 0.3},
    "no clipping": precision("bf16"),
    "overflow": OVERFLOWS,
    "muon": {**CLIPPED, "optimizer": MUON},
    "muon, overflow": {**OVERFLOWS, "optimizer": MUON},
    "int8": {**CLIPPED, "onefold": INT8},
    "int8, overflow": {**OVERFLOWS, "onefold": INT8},
    "int8, split masters": {**CLIPPED, "onefold": {**INT8, "master_dtype": "bf16_int16"}},
    "sums in bf16": {**CLIPPED, "data_types": {"grad_accum_dtype": "bf16"}},
}


def tiers(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """name -> stage and the keys that offload. The first one is the reference."""
    disk = nvme(folder, buffer_count=2, buffer_size=4096)
    return {
        "device": (2, {}),
        "3 device": (3, {}),
        "2 cpu": (2, {"offload_optimizer": CPU}),
        "3 half cpu": (3, {"offload_optimizer": {**CPU, "ratio": 0.5}, "offload_param": CPU}),
        "3 cpu cpu": (3, {"offload_optimizer": CPU, "offload_param": CPU}),
        "3 cpu disk": (3, {"offload_optimizer": CPU, "offload_param": disk}),
        "2 disk": (2, {"offload_optimizer": disk}),
        "3 disk cpu": (3, {"offload_optimizer": disk, "offload_param": CPU}),
        "3 disk disk": (3, {"offload_optimizer": disk, "offload_param": disk}),
    }


def wrong_bytes(engine: onefold.Engine, *kinds: str) -> list[str]:
    """Return the kinds of model state whose bytes differ from the plan, by tier."""
    found = []
    for tier in Tier:
        held, planned = engine.model_memory.held_bytes(tier), engine.model_memory.planned_bytes(tier)
        found += [
            f"{kind} on {tier.value}: {getattr(held, kind)}, planned {getattr(planned, kind)}"
            for kind in kinds
            if getattr(held, kind) != getattr(planned, kind)
        ]
    return found


def run(kind: str, folder: str, who: str | None = None) -> list[str]:
    """Train in every tier, and return in words what differs from no offload, or from the plan.

    `who` steps offloaded states next to a GPU.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    told: list[str] = []
    reference: Any = None
    for name, (stage, keys) in tiers(folder).items():
        settings = config(stage, gradient_accumulation_steps=ACCUMULATION, **KINDS[kind])
        settings["zero_optimization"] |= {**keys, **(NOTHING_KEPT if stage == 3 else {})}
        if who is not None and keys:
            settings["onefold"] = {**settings.get("onefold", {}), "offloaded_step": who}
        engine = start(net(), settings)
        losses, norms, skipped = [], [], []
        for number, (x, y) in enumerate(batches(ACCUMULATION * NUM_STEPS)):
            if number == ACCUMULATION * (NUM_STEPS - 1):
                engine.wait_for_step()
                before = engine.ledger.copy()
            loss = engine(x, y)
            engine.backward(loss)
            losses.append(loss.item())
            if engine.is_gradient_accumulation_boundary():
                told += [f"{name}: {each}" for each in wrong_bytes(engine, "gradients")]
            engine.step()
            norms.append(engine.get_global_grad_norm())
            skipped.append(engine.skipped_steps)
        engine.wait_for_step()
        engine.state.step.wait_for_host()
        moved, planned = engine.ledger.since(before), engine.model_memory.planned_offload_traffic()
        counted = tuple(moved.bytes(way) for way in ("down", "up", "read", "write"))
        if counted != (planned.down, planned.up, planned.read, planned.written):
            told.append(f"{name}: {counted} copied, planned {planned}")
        told += [f"{name}: {each}" for each in wrong_bytes(engine, "parameters", "masters", "states")]
        states = [state.cpu() for state in below(engine)]
        trace = Trace(losses, norms, {key: weight.cpu() for key, weight in weights_of(engine.module).items()})
        engine.destroy()
        if bool(skipped[-1]) != ("overflow" in kind) or skipped[-1] != skipped[-2 * ACCUMULATION - 1]:
            told.append(f"{name}: {skipped} steps were skipped, but only the first ones should")
        reference = reference or (trace, skipped, states)
        for got, expected in zip((trace, skipped, states), reference, strict=True):
            if (difference := first_difference(got, expected)) is not None:
                told.append(f"{name}: {difference}")
    return told


@covering(
    kind=(
        "overflow",
        "int8",
        more("clipping"),
        more("muon"),
        more("fp32"),
        more("no clipping"),
        more("muon, overflow"),
        more("int8, overflow"),
        more("int8, split masters"),
        more("sums in bf16"),
    ),
    world=(1, more(2), more(3)),
    strength=1,
)
def test_accumulation_has_the_bits_of_no_offload_and_the_bytes_of_the_plan(on_ranks, tmp_path, world, kind):
    for told in on_ranks(world, run, kind, str(tmp_path)):
        assert told == []
