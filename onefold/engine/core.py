"""The engine: what a training loop calls. DeepSpeed's names, one runtime behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from onefold.allocator import give_back_free_memory
from onefold.comm import Disagreement, Group, Ledger, Wires, local_rank, make_collective, of_backend
from onefold.config import Batch
from onefold.engine import deepspeed_names, reporting
from onefold.engine.closing import close_engine, pause_collector
from onefold.engine.loading import Loading
from onefold.engine.memory_errors import MemoryErrors
from onefold.engine.offload_states import offload_engine, reload_engine
from onefold.engine.saving import Saving
from onefold.engine.shared_parameters import SharedParameters
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.optim.choose import Chosen
from onefold.optim.schedules import check_step_arguments
from onefold.optim.sharded import ShardedOptimizer
from onefold.optim.step import NonFiniteError, ShardedStep, StepDecision
from onefold.plan import BufferBytes, Crossing, ModelBytes, Plan, Tier, count_crossing
from onefold.pool import Pool
from onefold.report.describe import describe, held_bytes, planned_buffers, planned_bytes
from onefold.report.memory_usage import memory_status
from onefold.report.monitors import MonitorMaster
from onefold.report.timeline import Timeline
from onefold.report.trace_window import TraceWindow
from onefold.runtime import Hooks, ParamHandle, Schedule, Unit, lay_out
from onefold.runtime.torch_internals import cast_floats
from onefold.window import AccumulationWindow

# One live engine a model: a second `initialize` on it retires the first.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
# The first pass is not followed yet and pools fill in the second: what those needed is not needed again.
_STEPS_TO_SETTLE = 2


def _of_state(name: str) -> Any:
    """An attribute of an engine that is its train state's: programs read and set it."""

    def put(engine: Engine, value: Any) -> None:
        setattr(engine.state, name, value)

    return property(lambda engine: getattr(engine.state, name), put)


class Engine(nn.Module):
    """A model with its optimizer, laid out by a plan. Made by `onefold.initialize`.

    `with engine:` closes it at the end; so does `engine.close()`, and `del engine` too.
    """

    optimizer_class = ShardedOptimizer

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batch: Batch,
        chosen: Chosen | None,
        group: Group,
        device: torch.device,
        *,
        config: dict[str, Any],
        other_plans: Mapping[str, Plan] | None = None,
        plans_with_less: Mapping[str, Plan] | None = None,
    ) -> None:
        super().__init__()
        _retire(model)
        self.monitor, record = MonitorMaster(plan.loop.monitoring), reporting.open_record(plan.loop, group)
        window = AccumulationWindow(batch, managed=plan.loop.manages_accumulation)
        self.plan = plan = replace(plan, node_size=group.node_size, accumulates=window.accumulates)
        self.device = device
        self.ledger = Ledger()
        self._other_plans = other_plans or {}
        self._num_steps = 0
        self._gradients_held: dict[str, int] = {}
        self.is_compiled = False
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._scaled_backward: weakref.ref[Callable[[], None]] | None = None

        collective = make_collective(plan.collective, group, self.ledger, device, Wires.of(plan), plan.node_sums)
        self._collective_name = type(collective).__name__.lower()
        groups = chosen.group_of_each() if chosen is not None else {}
        states = chosen.states_of_groups() if chosen is not None else []
        self._shared = SharedParameters(model, plan, groups)
        units, memory = lay_out(model, plan, groups, states, group, self.ledger, device, self._shared.ids)
        schedule = Schedule(units, plan, collective, self.ledger, Pool(device), memory)
        used = {id(each) for param in schedule.trained_params() for each in param.parameters} | self._shared.ids
        decision = StepDecision(plan, schedule)
        step = ShardedStep(chosen, plan, schedule, memory) if chosen is not None else None
        left_alone = [p for p in model.parameters() if p.requires_grad and id(p) not in used]
        self.state = TrainState(model, config, plan, group, device, schedule, window, decision, step, left_alone)
        self.optimizer: ShardedOptimizer | None = None
        if step is not None:
            drop: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(self.zero_grad)
            self.optimizer = self.optimizer_class(step, decision.loss_scale, drop)
            self.optimizer.engine = weakref.ref(self)
        handles = [ParamHandle.of_unit(unit, self.ledger, self) for unit in units]
        # After a step that overlaps with what comes next, parameters may be on their way: from ranks, or from the host.
        arrives = group.size > 1 or any(param.store.steps_on_host for param in schedule.trained_params())
        watch = bool(schedule.sharded) or (plan.overlap and plan.shards_states and arrives)
        self._hooks = Hooks(model, schedule, self, watch=watch)
        self._shared.watch(model, group)
        told = {"breakdown": plan.loop.times_phases, "records": plan.loop.reports_steps and group.rank == 0}
        self._timeline = Timeline(device, self.ledger, schedule, self._hooks, **told)
        self._trace = TraceWindow.of(plan.loop.trace, device, group.rank)
        if self._trace is not None:
            weakref.finalize(self, self._trace.give_up)
        with_less = {way: self._complete(other) for way, other in (plans_with_less or {}).items()}
        self._memory_errors = MemoryErrors(self.state, plan, with_less, self._trace)
        schedule.order.agreement.guard.watch()
        self._modules["module"] = model
        self.training = model.training
        _engines[model] = weakref.ref(self)
        self._saving = Saving(self.state)
        self._loading = Loading(self.state, self._saving)
        self._ledger_at_start = self.ledger.copy()
        self._reports = reporting.open_reports(self, record)
        parts = (self.state, self._saving, self._hooks, handles, memory, self._reports)
        self._finalizer = weakref.finalize(self, close_engine, *parts)
        self._finalizer.atexit = False
        self._resume_collector = pause_collector(self) if plan.loop.pauses_collector else lambda: None

    # -- the loop -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state.check_present()
        self._shared.check_present()
        precision = self.plan.precision
        if precision.casts_inputs:
            args, kwargs = cast_floats(args, torch.float16), cast_floats(kwargs, torch.float16)
        autocast = torch.autocast(self.device.type, dtype=precision.autocast) if precision.autocast else nullcontext()
        with self._phase("forward"), self._memory_errors.explained("forward"), autocast:
            output = self.state.model(*args, **kwargs)
        if self.plan.loop.reports_memory:
            memory_status("after forward")
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward on the loss, divided by the accumulation count and times the loss scale; return it divided."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward takes a scalar loss, not {what}: reduce it first, e.g. loss.mean()")
        if not loss.requires_grad:
            raise ValueError(
                "engine.backward: the loss does not require grad; was it computed under no_grad or detached?"
            )
        state, decision = self.state, self.state.decision
        if scale_wrt_gas:
            loss = loss / self.batch.accumulation
        with self._phase("backward"):
            self._begin_backward(divisor=1)
            decision.losses.append(loss.detach())
            try:
                scaled = loss.float() * decision.loss_scale.value if decision.scales_loss else loss
                with self._memory_errors.explained("backward"):  # before anything is let go
                    scaled.backward(retain_graph=retain_graph)
                    state.schedule.end_backward()
            except Exception as error:
                if not isinstance(error, Disagreement) and not of_backend(error):  # else no rank can be reached
                    state.abort_backward()
                raise
            except BaseException as error:
                if state.group.size == 1:
                    state.abort_backward()
                else:  # Ctrl-C enters no collective: other ranks may never come to it
                    state.interrupted = type(error).__name__
                raise
        if self.plan.loop.reports_memory:
            memory_status("after backward")
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a bare `loss.backward()`; the accumulation count is divided out later."""
        scaled = loss.float() * self.state.decision.loss_scale.value
        if scaled.grad_fn is not None:
            scaled.grad_fn.register_prehook(partial(_see_scaled, weakref.ref(self)))
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the accumulation boundary: clip, update, move parameters, advance the schedule. Elsewhere: count."""
        state = self.state
        if self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer: give initialize one, or a config with an optimizer section"
            )
        state.check_complete()
        if state.window.in_no_sync:
            raise RuntimeError("engine.step() inside engine.no_sync(): leave the context first")
        at_boundary = state.window.at_boundary
        if at_boundary:
            check_step_arguments(state.lr_scheduler, lr_kwargs or {})
            if self._reports is not None:
                self._reports.begin_step()
            elif self._num_steps < _STEPS_TO_SETTLE:
                self._gradients_held = reporting.held_gradients(state)
            with self._phase("step"), self._memory_errors.explained("step"):
                self._take_step(self.optimizer)
            state.global_steps += 1
            state.global_samples += self.batch.train
        state.window.micro_steps += 1
        if at_boundary:
            try:
                if state.decision.applied and state.lr_scheduler is not None:
                    state.lr_scheduler.step(**(lr_kwargs or {}))
            finally:  # the step is taken and counted, whatever a scheduler raises
                self._saving.remember_step()
            self._print_progress()
            if self._reports is not None:
                self._reports.end_step()
            if self._trace is not None:
                self._trace.after_step(state.global_steps)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        if self._trace is not None:
            self._trace.before_phase(self.state.global_steps)
        return self._timeline.span(name)

    def _take_step(self, optimizer: ShardedOptimizer) -> None:
        state, schedule, decision = self.state, self.state.schedule, self.state.decision
        self._hooks.check_model()
        if not state.window.managed and self.plan.keeps_whole_gradient:
            # Every step is a boundary, and only now do we know that this is one.
            schedule.begin_backward(boundary=True)
            schedule.end_backward()
        before = decision.loss_scale.value
        self._saving.saver.let_change()
        try:
            taken = decision.take(optimizer.sharded, optimizer, state.window.divisor, alarm=self._saving.saver.failed)
        except NonFiniteError:
            self.zero_grad()
            state.window.restart()
            schedule.end_step()
            raise
        if not taken:
            self._saving.raise_failed()
        self.zero_grad()
        schedule.end_step()
        self._num_steps += 1
        if self._num_steps == _STEPS_TO_SETTLE:
            give_back_free_memory()
        decision.loss_scale.update(overflow=optimizer.overflow)
        if not decision.applied:
            state.skipped_steps += 1
            if state.group.rank == 0 and decision.scales_loss:
                logger.info("overflow: step skipped, loss scale %g -> %g", before, decision.loss_scale.value)
            elif state.group.rank == 0:
                logger.warning("step skipped: %s", decision.problem)

    def wait_for_step(self) -> None:
        """Whatever the last step left in flight has arrived."""
        self.state.schedule.wait_for_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all accumulated gradients."""
        self.state.drop_gradients()

    def _begin_backward(self, *, divisor: int) -> None:
        state = self.state
        state.check_complete()
        if state.schedule.in_backward:
            # A backward outside the engine raised and never ended; its gradients are worthless.
            state.abort_backward()
        state.window.divide_by(divisor)
        state.schedule.begin_backward(boundary=state.window.backward_is_last)

    # -- what hooks and handles tell ----------------------------------------------------------------------------

    def begin_bare_backward(self) -> None:
        """Somebody called `backward` on a loss without the engine."""
        if self.state.decision.scales_loss and (self._scaled_backward is None or self._scaled_backward() is None):
            raise RuntimeError(
                "Loss scaling is required: fp16 gradients underflow without a loss scale. Write engine.backward(loss), "
                "or engine.scale(loss).backward()"
            )
        self._begin_backward(divisor=self.batch.accumulation)

    def abort_backward(self) -> None:
        """A backward raised: its window's gradients are dropped, and the window starts over."""
        self.state.abort_backward()

    def parameters_loaded(self, units: list[Unit]) -> None:
        """`load_state_dict` has written parameters of these units: masters take them over."""
        if self.state.step is not None:
            self.state.step.pull_masters(units)

    def gradient_dropped(self) -> None:
        """Somebody has set a parameter's `grad` to None: when all are (`model.zero_grad()`), the window is over."""
        if not any(param.grad.is_held for param in self.state.schedule.trained_params()):
            self.zero_grad()

    def model_moved(self) -> None:
        """Somebody has moved parameters to another device: the next forward or step says so, unless they are back."""
        self._hooks.model_moved()

    def about_to_write(self) -> None:
        """Parameters are about to be written from outside: what the last step still does is done first."""
        self.state.schedule.check_awake()
        self.state.flush()
        self.state.schedule.wait_for_step()
        if self.state.step is not None:
            self.state.step.about_to_write()

    # -- accumulation -------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming (or present) micro-step ends with an update."""
        return self.state.window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take the counting over: from now on the caller says, before each backward, whether a step follows."""
        self.state.window.explicit = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here are not followed by a step. Plans that shard gradients still reduce: it is linear."""
        return self.state.window.no_sync()

    @property
    def gradient_factor(self) -> float:
        """What reduced gradients are still to be multiplied by: ranks, loss scale, bare backwards."""
        return self.state.decision.unscale(self.state.window.divisor)

    # -- checkpoints and weights --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        background: bool | None = None,
    ) -> bool:
        """Write model, optimizer, scheduler, random numbers, data position and `client_state` under save_dir/tag.

        Call it on all ranks, or on rank 0 alone: then the others join at their next collective. `tag` is
        "global_step{N}" by default. `background` (default: the config's `checkpoint.async`): go on training once the
        state is copied to host memory; `wait_for_checkpoint`, the next save and the end of the process wait for it.
        """
        self._saving.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters, background)
        return True

    def wait_for_checkpoint(self) -> None:
        """Until the save in the background is on disk; raises if it failed."""
        self._saving.saver.finish()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Take a checkpoint up, saved by any plan on any number of ranks. All ranks call this together.

        Returns its path and the client state it was saved with. Without a `tag`, what `latest` names; where that is
        damaged or incomplete, the newest that is not, with a warning; (None, None) where `load_dir` holds no checkpoint
        at all. A `tag` that is not there is an error. Gradients that no step has used yet are dropped.

        A load that is refused changes nothing. Only an error while values are written (of the disk, or of
        `custom_load_fn`) leaves an engine that does nothing until another load succeeds.
        """
        self._hooks.check_model()
        return self._loading.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )

    @property
    def module(self) -> nn.Module:
        """The bare model: whatever `step` left in flight has arrived."""
        self.state.schedule.wait_for_step()
        return self.state.model

    module_state_dict = deepspeed_names.module_state_dict
    load_module_state_dict = deepspeed_names.load_module_state_dict
    save_16bit_model = save_fp16_model = deepspeed_names.save_16bit_model
    _zero3_consolidated_16bit_state_dict = deepspeed_names.consolidated_16bit_state_dict

    # -- memory -------------------------------------------------------------------------------------------------

    offload_states = offload_engine
    reload_states = reload_engine

    def empty_partition_cache(self) -> None:
        """Reshard whatever is still unsharded and need not be."""
        self.state.schedule.reshard_all()

    def planned_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """The plan's arithmetic: model-state bytes of one rank in one tier."""
        return planned_bytes(self.state.schedule.units, self._complete(self.plan), tier)

    def planned_buffers(self) -> BufferBytes:
        """Bytes of one rank beside its model state, activations aside. Pools are counted for ranks of one node alone,
        on CPUs.
        """
        keeps = self.device.type == "cpu" and self._collective_name == "exchange"
        return planned_buffers(self.state.schedule, self._complete(self.plan), self.state.step, keeps=keeps)

    def planned_bytes_by_stage(self) -> dict[str, ModelBytes]:
        """The same for every stage, all on the device: what another one would have needed."""
        return {
            name: planned_bytes(self.state.schedule.units, self._complete(plan), Tier.DEVICE, on_device=True)
            for name, plan in self._other_plans.items()
        }

    def _complete(self, plan: Plan) -> Plan:
        """A plan with what is known since the engine stands."""
        accumulates = self.state.window.accumulates
        return replace(plan, node_size=self.plan.node_size, accumulates=accumulates)

    def planned_crossing(self) -> Crossing:
        """Bytes that cross between tiers in one step, on one rank: what `ledger` counts."""
        specs = [param.spec for unit in self.state.schedule.units for param in unit.params]
        plan, on_gpu = self._complete(self.plan), self.device.type == "cuda"
        return count_crossing(specs, plan, self.batch.accumulation, device_casts=on_gpu)

    def held_bytes(self, tier: Tier = Tier.DEVICE) -> ModelBytes:
        """What is really allocated, counted from the tensors."""
        return held_bytes(self.state.schedule, self.state.step, tier)

    def describe(self) -> str:
        """The plan in words: what is replicated, what is sharded, bytes per rank, tier and step."""
        sizes = {tier: self.planned_bytes(tier) for tier in Tier}
        name = self.optimizer.name if self.optimizer is not None else None
        units = self.state.schedule.units
        beside, crossing = self.planned_buffers(), self.planned_crossing()
        return describe(units, self.plan, sizes, beside, crossing, self.batch, name, self._collective_name)

    plan_report = reporting.plan_report
    note_run = reporting.note_run

    # -- compiling and printing ---------------------------------------------------------------------------------

    def compile(  # type: ignore[override]
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """`torch.compile` the forward of every unit; gathers and reductions stay between them."""
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError("engine.compile: schedule and compiled_autograd_enabled belong to DeepSpeed's DeepCompile")
        for unit in (unit for unit in self.state.schedule.units if not unit.encloses):
            self._hooks.stop_watching(unit.module)
            compiled = torch.compile(unit.module.forward, backend=backend, **compile_kwargs or {})
            # What the instance had for a forward of its own comes back when the engine goes.
            self._compiled.append((unit.module, unit.module.__dict__.get("forward")))
            unit.module.forward = compiled  # type: ignore[method-assign]
        self.is_compiled = True

    def _print_progress(self) -> None:
        every = self.plan.loop.steps_per_print
        if not every or self.global_steps % every:
            return
        times = self._timeline.take()
        if self.state.group.rank == 0:
            rates = ", ".join(f"{rate:.6g}" for rate in self.get_lr())
            spent = "".join(f", {phase} {seconds * 1000 / every:.1f} ms" for phase, seconds in times.items())
            logger.info(
                "step %d, skipped %d, lr [%s], grad norm %.4g%s",
                self.global_steps, self.skipped_steps, rates, self.state.decision.norm or 0.0, spent,
            )  # fmt: skip

    # -- what it knows about itself -----------------------------------------------------------------------------

    deepspeed_io = deepspeed_names.deepspeed_io
    train_batch_size = deepspeed_names.train_batch_size
    train_micro_batch_size_per_gpu = deepspeed_names.train_micro_batch_size_per_gpu
    gradient_accumulation_steps = deepspeed_names.gradient_accumulation_steps
    get_batch_info = deepspeed_names.get_batch_info
    set_train_batch_size = deepspeed_names.set_train_batch_size
    set_train_micro_batch_size = deepspeed_names.set_train_micro_batch_size
    set_gradient_accumulation_steps = deepspeed_names.set_gradient_accumulation_steps
    data_parallel_group = property(deepspeed_names.data_parallel_group)
    get_data_parallel_rank = deepspeed_names.get_data_parallel_rank
    was_step_applied = deepspeed_names.was_step_applied
    get_global_grad_norm = deepspeed_names.get_global_grad_norm
    get_lr = deepspeed_names.get_lr
    get_mom = deepspeed_names.get_mom
    gradient_clipping = deepspeed_names.gradient_clipping
    zero_optimization_stage = deepspeed_names.zero_optimization_stage
    zero_optimization_partition_weights = deepspeed_names.zero_optimization_partition_weights
    zero_gather_16bit_weights_on_model_save = deepspeed_names.zero_gather_16bit_weights_on_model_save
    loss_scale = deepspeed_names.loss_scale
    communication_data_type = property(deepspeed_names.communication_data_type)
    get_data_types = deepspeed_names.get_data_types

    config = property(lambda self: self.state.config, doc="The config as the user gave it.")
    is_closed = property(lambda self: not self._finalizer.alive)
    micro_steps = property(lambda self: self.state.window.micro_steps)
    global_steps = _of_state("global_steps")
    global_samples = _of_state("global_samples")
    skipped_steps = _of_state("skipped_steps")
    lr_scheduler = _of_state("lr_scheduler")
    training_dataloader = _of_state("training_dataloader")
    local_rank = property(lambda self: local_rank())
    global_rank = property(lambda self: dist.get_rank())
    world_size = property(lambda self: self.state.group.size)
    dp_world_size = property(lambda self: self.state.group.size)

    @property
    def batch(self) -> Batch:
        """Samples of a step and of a micro-step, and micro-steps of a step."""
        return self.state.window.batch

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the model: remove all hooks, free gradients and states. The model stays usable."""
        finalizer = self._finalizer.detach()
        if finalizer is None:
            return
        _, close, parts, _ = finalizer
        self._resume_collector()
        if self._trace is not None:
            self._trace.give_up()
        self._saving.stop()
        with suppress(Exception):  # told below, and by the step that failed
            self.state.flush()
        schedule = self.state.schedule
        try:
            schedule.drop_gradients()
        finally:
            close(*parts, lingers=False)
            self._shared.release()
        while self._compiled:
            module, own = self._compiled.pop()
            module.__dict__.pop("forward", None)
            module.__dict__.update({"forward": own} if own is not None else {})
        schedule.in_flight.pool.clear()
        self.optimizer = self.state.step = None
        schedule.forget_units()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Engine:
        """`.to()`, `.half()` and their kin would tear parameters out of their flat parameters."""
        for param in (param for unit in self.state.schedule.units for param in unit.params):
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise RuntimeError("the engine's model cannot be cast or moved; the config says dtypes and devices")
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise


def _see_scaled(engine: weakref.ref[Engine], gradients: Any) -> None:
    """Autograd runs through a loss that `scale` has made."""
    found = engine()
    if found is not None:

        def backward() -> None:
            """Lives as long as the backward that a scaled loss is run in: autograd holds it until then."""

        found._scaled_backward = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]


def _retire(model: nn.Module) -> None:
    reference = _engines.pop(model, None)
    previous = reference() if reference is not None else None
    if previous is not None:
        logger.info("the model's earlier engine is retired: its states are freed")
        previous.close()
