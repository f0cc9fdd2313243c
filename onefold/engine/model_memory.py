"""Planned and measured bytes of an engine's model state, and its plan in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onefold.engine.train_state import TrainState
from onefold.plan import BufferBytes, ModelBytes, OffloadTraffic, Plan, Tier, count_offload_traffic
from onefold.report.describe import describe, held_bytes, planned_buffers, planned_bytes


class ModelMemory:
    """The bytes of one engine on this rank: planned, and counted from its tensors."""

    def __init__(self, state: TrainState, other_stages: Mapping[str, Plan]) -> None:
        self._state = state
        self._other_stages = other_stages
        self.collective_name = type(state.schedule.in_flight.collective).__name__.lower()

    def complete(self, plan: Plan) -> Plan:
        """Return a plan with the node size and the accumulation of this engine."""
        return replace(plan, node_size=self._state.plan.node_size, accumulates=self._state.window.accumulates)

    @property
    def plan(self) -> Plan:
        """The plan of the engine with the present accumulation."""
        return self.complete(self._state.plan)

    def planned_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """Return the planned bytes of model state in one tier."""
        return planned_bytes(self._state.schedule.units, self.plan, tier)

    def planned_bytes_by_stage(self) -> dict[str, ModelBytes]:
        """Return the bytes that each stage would need with all model state on the device."""
        return {
            name: planned_bytes(self._state.schedule.units, self.complete(plan), Tier.DEVICE, on_device=True)
            for name, plan in self._other_stages.items()
        }

    def planned_buffers(self) -> BufferBytes:
        """Return the planned bytes of buffers: overhead in addition to model state, without activations.

        Pools are counted only for ranks of one node on CPUs.
        """
        keeps = self._state.device.type == "cpu" and self.collective_name == "exchange"
        return planned_buffers(self._state.schedule, self.plan, self._state.step, keeps=keeps)

    def planned_offload_traffic(self) -> OffloadTraffic:
        """Return the bytes that one step copies between tiers, as `engine.ledger` counts them."""
        specs = [param.spec for unit in self._state.schedule.units for param in unit.params]
        on_gpu = self._state.device.type == "cuda"
        return count_offload_traffic(specs, self.plan, self._state.window.batch.accumulation, device_casts=on_gpu)

    def held_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """Return the allocated bytes of model state in one tier, counted from the tensors."""
        return held_bytes(self._state.schedule, self._state.step, tier)

    def describe(self) -> str:
        """Return the plan in words: what is replicated, what is sharded, bytes per rank, tier and step."""
        state, memory = self._state, self._state.schedule.memory
        return describe(
            state.schedule.units,
            state.plan,
            {tier: self.planned_bytes(tier) for tier in Tier},
            self.planned_buffers(),
            self.planned_offload_traffic(),
            memory.num_bytes_in_folders if memory is not None else {},
            state.window.batch,
            state.step.name if state.step is not None else None,
            self.collective_name,
            state.fp8.describe(),
            state.experts.describe(),
        )
