"""The training loop of `onefold train`, as every rank runs it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import onefold
from onefold.checkpoint.loading.load import MisfitError
from onefold.comm import local_device
from onefold.config import ConfigError, load_config, solve_batch
from onefold.engine import Engine
from onefold.log import logger
from onefold.plan import make_plan
from onefold.report.device_peaks import peak_flops
from onefold.report.memory_usage import peak_bytes, used_bytes
from onefold.report.model_flops import ModelFlops
from onefold.report.run_file import RunFileError
from onefold.runtime import unsharded_shape
from onefold.stop_signals import SAME_SIGNAL_SECONDS
from onefold.tools.pages.page import write_page
from onefold.tools.train.data import DataError
from onefold.tools.train.options import PreparedConfig, TrainOptions, prepare_config
from onefold.tools.train.progress import NO_CURVE, Progress, StepMetrics, Summary, make_progress, show, write_files
from onefold.tools.train.recipe import write_recipe
from onefold.tools.train.task import Task, choose_task
from onefold.tools.train.tokens import NOT_PREDICTED


class ResumeError(ValueError):
    """A run cannot be resumed. The message says why."""


def train(options: TrainOptions) -> bool:
    """Train on this rank. Return True if the last step was reached, False if Ctrl-C ended the run."""
    options = replace(options, out=str(options.folder))
    task = choose_task(options)
    options = count_steps(options, task)
    prepared = prepare_config(options, on_gpus=torch.cuda.is_available())
    prepared = with_own_keys(prepared, options.folder)
    with stop_on_interrupt() as is_stop_requested:
        torch.manual_seed(options.seed)
        engine = start_engine(task, prepared)
        try:
            path, steps = resume(engine, options)
            options = continue_epochs(engine, options, task)
            if options.resume and engine.global_steps >= options.steps:
                raise ResumeError(
                    f"--resume {options.folder}: the run has completed {engine.global_steps} of {options.steps} steps. "
                    f"Give a larger --{'steps' if options.epochs is None else 'epochs'} to continue."
                )
            progress = make_progress(options.steps, shows=dist.get_rank() == 0)
            introduce(progress, engine, task, options, prepared)
            if path is not None:
                progress.print(f"resuming after step {engine.global_steps}, from {path}")
            engine.note_run(steps=options.steps, name=task.name, data=task.data)
            if dist.get_rank() == 0:
                write_recipe(options)
            with progress:
                steps = train_steps(engine, task, options, progress, is_stop_requested, steps)
            finish(engine, task, options, progress, steps)
        finally:
            engine.destroy()
        if dist.get_rank() == 0:
            try:
                print(f"report: {write_page(str(engine.plan.loop.record_folder))}", flush=True)
            except (OSError, RunFileError) as error:  # of an object store; the run is complete
                logger.warning("the report cannot be written: %s", error)
    # The launcher ends all ranks when the first one exits with an error code.
    dist.barrier(device_ids=[local_device().index] if local_device().type == "cuda" else None)
    dist.destroy_process_group()
    return len(steps) >= options.steps


def count_steps(options: TrainOptions, task: Task) -> TrainOptions:
    """Return the options with the steps of --epochs, rounded up."""
    if options.epochs is None:
        return options
    if task.num_rows is None:
        raise DataError(
            "--epochs needs rows (.jsonl, .json, .parquet), because text is sampled at random. Give --steps."
        )
    config = load_config(prepare_config(options, on_gpus=torch.cuda.is_available()).document)
    batch = solve_batch(config, int(os.environ.get("WORLD_SIZE", "1"))).train
    return replace(options, steps=math.ceil(options.epochs * task.num_rows / batch))


def continue_epochs(engine: Engine, options: TrainOptions, task: Task) -> TrainOptions:
    """Return the options with the steps of --epochs after a resume. Earlier steps may have had another batch."""
    if options.epochs is None or task.num_rows is None or not engine.global_steps:
        return options
    left = max(0, math.ceil(options.epochs * task.num_rows - engine.global_samples))
    steps = engine.global_steps + math.ceil(left / engine.batch.train)
    section = load_config(prepare_config(replace(options, steps=steps), on_gpus=False).document).scheduler
    schedule: Any = engine.lr_scheduler
    if hasattr(schedule, "total_num_steps") and section is not None and "total_num_steps" in section.params:
        schedule.total_num_steps = section.params["total_num_steps"]
        schedule.load_state_dict(schedule.state_dict())
    return replace(options, steps=steps)


def with_own_keys(prepared: PreparedConfig, folder: Path) -> PreparedConfig:
    """Return the config with a record in the folder of the run, and with signals that stop it, unless it has others."""
    given = load_config(prepared.document).onefold
    added: dict[str, object] = {"report": str(folder)} if given.report is None else {}
    if not given.stop.handled:
        added["stop"] = {"signals": ["SIGTERM", "SIGUSR1"], "seconds": given.stop.seconds}
    own = prepared.document.get("onefold")
    section = {**(own if isinstance(own, Mapping) else {}), **added}
    return replace(prepared, document={**prepared.document, "onefold": section})


def start_engine(task: Task, prepared: PreparedConfig) -> Engine:
    """Build the model and the engine. If parameters are sharded, no rank ever holds the whole model."""
    config = load_config(prepared.document)
    if config.log_level is None:
        # The trainer prints its own progress and the plan.
        logger.setLevel("WARNING")
    if config.onefold.peer_copies.every is not None:
        raise ConfigError(
            "onefold.peer_copies: `onefold train` resumes from the metrics in its own checkpoints, which copies do not "
            "have. Leave the key out, and set --save-every."
        )
    model = task.build(prepared.document, sharded=make_plan(config, world_size=1).shards_parameters)
    engine, _, _, _ = onefold.initialize(model=model, config=config)
    return engine


def introduce(progress: Progress, engine: Engine, task: Task, options: TrainOptions, prepared: PreparedConfig) -> None:
    """Print model, data and plan before the first step."""
    for note in (*prepared.notes, *load_config(prepared.document).notices):
        progress.print(f"config: {note}")
    progress.print(engine.describe())
    progress.print(f"data: {task.describe_data()}")
    batch = engine.batch.train
    samples = engine.global_samples + (options.steps - engine.global_steps) * batch
    epochs = f", {samples / task.num_rows:.3g} epochs" if task.num_rows else ""
    progress.print(f"training: {options.steps:,} steps of {batch:,} sequences{epochs}\n")


def resume(engine: Engine, options: TrainOptions) -> tuple[str | None, list[StepMetrics]]:
    """Load the last checkpoint of a resumed or restarted run. Return its place, or None, and the metrics of its steps.

    The learning rate is that of the checkpoint, or of --lr.
    """
    if not options.resume and not (options.save_every > 0 and is_restarted(engine)):
        return None, []
    optimizer: Any = engine.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    base_rates = getattr(engine.lr_scheduler, "base_lrs", None)
    try:
        path, client_state = engine.load_checkpoint(options.checkpoint_place)
    except MisfitError as error:
        first, *differences = str(error).splitlines()[:4]
        raise ResumeError(
            f"--resume {options.folder}: {first}\n" + "\n".join(differences) + "\nThe model or the optimizer differs "
            "from that run. Resume with the model and the config of the run."
        ) from error
    if path is None or client_state is None:
        if options.resume:
            raise ResumeError(f"--resume {options.folder}: no checkpoint in {options.checkpoint_place}")
        return None, []
    if options.lr is not None:
        set_rates(engine, rates, base_rates)
    return path, [StepMetrics(**metrics) for metrics in client_state["metrics"]]


def set_rates(engine: Engine, rates: Sequence[float], base_rates: Sequence[float] | None) -> None:
    """Replace the learning rates of a checkpoint. A schedule of DeepSpeed has computed them from the config already."""
    schedule: Any = engine.lr_scheduler
    optimizer: Any = engine.optimizer
    for index, group in enumerate(optimizer.param_groups):
        if schedule is None:
            group["lr"] = rates[index]
        elif base_rates is not None:  # a schedule of torch, which continues from the rate of the last step
            group["lr"] *= base_rates[index] / schedule.base_lrs[index]
            group["initial_lr"] = base_rates[index]
    if schedule is not None and base_rates is not None:
        schedule.base_lrs = list(base_rates)


def is_restarted(engine: Engine) -> bool:
    """Return whether the launcher of any rank has started this job before. torchrun's counts may differ by node."""
    count = os.environ.get("ONEFOLD_RESTARTS", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    restarts = torch.tensor(int(count), device=engine.device)
    dist.all_reduce(restarts, op=dist.ReduceOp.MAX)
    return bool(restarts)


def save(engine: Engine, options: TrainOptions, steps: list[StepMetrics]) -> None:
    metrics = [asdict(metrics) for metrics in steps] if dist.get_rank() == 0 else []
    engine.save_checkpoint(options.checkpoint_place, client_state={"metrics": metrics})


def train_steps(
    engine: Engine,
    task: Task,
    options: TrainOptions,
    progress: Progress,
    is_stop_requested: Callable[[], bool],
    steps: list[StepMetrics],
) -> list[StepMetrics]:
    """Run optimizer steps until the last one or a request to stop.

    `steps` has the metrics of the completed steps. The new ones are appended to it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model_flops, peak = ModelFlops.of(engine.module), device_peak(engine.device)
    micro_batch_size, accumulation = engine.batch.micro, engine.batch.accumulation
    engine.train()
    step_started = time.perf_counter()
    started = step_started - (steps[-1].seconds if steps else 0.0)
    for step in range(len(steps) + 1, options.steps + 1):
        # Sequences are numbered over the whole run, because steps before a resume may have had another batch.
        first = engine.global_samples + rank * micro_batch_size
        loss_sum, num_tokens, flops = torch.zeros((), device=engine.device), 0, 0.0
        for micro_step in range(accumulation):
            number = first + micro_step * world_size * micro_batch_size
            tokens, targets = task.train_batch(number, micro_batch_size)
            loss = task.loss(engine, (tokens.to(engine.device), targets.to(engine.device)))
            engine.backward(loss)
            num_tokens_of_batch = count_tokens(targets)
            engine.count_tokens(num_tokens_of_batch, tokens.shape[1])
            engine.step()
            loss_sum += loss.detach().float()
            num_tokens += num_tokens_of_batch
            flops += num_tokens_of_batch * model_flops.per_token(tokens.shape[1]) if model_flops is not None else 0.0
        # One small all-reduce per step: the mean loss, the number of tokens and their FLOPs (rows differ in length),
        # and whether any rank received a request to stop, so that all stop together.
        counts = torch.tensor([float(num_tokens), flops, float(is_stop_requested())]).to(loss_sum)
        shared = torch.cat([loss_sum[None] / (accumulation * world_size), counts])
        dist.all_reduce(shared)
        mean_loss, num_tokens_of_all, flops_of_all, num_stopping = shared.tolist()
        now = time.perf_counter()
        metrics = StepMetrics(
            step=step,
            loss=mean_loss,
            learning_rate=engine.get_lr()[0],
            grad_norm=engine.get_global_grad_norm() or 0.0,
            tokens_per_second=num_tokens_of_all / (now - step_started),
            memory_bytes=used_bytes(engine.device),
            seconds=now - started,
            num_ranks=world_size,
            mfu=flops_of_all / (now - step_started) / (peak * world_size) if flops_of_all and peak else None,
        )
        if options.eval_every and step % options.eval_every == 0 and step < options.steps:
            metrics = replace(metrics, held_out_loss=evaluate(engine, task))
            progress.print(f"step {step:>5}/{options.steps}  held-out loss {metrics.held_out_loss:.4f}")
        step_started = time.perf_counter()
        started += step_started - now  # evaluation does not count as training time
        steps.append(metrics)
        progress.update(metrics)
        stops, signalled = num_stopping and step < options.steps, engine.stop_requested
        saves = options.save_every and (step % options.save_every == 0 or step == options.steps or stops)
        if saves or signalled:
            save(engine, options, steps)
        if signalled and step < options.steps:
            command = f"onefold train --resume {options.folder}"
            progress.print(f"stopped by {signalled.name} after step {step}; continue with {command}")
            raise SystemExit(128 + signalled)
        if stops:
            progress.print(f"interrupted at step {step}; writing the summary")
            break
    return steps


def count_tokens(targets: torch.Tensor) -> int:
    """Count the tokens of a micro-batch without padding, which comes after the last target of a row."""
    return int((targets != NOT_PREDICTED).flip(1).cummax(1).values.sum())


def device_peak(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device. None on CPUs, and for unknown GPUs."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def finish(engine: Engine, task: Task, options: TrainOptions, progress: Progress, steps: list[StepMetrics]) -> None:
    """Save the weights, compute the held-out loss and generate a sample on all ranks; write reports on rank 0."""
    folder = options.folder
    saved = "the trained weights were not saved (--no-save)"
    if options.save:
        progress.print("saving the trained weights")
        saved = task.save_weights(engine, folder)
    progress.print("computing the held-out loss")
    held_out_loss = evaluate(engine, task)
    engine.eval()
    if options.sample_length:
        progress.print(f"writing a sample of {options.sample_length} {task.unit}s")
    sample = task.sample(engine.module, engine.device) if options.sample_length else ""
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=engine.device)
    peaks[dist.get_rank()] = peak_bytes(engine.device)
    dist.all_reduce(peaks)
    if dist.get_rank() != 0:
        return
    engine.note_run(held_out_loss=held_out_loss, tokens_per_second=_mean_speed(steps))
    plan = engine.plan
    summary = Summary(
        model=task.name,
        unit=task.unit,
        num_parameters=sum(unsharded_shape(parameter).numel() for parameter in engine.module.parameters()),
        num_ranks=dist.get_world_size(),
        device=torch.cuda.get_device_name() if engine.device.type == "cuda" else "the CPU",
        plan=f"stage {engine.plan.stage}: parameters {plan.parameters.placement.value}, gradients "
        f"{plan.gradients.placement.value}, optimizer states {plan.states.placement.value}",
        data=task.data,
        row_formats=task.row_formats,
        steps_asked=options.steps,
        steps_done=len(steps),
        stopped=len(steps) < options.steps,
        seconds=steps[-1].seconds,
        first_loss=steps[0].loss,
        last_loss=steps[-1].loss,
        held_out_loss=held_out_loss,
        tokens_per_second=_mean_speed(steps),
        mfu=median(shares) if (shares := [step.mfu for step in steps if step.mfu is not None]) else None,
        peak_bytes_per_rank=tuple(peaks.tolist()),
        traffic=tuple(engine.ledger.rows()),
        bytes_by_stage={name: found.total for name, found in engine.model_memory.planned_bytes_by_stage().items()},
    )
    progress.print("drawing the plot")
    curve = write_files(folder, summary, steps)
    print(flush=True)
    show(summary)
    if sample:
        print(f"\nsample after {len(steps)} steps:\n{sample}")
    print(
        f"\n{f'plot: {curve}' if curve else NO_CURVE}\nmetrics.jsonl and summary.json in {folder}\n{saved}", flush=True
    )


def _mean_speed(steps: list[StepMetrics]) -> float:
    starts = [0.0, *(step.seconds for step in steps[:-1])]
    tokens = sum(step.tokens_per_second * (step.seconds - start) for step, start in zip(steps, starts, strict=True))
    return tokens / steps[-1].seconds


@torch.no_grad()
def evaluate(engine: Engine, task: Task) -> float:
    """Return the mean loss on the held-out sequences."""
    was_training = engine.module.training
    engine.eval()
    batches = task.held_out_batches(dist.get_rank(), dist.get_world_size(), engine.batch.micro)
    total, num_rows = torch.zeros((), device=engine.device), 0
    for (tokens, targets), num_rows_of_batch in batches:
        loss = task.loss(engine, (tokens.to(engine.device), targets.to(engine.device))).float()
        if num_rows_of_batch:
            total += loss * num_rows_of_batch
            num_rows += num_rows_of_batch
    sums = torch.stack([total, torch.tensor(float(num_rows)).to(total)])
    dist.all_reduce(sums)
    engine.train(was_training)
    return float(sums[0] / sums[1])


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Request a stop after the current step on Ctrl-C. A second Ctrl-C stops at once."""
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if first and time.monotonic() - first[0] > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        if not first:
            first.append(time.monotonic())

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(first)
    finally:
        signal.signal(signal.SIGINT, before)
