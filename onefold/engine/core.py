"""The engine: what a training loop calls. DeepSpeed's names, one runtime behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from onefold.comm import Agreement, Disagreement, Group, Ledger, make_collective, of_backend
from onefold.config import Batch, Config
from onefold.engine.tiers import make_lower, settle_drafts
from onefold.engine.weights import Weights
from onefold.engine.wires import wires_of
from onefold.loader import data_loader
from onefold.log import logger
from onefold.optim.choose import Chosen
from onefold.optim.nonfinite import NonFiniteError
from onefold.optim.schedules import check_step_arguments
from onefold.optim.sharded import ShardedOptimizer
from onefold.optim.update import Update
from onefold.plan import Counting, Plan
from onefold.plan.table import DTYPES, gradient_factors, make_precision
from onefold.report.memory_usage import memory_status
from onefold.report.timeline import Timeline
from onefold.runtime import Home, Hooks, Schedule, Unit, build_units, draft_units
from onefold.runtime.trees import cast_floats
from onefold.tier.device import Pool
from onefold.tier.lower import LowerTiers
from onefold.window import Window

# One live engine a model: a second `initialize` on it retires the first.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


class Engine(Weights):
    """A model with its optimizer, laid out by a plan. Made by `onefold.initialize`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        batch: Batch,
        plan: Plan,
        chosen: Chosen | None,
        group: Group,
        device: torch.device,
    ) -> None:
        super().__init__()
        _retire(model)
        self.settings = config
        self.plan = plan
        self.device = device
        self.ledger = Ledger()
        self.is_compiled = False
        self._compiled: list[tuple[nn.Module, Any]] = []
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._group = group
        self._window = Window(batch, managed=config.managed_gradient_accumulation)
        self._scaled_backward: weakref.ref[_ScaledBackward] | None = None
        self._interrupted: str | None = None
        self._parked = []
        self._precision = make_precision(config)

        collective = make_collective(config.onefold.collective, group, self.ledger, device, wires_of(plan, config))
        self._collective_name = type(collective).__name__.lower()
        self._pool = Pool(device)
        num_states = len(chosen.rule.state_names(chosen.groups)) if chosen and chosen.rule else 0
        micro_steps = 2 if self._window.accumulates else 1
        self._counting = Counting(plan, self._precision, group.size, micro_steps, num_states, group.node_size)
        agreement = Agreement(group, self.ledger)
        groups = chosen.group_of_each() if chosen else {}
        drafts = draft_units(model, config=config, groups=groups, precision=self._precision, group=group)
        drafts = settle_drafts(drafts, config, self._counting, agreement, device)
        self._lower = make_lower(drafts, config, self._counting, agreement, self.ledger, device)
        self._units = build_units(
            model,
            drafts,
            config=config,
            plan=plan,
            precision=self._precision,
            accumulates=self._window.accumulates,
            group=group,
            ledger=self.ledger,
            device=device,
            lower=self._lower,
        )
        trained = {id(parameter) for unit in self._units for run in unit.trained for parameter in run.parameters}
        self._left_alone = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
        prescale, postscale = gradient_factors(config, group.size)
        self._schedule = Schedule(self._units, plan, collective, self.ledger, self._pool, prescale, self._lower)
        self._update = Update(config, self._schedule, postscale)
        self.optimizer: ShardedOptimizer | None = None
        if chosen is not None:
            self.optimizer = ShardedOptimizer(
                chosen,
                self._units,
                plan,
                self._schedule,
                group.shard,
                self._update.loss_scale,
                weakref.WeakMethod(self.zero_grad),
                self._lower,
            )
        self._timeline = Timeline(device, self.ledger, breakdown=config.wall_clock_breakdown)
        self._homes = [Home.of_unit(unit, self._schedule, self.ledger, self) for unit in self._units]
        # After a step that overlaps with what comes next, parameters may be on their way: from ranks, or from the host.
        arrives = group.size > 1 or any(run.rest.offloads_states for unit in self._units for run in unit.trained)
        watch = bool(self._schedule.sharded) or (plan.overlap and plan.shards_states and arrives)
        self._hooks = Hooks(model, self._schedule, self, watch=watch)
        weakref.finalize(self, _let_go, self._schedule, self._hooks, self._homes, self._lower).atexit = False
        guard = self._schedule.order.agreement.guard
        guard.watch()
        self._modules["module"] = model
        self.training = model.training
        _engines[model] = weakref.ref(self)
        self._start_saving()

    # -- the loop -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._modules["module"]
        assert model is not None
        self._check_present()
        if self.settings.fp16.enabled and self.settings.fp16.auto_cast:
            args, kwargs = cast_floats(args, torch.float16), cast_floats(kwargs, torch.float16)
        with self._timeline.span("forward"), self._autocast():
            output = model(*args, **kwargs)
        if self.settings.memory_breakdown:
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
        if scale_wrt_gas:
            loss = loss / self.batch.accumulation
        with self._timeline.span("backward"):
            self._begin_backward(owed=1)
            self._update.losses.append(loss.detach())
            try:
                scaled = loss.float() * self._update.loss_scale.value if self._update.scales_loss else loss
                scaled.backward(retain_graph=retain_graph)
                self._schedule.end_backward()
            except Exception as error:
                if not isinstance(error, Disagreement) and not of_backend(error):  # else no rank can be reached
                    self.abort_backward()
                raise
            except BaseException as error:
                if self._group.size == 1:
                    self.abort_backward()
                else:  # Ctrl-C enters no collective: other ranks may never come to it
                    self._interrupted = type(error).__name__
                raise
        if self.settings.memory_breakdown:
            memory_status("after backward")
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a bare `loss.backward()`; the accumulation count is divided out later."""
        scaled = loss.float() * self._update.loss_scale.value
        if scaled.grad_fn is not None:
            scaled.grad_fn.register_prehook(partial(_see_scaled, weakref.ref(self)))
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the accumulation boundary: clip, update, move parameters, advance the schedule. Elsewhere: count."""
        if self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer: give initialize one, or a config with an optimizer section"
            )
        self._check_present()
        if self._window.in_no_sync:
            raise RuntimeError("engine.step() inside engine.no_sync(): leave the context first")
        at_boundary = self._window.at_boundary
        if at_boundary:
            check_step_arguments(self.lr_scheduler, lr_kwargs or {})
            with self._timeline.span("step"):
                self._take_step(self.optimizer)
            self.global_steps += 1
            self.global_samples += self.batch.train
        self._window.micro_steps += 1
        if at_boundary:
            try:
                if self._update.applied and self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
            finally:  # the step is taken and counted, whatever a scheduler raises
                self._remember_step()
            self._print_progress()

    def _take_step(self, optimizer: ShardedOptimizer) -> None:
        self._hooks.check_model()
        if not self._window.managed and self.plan.keeps_whole_gradient:
            # Every step is a boundary, and only now do we know that this is one.
            self._schedule.begin_backward(boundary=True)
            self._schedule.end_backward()
        update, before = self._update, self._update.loss_scale.value
        self._saver.let_change()
        try:
            taken = update.take(optimizer, self._window.owed, alarm=self._saver.failed)
        except NonFiniteError:
            self.zero_grad()
            self._window.restart()
            self._schedule.end_step()
            raise
        if not taken:
            self._raise_failed_save()
        self.zero_grad()
        self._schedule.end_step()
        update.loss_scale.update(overflow=optimizer.overflow)
        if not update.applied:
            self.skipped_steps += 1
            if self._group.rank == 0 and update.scales_loss:
                logger.info("overflow: step skipped, loss scale %g -> %g", before, update.loss_scale.value)
            elif self._group.rank == 0:
                logger.warning("step skipped: %s", update.problem)

    def _begin_backward(self, *, owed: int) -> None:
        self._check_present()
        if self._schedule.in_backward:
            # A backward outside the engine raised and never ended; its gradients are worthless.
            self.abort_backward()
        self._window.owe(owed)
        self._schedule.begin_backward(boundary=self._window.backward_is_last)

    def abort_backward(self) -> None:
        """A backward raised: its window's gradients are dropped, and the window starts over."""
        if self._interrupted is not None:
            raise RuntimeError(
                f"a backward of this engine was interrupted ({self._interrupted}) while other ranks counted on it: "
                "call initialize again on every rank, and load the last checkpoint"
            )
        self._schedule.abort_backward()
        self._update.losses.clear()
        if self._window.restart():
            logger.warning("a backward raised inside an accumulation window: the window starts over")

    def begin_bare_backward(self) -> None:
        """Somebody called `backward` on a loss without the engine."""
        if self._update.scales_loss and (self._scaled_backward is None or self._scaled_backward() is None):
            raise RuntimeError(
                "fp16 gradients underflow without a loss scale: write engine.backward(loss), "
                "or engine.scale(loss).backward()"
            )
        self._begin_backward(owed=self.batch.accumulation)

    def parameters_loaded(self, units: list[Unit]) -> None:
        """`load_state_dict` has written parameters of these units: masters take them over."""
        if self.optimizer is not None:
            self.optimizer.refresh_masters(units)

    def gradient_dropped(self) -> None:
        """Somebody has set a parameter's `grad` to None: when all are, as by `model.zero_grad()`, the window is
        over.
        """
        if not any(run.has_gradient for unit in self._units for run in unit.trained):
            self.zero_grad()

    def about_to_write(self) -> None:
        """Parameters are about to be written from outside: what the last step still does is done first."""
        self._flush()
        self._schedule.settle_all()
        if self.optimizer is not None:
            self.optimizer.wait_for_host()
            self.optimizer.let_change()

    def settle(self) -> None:
        """Whatever the last step left in flight has arrived."""
        self._schedule.settle_all()

    def empty_partition_cache(self) -> None:
        """Whatever is still whole, and need not be, goes back to rest."""
        self._schedule.rest()

    @property
    def gradient_factor(self) -> float:
        """What reduced gradients are still to be multiplied by: ranks, loss scale, bare backwards."""
        return self._update.unscale(self._window.owed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all accumulated gradients."""
        for parameter in self._left_alone:
            parameter.grad = None
        if self._schedule.in_backward:
            self.abort_backward()
        self._window.close()
        self._update.losses.clear()
        self._schedule.drop_gradients()

    def train(self, mode: bool = True) -> Engine:
        super().train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # -- accumulation -------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming (or present) micro-step ends with an update."""
        return self._window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take the counting over: from now on the caller says, before each backward, whether a step follows."""
        self._window.explicit = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here are not followed by a step. Plans that shard gradients still reduce: it is linear."""
        return self._window.no_sync()

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
        blocks = [unit for unit in self._units if not unit.encloses]
        for unit in blocks:
            self._hooks.stop_watching(unit.module)
            compiled = torch.compile(unit.module.forward, backend=backend, **compile_kwargs or {})
            # What the instance had for a forward of its own comes back when the engine goes.
            self._compiled.append((unit.module, unit.module.__dict__.get("forward")))
            unit.module.forward = compiled  # type: ignore[method-assign]
        self.is_compiled = True

    def _print_progress(self) -> None:
        every = self.settings.steps_per_print or (10 if self.settings.wall_clock_breakdown else None)
        if not every or self.global_steps % every:
            return
        times = self._timeline.take()
        if self._group.rank == 0:
            rates = ", ".join(f"{rate:.6g}" for rate in self.get_lr())
            spent = "".join(f", {phase} {seconds * 1000 / every:.1f} ms" for phase, seconds in times.items())
            logger.info(
                "step %d, skipped %d, lr [%s], grad norm %.4g%s",
                self.global_steps, self.skipped_steps, rates, self._update.norm or 0.0, spent,
            )  # fmt: skip

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """A loader of micro-batches over this rank's share of a dataset."""
        return data_loader(
            dataset,
            self._group,
            batch_size=batch_size or self.batch.micro,
            collate_fn=collate_fn,
            drop_last=self.settings.dataloader_drop_last,
            num_workers=num_local_io_workers,
            pin_memory=self.device.type == "cuda",
        )

    # -- life ---------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Let go of the model: remove all hooks, free gradients and states. The model stays usable."""
        self._stop_saving()
        with suppress(Exception):  # told below, and by the step that failed
            self._flush()
        _let_go(self._schedule, self._hooks, self._homes, self._lower)
        while self._compiled:
            module, own = self._compiled.pop()
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own
        self._schedule.drop_gradients()
        self._pool.clear()
        self.optimizer = None
        self._units.clear()
        self._schedule.forget_units()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Engine:
        """`.to()`, `.half()` and their kin would tear parameters out of their lines."""
        for run in (run for unit in self._units for run in unit.runs):
            probe = torch.empty(0, dtype=run.dtype, device=run.device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise RuntimeError(
                    "the engine's model cannot be cast or moved: dtypes and devices come from the config"
                )
        return self

    def _autocast(self) -> Any:
        section = self.settings.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[section.dtype or "bf16"])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise


class _ScaledBackward:
    """Lives as long as the backward that a scaled loss is run in: autograd holds it as a callback until then."""

    def __call__(self) -> None:
        pass


def _see_scaled(engine: weakref.ref[Engine], gradients: Any) -> None:
    """Autograd runs through a loss that `scale` has made."""
    found = engine()
    if found is not None:
        backward = _ScaledBackward()
        found._scaled_backward = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]


def _let_go(schedule: Schedule, hooks: Hooks, homes: list[Home], lower: LowerTiers | None) -> None:
    """What is in flight arrives, whoever deleted the engine: other ranks count on it, and so does the model."""
    try:
        try:
            schedule.settle_all()
        except Exception as error:  # whatever a user's optimizer raised on the host, or a disk: the engine goes
            logger.warning(
                "the engine goes after a step that failed, and leaves weights of no step: %s: %s",
                type(error).__name__,
                error,
            )
            schedule.give_up()
        hooks.remove()
        schedule.rest()
        for home in homes:
            try:
                home.stand_alone()
            except OSError as error:  # of a disk: what rested there cannot be read any more, and says so when it is
                logger.error("weights that rested on a disk are lost with the engine: %s", error)
        homes.clear()
    finally:
        if lower is not None:
            lower.close()
        schedule.order.agreement.guard.close()  # after the last wait, which would be watched for a while longer


def _retire(model: nn.Module) -> None:
    reference = _engines.pop(model, None)
    previous = reference() if reference is not None else None
    if previous is not None:
        logger.info("the model's earlier engine is retired: its states are freed")
        previous.destroy()
