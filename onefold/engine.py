"""The engine: what a training loop calls. DeepSpeed's names, one runtime behind them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from onefold.comm import Group, Ledger, local_rank, make_collective
from onefold.config import Batch, Config
from onefold.loader import data_loader
from onefold.optim.choose import Chosen
from onefold.optim.loss_scale import build_loss_scale
from onefold.optim.norm import exchange_scalars
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan import ModelBytes, Plan
from onefold.plan.table import DTYPES, gradient_factors, make_precision
from onefold.report.describe import describe, held_bytes, planned_bytes
from onefold.report.log import logger
from onefold.report.memory import memory_status
from onefold.report.timeline import Timeline
from onefold.runtime import Hooks, Schedule, Unit, build_units
from onefold.tier.device import Pool
from onefold.window import Window

# One live engine a model: a second `initialize` on it retires the first.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


class Engine(nn.Module):
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
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._group = group
        self._applied = False
        self._norm: float | None = None
        self._window = Window(batch, managed=config.managed_gradient_accumulation)
        self._scaled_losses = 0
        self._loss_scale = build_loss_scale(config.fp16)
        self._checks_overflow = config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow)
        self._precision = make_precision(config)

        collective = make_collective(config.onefold.collective, group, self.ledger, device)
        self._collective_name = type(collective).__name__.lower()
        self._pool = Pool(device)
        self._units = build_units(
            model,
            names=config.onefold.units,
            groups=chosen.group_of_each() if chosen else {},
            plan=plan,
            precision=self._precision,
            accumulates=self._window.accumulates,
            group=group,
            ledger=self.ledger,
            device=device,
            buffer_dtype=DTYPES[config.data_types.buffer_dtype] if config.data_types.buffer_dtype else None,
        )
        prescale, self._postscale = gradient_factors(config, group.size)
        self._schedule = Schedule(self._units, plan, collective, self.ledger, self._pool, prescale)
        self.optimizer: ShardedOptimizer | None = None
        if chosen is not None:
            self.optimizer = ShardedOptimizer(
                chosen,
                self._units,
                plan,
                self._schedule,
                collective,
                self._pool,
                self._loss_scale,
                weakref.WeakMethod(self.zero_grad),
            )
        self._timeline = Timeline(device, self.ledger, breakdown=config.wall_clock_breakdown)
        watch = plan.overlap and plan.shards_states and group.size > 1
        self._hooks = Hooks(model, self._schedule, self, watch=watch)
        weakref.finalize(self, self._hooks.remove)
        self._modules["module"] = model
        self.training = model.training
        _engines[model] = weakref.ref(self)

    # -- the loop -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._modules["module"]
        assert model is not None
        if self.settings.fp16.enabled and self.settings.fp16.auto_cast:
            args, kwargs = _to_half(args), _to_half(kwargs)
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
            try:
                scaled = loss.float() * self._loss_scale.value if self.settings.fp16.enabled else loss
                scaled.backward(retain_graph=retain_graph)
                self._schedule.end_backward()
            except BaseException:
                self.abort_backward()
                raise
        if self.settings.memory_breakdown:
            memory_status("after backward")
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a bare `loss.backward()`; the accumulation count is divided out later."""
        self._scaled_losses += 1
        return loss.float() * self._loss_scale.value

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the accumulation boundary: clip, update, move parameters, advance the schedule. Elsewhere: count."""
        if self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer: give initialize one, or a config with an optimizer section"
            )
        if self._window.in_no_sync:
            raise RuntimeError("engine.step() inside engine.no_sync(): leave the context first")
        if self._window.at_boundary:
            with self._timeline.span("step"):
                self._take_step(self.optimizer, lr_kwargs or {})
            self.global_steps += 1
            self.global_samples += self.batch.train
            self._print_progress()
        self._window.micro_steps += 1

    def _take_step(self, optimizer: ShardedOptimizer, lr_kwargs: dict[str, Any]) -> None:
        if not self._window.managed and self.plan.keeps_whole_gradient:
            # Every step is a boundary, and only now do we know that this is one.
            self._schedule.begin_backward(boundary=True)
            self._schedule.end_backward()
        scalars = self._exchange_scalars()
        if scalars.late:
            self._schedule.reduce_late()
            scalars = self._exchange_scalars()
        unscale = self._postscale / (self._loss_scale.value * self._window.owed)
        self._norm = scalars.norm * unscale
        optimizer.overflow = scalars.overflow and self._checks_overflow
        self._applied = not optimizer.overflow
        if self._applied:
            optimizer.apply(unscale * self._clip_coefficient(self._norm))
        else:
            self.skipped_steps += 1
        self.zero_grad()
        self._schedule.end_step()
        if optimizer.overflow and self.settings.fp16.enabled:
            before = self._loss_scale.value
            self._loss_scale.update(overflow=True)
            if self._group.rank == 0:
                logger.info("overflow: step skipped, loss scale %g -> %g", before, self._loss_scale.value)
        else:
            self._loss_scale.update(overflow=False)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def _exchange_scalars(self) -> Any:
        shards = [run.reduced for unit in self._schedule.trained for run in unit.trained if run.reduced is not None]
        late = bool(self._schedule.late_units())
        if not shards and not late and self._schedule.trained:
            raise RuntimeError(
                "engine.step() without a backward since the last step: there is no gradient to step with"
            )
        return exchange_scalars(shards, late=late, group=self._group, ledger=self.ledger, device=self.device)

    def _clip_coefficient(self, norm: float) -> float:
        limit = self.settings.gradient_clipping
        if limit <= 0 or not math.isfinite(norm):
            return 1.0
        return min(1.0, limit / (norm + 1e-6))

    def _begin_backward(self, *, owed: int) -> None:
        if self._schedule.in_backward:
            # A backward outside the engine raised and never ended; its gradients are worthless.
            self.abort_backward()
        self._window.owe(owed)
        self._schedule.begin_backward(boundary=self._window.backward_is_last)

    def abort_backward(self) -> None:
        """A backward raised: its window's gradients are dropped, and the window starts over."""
        self._schedule.abort_backward()
        if self._window.restart():
            logger.warning("a backward raised inside an accumulation window: the window starts over")

    def begin_bare_backward(self) -> None:
        """Somebody called `backward` on a loss without the engine."""
        if self.settings.fp16.enabled:
            if not self._scaled_losses:
                raise RuntimeError(
                    "fp16 gradients underflow without a loss scale: write engine.backward(loss), "
                    "or engine.scale(loss).backward()"
                )
            self._scaled_losses -= 1
        self._begin_backward(owed=self.batch.accumulation)

    def parameters_loaded(self, units: list[Unit]) -> None:
        """`load_state_dict` has written parameters of these units: masters take them over."""
        if self.optimizer is not None:
            self.optimizer.refresh_masters(units)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all accumulated gradients."""
        if self._schedule.in_backward:
            self.abort_backward()
        self._window.close()
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

    @property
    def micro_steps(self) -> int:
        return self._window.micro_steps

    @property
    def batch(self) -> Batch:
        return self._window.batch

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation count so that a step takes this many samples."""
        self._window.set_train(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with it those of a step."""
        self._window.set_micro(micro_batch_size)

    def set_gradient_accumulation_steps(self, accumulation: int) -> None:
        """Change the micro-steps of a step, and with it its samples."""
        self._window.set_accumulation(accumulation)

    # -- information --------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The bare model, whole: whatever `step` left in flight has arrived."""
        self._schedule.settle_all()
        model = self._modules["module"]
        assert model is not None
        return model

    @property
    def config(self) -> dict[str, Any]:
        """The config as the user gave it."""
        return self.settings.raw

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return self._group.size

    @property
    def dp_world_size(self) -> int:
        return self._group.size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self._group.process_group

    def get_data_parallel_rank(self) -> int:
        return self._group.rank

    def was_step_applied(self) -> bool:
        """Whether the last boundary updated the weights (an overflow skips it)."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's averaged gradient before clipping; None before the first step."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group["betas"] if "betas" in group else group.get("momentum") for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def loss_scale(self) -> float:
        """The loss scale in force."""
        return self._loss_scale.value

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._precision.of_wire(DTYPES[self.settings.compute_dtype])

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the model, dtype in which gradients accumulate)."""
        return DTYPES[self.settings.compute_dtype], self._precision.accumulate

    def planned_bytes(self) -> ModelBytes:
        """The plan's arithmetic: model-state bytes of one rank."""
        return planned_bytes(self._units, self.plan, self._precision, self.batch, self.optimizer)

    def held_bytes(self) -> ModelBytes:
        """What is really allocated, counted from the tensors."""
        return held_bytes(self._units, self._pool, self.optimizer)

    def describe(self) -> str:
        """The plan in words: what is replicated, what is sharded, bytes per rank."""
        return describe(self._units, self.plan, self.planned_bytes(), self.batch, self.optimizer, self._collective_name)

    def _print_progress(self) -> None:
        every = self.settings.steps_per_print
        if not every or self.global_steps % every:
            return
        times = self._timeline.take()
        if self._group.rank == 0:
            rates = ", ".join(f"{rate:.6g}" for rate in self.get_lr())
            spent = "".join(f", {phase} {seconds * 1000 / every:.1f} ms" for phase, seconds in times.items())
            logger.info(
                "step %d, skipped %d, lr [%s], grad norm %.4g%s",
                self.global_steps, self.skipped_steps, rates, self._norm or 0.0, spent,
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
        self._schedule.settle_all()
        self._hooks.remove()
        self._schedule.drop_gradients()
        self._pool.clear()
        self.optimizer = None
        self._units.clear()
        self._schedule.forget_units()

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


def _retire(model: nn.Module) -> None:
    reference = _engines.pop(model, None)
    previous = reference() if reference is not None else None
    if previous is not None:
        logger.info("the model's earlier engine is retired: its states are freed")
        previous.destroy()


def _to_half(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _to_half(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to_half(item) for item in value)
    return value
