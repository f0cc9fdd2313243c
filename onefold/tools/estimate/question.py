"""The input of a forecast: a model on a machine, in a list of settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onefold.plan import Placement
from onefold.plan.plan import TABLE
from onefold.tools.estimate.machines import Machine
from onefold.tools.estimate.models import ModelSource


@dataclass(frozen=True)
class Setting:
    """A choice of stage, offload and quantized collectives: a name, and the section `zero_optimization` of a config."""

    name: str
    zero: dict[str, Any]

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded."""
        return TABLE[self.zero["stage"]][0] is Placement.SHARDED


def settings_for(machine: Machine) -> list[Setting]:
    """Return every stage, offload and ZeRO++ setting that this machine can run."""
    cpu = {"device": "cpu", "pin_memory": True}
    nvme = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
    found: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    found |= {f"stage {stage} + optimizer cpu": {"stage": stage, "offload_optimizer": cpu} for stage in (2, 3)}
    whole: dict[str, Any] = {"stage": 3}
    found["stage 3 + optimizer, param cpu"] = {**whole, "offload_optimizer": cpu, "offload_param": cpu}
    if machine.nvme:
        found["stage 3 + optimizer nvme"] = {**whole, "offload_optimizer": nvme}
        found["stage 3 + optimizer nvme, param cpu"] = {**whole, "offload_optimizer": nvme, "offload_param": cpu}
        found["stage 3 + optimizer, param nvme"] = {**whole, "offload_optimizer": nvme, "offload_param": nvme}
    if machine.nodes > 1 and machine.gpus > 1:
        near = {"zero_hpz_partition_size": machine.gpus}
        wires = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        found |= {"stage 3 + hpZ": {**whole, **near}, "stage 3 + qwZ + qgZ": {**whole, **wires}}
        found["stage 3 + ZeRO++ (all three)"] = {**whole, **near, **wires}
    return [Setting(name, {**zero, "overlap_comm": True}) for name, zero in found.items()]


@dataclass(frozen=True)
class Question:
    """A model on a machine, with a base config, a micro-batch and a sequence length."""

    model: ModelSource
    machine: Machine
    config: dict[str, Any]
    micro_batch: int | None = None
    sequence_length: int | None = None

    def document(self, setting: Setting, micro_batch: int) -> dict[str, Any]:
        """Return the base config with this setting and micro-batch in place of its own."""
        base = {key: value for key, value in self.config.items() if key not in _BATCH}
        zero = {key: value for key, value in base.get("zero_optimization", {}).items() if key not in _CHOSEN}
        return {
            **base,
            "zero_optimization": {**zero, **setting.zero},
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": self.num_micro_steps,
        }

    @property
    def num_micro_steps(self) -> int:
        """The micro-steps of a step."""
        accumulation = self.config.get("gradient_accumulation_steps", 1)
        return accumulation if isinstance(accumulation, int) else 1

    def in_chunks(self) -> Question:
        """Return the question with all micro-steps as one micro-batch, in as many chunks."""
        number = self.num_micro_steps
        own = {**self.config.get("onefold", {}), "batch_chunks": number}
        config = {**self.config, "gradient_accumulation_steps": 1, "onefold": own}
        return replace(self, config=config, micro_batch=number * (self.micro_batch or 1))

    def with_key(self, section: str, name: str, value: Any) -> Question:
        """Return the question with another value of a key in its base config."""
        return replace(self, config={**self.config, section: {**self.config.get(section, {}), name: value}})


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CHOSEN = (
    *("stage", "overlap_comm", "offload_optimizer", "offload_param", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
)
DEFAULT_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}
