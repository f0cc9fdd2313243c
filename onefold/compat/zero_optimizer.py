"""The class of `engine.optimizer`: onefold's optimizer with the attributes that tools read on DeepSpeed's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onefold.compat.as_deepspeed import VERSION
from onefold.compat.config_models import ZeroStageEnum
from onefold.compat.loss_scaler import LossScalerBase, scaler_of
from onefold.compat.moved_by_hand import HandedOut, Mover
from onefold.compat.optimizers import FusedAdam
from onefold.engine.offloaded_states import OffloadedStates, OffloadStateTypeEnum
from onefold.engine.train_state import TrainState
from onefold.offload.buffer import Buffer
from onefold.offload.shard_store import ShardStore
from onefold.optim.loss_scale import DynamicLossScale
from onefold.optim.sharded import ShardedOptimizer as DeepSpeedOptimizer
from onefold.optim.step import ShardedStep
from onefold.plan import Plan
from onefold.runtime import handle_of
from onefold.utils import get_z3_leaf_modules, safe_get_full_grad, safe_get_local_grad

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]


class DeepSpeedZeRoOffload:
    """The model of an engine that shards parameters, with the hooks that others remove around `generate`.

    The lists of hooks are empty, because onefold's hooks stay installed: a parameter that `GatheredParameters` has
    gathered is used as it is.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.module = _Module(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: list[int] | None = None) -> None:
        """Do nothing, because the engine has installed its hooks."""

    def empty_partition_cache(self) -> None:
        """Do nothing: only what the plan keeps stays unsharded between two passes."""


class _Module:
    """The model, with the one method that DeepSpeed puts on modules: parameters of other modules that it uses."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return no parameters, because all modules that use the model's parameters are inside it."""
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine that `deepspeed.initialize` has made."""

    plan: Plan
    stands_for: type[torch.optim.Optimizer]
    """The class of the instance that `initialize` was given, or the one that DeepSpeed makes of the same config."""
    parameter_offload: DeepSpeedZeRoOffload
    """Set if parameters are sharded."""
    step_of_engine: weakref.WeakMethod[Callable[[], None]]
    nccl_start_alignment_factor = 2

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call `engine.step()`, for training loops and Lightning's Fabric, which step the optimizer."""
        if closure is not None:
            raise ValueError("optimizer.step(closure) is not supported. Call backward before the step.")
        step = self.step_of_engine()
        if step is None:
            raise RuntimeError("the engine of this optimizer is closed, so its shards do not exist")
        step()

    def learn(self, state: TrainState, offloaded: OffloadedStates, stands_for: type[torch.optim.Optimizer]) -> None:
        """Take the plan and the states of the engine, which the attributes below read."""
        self.plan, self.stands_for = state.plan, stands_for
        self._states = _States(self.sharded, weakref.ref(offloaded))
        self.state: Mapping[torch.Tensor, Any] = self._states  # type: ignore[assignment]
        self._train_state = weakref.ref(state)
        if self.sharded.instance is None:
            self.optimizer = self._basic_optimizer()
        vars(self.optimizer)["state_dict"] = partial(_state_dict_of, weakref.ref(self))
        if state.plan.shards_parameters:
            self.parameter_offload = DeepSpeedZeRoOffload(state.model)

    @property
    def _engine_state(self) -> TrainState:
        found = self._train_state()
        if found is None:
            raise RuntimeError("the engine of this optimizer is closed")
        return found

    # -- this rank's shards -----------------------------------------------------------------------------------------

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, a flat tensor for each shard.

        Masters in another state format or on a disk are copies, so write them by `safe_set_full_fp32_param`.
        """
        return [self._states.master_of(store) for store in self.sharded.stores]

    single_partition_of_fp32_groups = fp32_groups_flat_partition = fp32_groups_flat = fp32_partitioned_groups_flat

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters that each shard is cut from."""
        return [list(param.parameters) for param in self._engine_state.schedule.trained_params()]

    bit16_groups = fp16_groups

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        """Of each flat parameter that is unsharded, the slices of all ranks."""
        self._engine_state.schedule.check_present()
        self._engine_state.schedule.wait_for_step()
        params = [param for param in self._engine_state.schedule.unsharded_params() if param.trainable]
        ranges = [[param.layout.shard_range(rank) for rank in range(param.layout.num_shards)] for param in params]
        return [[param.full[a:b] for a, b in each] for param, each in zip(params, ranges, strict=True)]

    def _basic_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of the class in the config over the same groups, which schedules and monitors read."""
        made = self.stands_for.__new__(self.stands_for)
        # As unpickling makes one: the constructor would make new groups, and import the compiler.
        state = {"param_groups": self.param_groups, "defaults": dict(self.defaults), "state": self.state}
        torch.optim.Optimizer.__setstate__(made, state)
        self.answer_for(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part by DeepSpeed's names, without copies. Tensors on a disk are returned as their files.

        `engine.save_checkpoint` saves the part of every rank.
        """
        self._engine_state.schedule.check_awake()
        self.sharded.wait_for_host()
        stores, states_of = self.sharded.stores, self.sharded.states
        states = [{held.name: _decoded(held.buffer) for held in states_of.held_states(store)} for store in stores]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        masters, states_key = "single_partition_of_fp32_groups", "base_optimizer_state"
        if self.plan.shards_parameters:
            masters, states_key = "fp32_flat_groups", "optimizer_state_dict"
        return {
            "zero_stage": self.plan.stage,
            "partition_count": self.plan.num_shards,
            "overflow": self.overflow,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "loss_scale": self.loss_scale,
            "ds_version": VERSION,
            states_key: {"state": dict(enumerate(states)), "param_groups": groups},
            masters: [self._states.master_or_file(store) for store in stores],
        }

    def _set_fp32_optimizer_param_groups(self) -> None:
        """DeepSpeed puts masters into the groups around a step. Here they are never there: `state` has them."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups

    # -- gradients between backward and step ------------------------------------------------------------------------

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's part of each averaged gradient, by group, as copies."""
        parts = [[safe_get_local_grad(parameter) for parameter in group["params"]] for group in self.param_groups]
        found = [[part for part in group if part is not None] for group in parts]
        return {index: group for index, group in enumerate(found) if group}

    @property
    def fp32_groups_gradients_flat(self) -> list[torch.Tensor]:
        """The averaged gradients of each group, whole and flat, as copies. All ranks call this together."""
        grads = [[safe_get_full_grad(parameter) for parameter in group["params"]] for group in self.param_groups]
        empty = torch.empty(0, device=self._engine_state.device)
        return [torch.cat([empty, *(grad.flatten() for grad in group if grad is not None)]) for group in grads]

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return the norm of each group's averaged gradient. All ranks call this together."""
        found = self.averaged_gradients
        device = self._engine_state.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        squares = torch.stack(
            [
                sum((part.double().square().sum() for part in found.get(i, [])), zero)
                for i in range(len(self.param_groups))
            ]
        )
        if self._engine_state.group.rank >= self.plan.num_shards:
            squares.zero_()  # with MiCS other ranks hold the same shards again
        dist.all_reduce(squares)
        return list(squares.sqrt().float())

    def has_overflow(self, *_: Any, **__: Any) -> bool:
        """Return whether an averaged gradient is infinite or NaN on any rank. All ranks call this together."""
        return not all(norm.isfinite() for norm in self._get_norm_groups())

    check_overflow = has_overflow

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine_state.decision.norm

    @property
    def micro_step_id(self) -> int:
        """Micro-steps since the last step."""
        window = self._engine_state.window
        return window.micro_steps % window.batch.accumulation

    @property
    def _epilogue_ran_this_backward(self) -> bool:
        """Whether a backward has ended whose gradients no step has used yet."""
        return self._engine_state.window.is_open

    # -- loss scale and modules -------------------------------------------------------------------------------------

    def needs_scaler(self) -> bool:
        """Return whether `loss.backward()` needs `engine.scale(loss)`."""
        return self._engine_state.decision.scales_loss

    @property
    def dynamic_loss_scale(self) -> bool:
        return isinstance(self._loss_scale, DynamicLossScale)

    @cached_property
    def loss_scaler(self) -> LossScalerBase:
        return scaler_of(self._loss_scale)

    @property
    def loss_scale_config(self) -> LossScalerBase:
        return self.loss_scaler

    @property
    def low_precision_dtype(self) -> torch.dtype | None:
        return self.plan.precision.compute

    @property
    def adam_w_mode(self) -> bool:
        if "decoupled_weight_decay" not in self.param_groups[0]:
            raise AttributeError(f"{self.name} has no adam_w_mode")
        return bool(self.param_groups[0]["decoupled_weight_decay"])

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each module that is never cut."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self._engine_state.model)}


def _decoded(buffer: Buffer) -> Any:
    """Return the values of a buffer in memory, or the buffer itself if it is on disk."""
    return buffer if buffer.is_on_disk else buffer.fetch()


class _States(Mapping[torch.Tensor, dict[str, Any]]):
    """The states of each shard and the number of steps, by the shard's fp32 master. They are read on access.

    A parameter of the model is a key too, for this rank's part of its states.
    """

    def __init__(self, step: ShardedStep, offloaded: weakref.ref[OffloadedStates]) -> None:
        self._step = step
        self._offloaded = offloaded
        # Masters as they are handed out, by store.
        self._handed_out: dict[ShardStore, torch.Tensor] = {}
        # Decoded copies of quantized or split masters, with the step they were read after. Weak references, so that a
        # copy occupies the device only as long as the caller keeps it.
        self._decoded: dict[ShardStore, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def master_of(self, store: ShardStore) -> torch.Tensor:
        """Return the master itself, or a decoded copy of a quantized or split one.

        The copy is the same object until the next step for as long as the caller keeps it, so it can be a key.
        """
        master = self._step.master_of(store)
        self._step.expose(store)
        if master.is_plain_tensor:
            if store not in self._handed_out:
                mover = Mover("a master weight of the optimizer", self._offloaded, [OffloadStateTypeEnum.hp_params])
                self._handed_out[store] = HandedOut.of(master.tensor.detach(), mover)
            return self._handed_out[store]
        if master.is_on_disk:
            return master.fetch()
        number, reference = self._decoded.get(store, (-1, None))
        found = reference() if reference is not None else None
        if found is None or number != self._step.num_steps:
            found = self._read(master)
            self._decoded[store] = self._step.num_steps, weakref.ref(found)
        return found

    def master_or_file(self, store: ShardStore) -> Any:
        """Return the master as `master_of` does, or the object that loads it where it is on a disk."""
        return self._step.master_of(store) if store.master.is_on_disk else self.master_of(store)

    def _is_master(self, store: ShardStore, key: torch.Tensor) -> bool:
        decoded = self._decoded.get(store)
        return self._handed_out.get(store) is key or (decoded is not None and decoded[1]() is key)

    def __getitem__(self, key: torch.Tensor) -> dict[str, Any]:
        self._step.wait_for_host()
        store = next((store for store in self._step.stores if self._is_master(store, key)), None)
        parts: dict[str, list[torch.Tensor]] = {}
        if store is not None:
            self._step.expose(store)
            for held in self._step.states.held_states(store):
                parts.setdefault(held.name, []).append(self._read(held.buffer))
        elif any(key is parameter for group in self._step.groups for parameter in group["params"]):
            handle = handle_of(key)
            assert handle is not None
            param, index = handle.location_of(key)
            self._step.expose(param.store)
            for held in self._step.states.held_states(param.store) if param.trainable else ():
                member, first = param.layout.members[index], param.store.start + held.start
                low, high = max(member.start - first, 0), min(member.stop - first, held.buffer.numel())
                parts.setdefault(held.name, []).append(self._read(held.buffer).flatten()[low : max(low, high)])
        else:
            raise KeyError("not a parameter or a master shard (optimizer.fp32_partitioned_groups_flat)")
        found = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in parts.items()}
        movers = {name: self._mover(name) for name in found}
        shown: dict[str, Any] = {name: HandedOut.of(tensor.detach(), movers[name]) for name, tensor in found.items()}
        return _Shown({"step": self._step.num_steps, **shown} if shown else {}, movers)

    def _mover(self, name: str) -> Mover:
        return Mover(f"optimizer.state[...][{name!r}]", self._offloaded, [OffloadStateTypeEnum.optim_states])

    def _read(self, buffer: Buffer) -> torch.Tensor:
        """Return the values, from the host where they were moved there by hand."""
        mover = self._mover("...")
        parts = [mover.present(part) if isinstance(part, torch.Tensor) else part for part in buffer.parts]
        return buffer.like(iter(parts)).fetch()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.master_of(store) for store in self._step.stores if not store.master.is_on_disk)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Shown(dict[str, Any]):
    """States of one shard, to read.

    Setting one to other values raises, because the write would be lost. Setting one to the same values on another
    device moves the optimizer's states there, as ms-swift and Lightning do.
    """

    def __init__(self, shown: Mapping[str, Any], movers: Mapping[str, Mover]) -> None:
        super().__init__(shown)
        self._movers = movers

    def __setitem__(self, name: str, value: Any) -> None:
        known = self.get(name)
        if not (isinstance(value, torch.Tensor) and known is not None and self._movers[name].move(known, value)):
            raise TypeError(
                f"optimizer.state[...][{name!r}] = ...: the engine owns the states, so this would be lost. Set them "
                "on all ranks with deepspeed.utils.safe_set_full_optimizer_state(parameter, value, name)."
            )


def _state_dict_of(reference: weakref.ref[ZeROOptimizer]) -> dict[str, Any]:
    """Return this rank's states by number, as copies, and the groups, like an optimizer of torch."""
    optimizer = reference()
    if optimizer is None:
        raise RuntimeError("the engine of this optimizer is closed, so its shards do not exist")
    states = [{name: _copied(value) for name, value in state.items()} for state in optimizer.state.values()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": dict(enumerate(states)), "param_groups": groups}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# -- DeepSpeed's classes of optimizers by stage and dtype --------------------------------------------------------------


class _ByPlan(type):
    """The class of a class whose `isinstance` is true for the optimizers of engines whose plan `matches`."""

    matches: Callable[[ZeROOptimizer], bool]

    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, ZeROOptimizer) and cls.matches(found)


def _is_16bit_stage_0(optimizer: ZeROOptimizer) -> bool:
    return not optimizer.plan.shards_states and optimizer.plan.precision.compute is not None


class FP16_Optimizer(metaclass=_ByPlan):
    """The optimizer of a stage-0 engine in 16 bits that steps Adam."""

    @staticmethod
    def matches(optimizer: ZeROOptimizer) -> bool:
        return _is_16bit_stage_0(optimizer) and isinstance(optimizer, FusedAdam)


class FP16_UnfusedOptimizer(metaclass=_ByPlan):
    """The optimizer of a stage-0 engine in 16 bits that steps another rule than Adam."""

    @staticmethod
    def matches(optimizer: ZeROOptimizer) -> bool:
        return _is_16bit_stage_0(optimizer) and not isinstance(optimizer, FusedAdam)


class BF16_Optimizer(metaclass=_ByPlan):
    """The optimizer of a stage-1 engine in bf16 that accumulates gradients in fp32."""

    @staticmethod
    def matches(optimizer: ZeROOptimizer) -> bool:
        precision = optimizer.plan.precision
        if precision.compute is not torch.bfloat16 or precision.accumulate is not torch.float32:
            return False
        return optimizer.plan.stage == ZeroStageEnum.optimizer_states


class DeepSpeedZeroOptimizer(metaclass=_ByPlan):
    """The optimizer of an engine that shards optimizer states but not parameters."""

    @staticmethod
    def matches(optimizer: ZeROOptimizer) -> bool:
        return optimizer.plan.shards_states and not optimizer.plan.shards_parameters


class DeepSpeedZeroOptimizer_Stage3(metaclass=_ByPlan):
    """The optimizer of an engine that shards parameters."""

    @staticmethod
    def matches(optimizer: ZeROOptimizer) -> bool:
        return optimizer.plan.shards_parameters
