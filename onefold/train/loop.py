"""The built-in trainer, top to bottom: what every rank runs. Plain torch, but for the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

import onefold
from onefold.comm import local_device
from onefold.config import load_config
from onefold.engine import Engine
from onefold.log import logger
from onefold.plan import make_plan
from onefold.report.memory_usage import peak_bytes, used_bytes
from onefold.train.data import Corpus, load_corpus
from onefold.train.gpt import GPT, PRESETS
from onefold.train.options import PreparedConfig, TrainOptions, prepare_config
from onefold.train.progress import NO_CURVE, Progress, StepMetrics, Summary, make_progress, show, write_files

# Two signals within this time are one Ctrl-C that arrived twice: from the terminal and from the launcher.
SAME_SIGNAL_SECONDS = 1.0
CHECKPOINTS = "checkpoints"


class ResumeError(ValueError):
    """The run that should go on cannot; the message says why."""


def train(options: TrainOptions) -> bool:
    """Run the job on this rank. True if it reached its last step, False if Ctrl-C ended it before."""
    model_config = PRESETS[options.preset]
    corpus = load_corpus(options.data, model_config.sequence_length)
    prepared = prepare_config(options, on_gpus=torch.cuda.is_available())
    with stop_on_interrupt() as stop_asked:
        torch.manual_seed(options.seed)
        with torch.device("meta"):
            num_parameters = GPT(model_config).num_parameters()
        engine = start_engine(lambda: GPT(model_config), prepared)
        try:
            progress = make_progress(options.steps, shows=dist.get_rank() == 0)
            introduce(progress, engine, corpus, prepared)
            done = resume(engine, options, progress)
            with progress:
                steps = train_steps(engine, corpus, options, progress, stop_asked, done)
            finish(engine, corpus, options, num_parameters, steps)
        finally:
            engine.destroy()
    # The launcher ends everybody when the first rank leaves with an error code.
    dist.barrier(device_ids=[local_device().index] if local_device().type == "cuda" else None)
    dist.destroy_process_group()
    return len(steps) >= options.steps


def start_engine(build: Callable[[], GPT], prepared: PreparedConfig) -> Engine:
    """Where the plan shards parameters, no rank ever holds the whole model, not even while it is built."""
    config = load_config(prepared.document)
    if config.log_level is None:
        # The job has a progress bar and prints the plan itself.
        logger.setLevel("WARNING")
    with onefold.zero.Init(config_dict_or_path=config, enabled=make_plan(config, world_size=1).shards_parameters):
        model = build()
    engine, _, _, _ = onefold.initialize(model=model, config=config)
    return engine


def introduce(progress: Progress, engine: Engine, corpus: Corpus, prepared: PreparedConfig) -> None:
    """Before the first step: what is trained on what, and the plan in words."""
    for note in (*prepared.notes, *load_config(prepared.document).notices):
        progress.say(f"config: {note}")
    progress.say(engine.describe())
    progress.say(f"data: {corpus.num_bytes / 1e6:,.1f} MB of {corpus.name}, {corpus.num_held_out:,} bytes held out\n")


def resume(engine: Engine, options: TrainOptions, progress: Progress) -> list[StepMetrics]:
    """Go on from the run's last checkpoint, where that is asked for or ranks were started again; the steps so far."""
    restarted = options.save_every > 0 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not options.resume and not restarted:
        return []
    path, client_state = engine.load_checkpoint(str(options.folder / CHECKPOINTS))
    if path is None or client_state is None:
        if options.resume:
            raise ResumeError(f"--resume {options.folder}: no checkpoint in {options.folder / CHECKPOINTS}")
        return []
    for name, now in (("preset", options.preset), ("seed", options.seed), ("data", list(options.data))):
        if client_state[name] != now:
            raise ResumeError(f"--resume {options.folder}: that run has {name} {client_state[name]!r}, not {now!r}")
    progress.say(f"resuming after step {engine.global_steps}, from {path}")
    return [StepMetrics(**metrics) for metrics in client_state["metrics"]]


def save(engine: Engine, options: TrainOptions, done: list[StepMetrics]) -> None:
    state = {"preset": options.preset, "seed": options.seed, "data": list(options.data)}
    metrics = [asdict(metrics) for metrics in done] if dist.get_rank() == 0 else []
    engine.save_checkpoint(str(options.folder / CHECKPOINTS), client_state={**state, "metrics": metrics})


def train_steps(
    engine: Engine,
    corpus: Corpus,
    options: TrainOptions,
    progress: Progress,
    stop_asked: Callable[[], bool],
    done: list[StepMetrics],
) -> list[StepMetrics]:
    """Every optimizer step, until the last one or until somebody asks to stop. `done`: those of the run so far."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch_size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    tokens_per_step = engine.train_batch_size() * corpus.sequence_length
    engine.train()
    step_started = time.perf_counter()
    started = step_started - (done[-1].seconds if done else 0.0)
    for step in range(len(done) + 1, options.steps + 1):
        loss_sum = torch.zeros((), device=engine.device)
        for micro_step in range((step - 1) * accumulation, step * accumulation):
            tokens, targets = corpus.train_batch(options.seed, micro_step, rank, micro_batch_size)
            loss: Tensor = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach().float()
        # One small exchange a step: the mean loss, and whether any rank was asked to stop, so that all stop together.
        shared = torch.stack([loss_sum / (accumulation * world_size), torch.tensor(float(stop_asked())).to(loss_sum)])
        dist.all_reduce(shared)
        mean_loss, num_stopping = shared.tolist()
        now = time.perf_counter()
        metrics = StepMetrics(
            step=step,
            loss=mean_loss,
            learning_rate=engine.get_lr()[0],
            grad_norm=engine.get_global_grad_norm() or 0.0,
            tokens_per_second=tokens_per_step / (now - step_started),
            memory_bytes=used_bytes(engine.device),
            seconds=now - started,
        )
        step_started = now
        done.append(metrics)
        progress.update(metrics)
        stops = num_stopping and step < options.steps
        if options.save_every and (step % options.save_every == 0 or step == options.steps or stops):
            save(engine, options, done)
        if stops:
            progress.say(f"stopped by you at step {step}; writing what was done")
            break
    return done


def finish(
    engine: Engine, corpus: Corpus, options: TrainOptions, num_parameters: int, steps: list[StepMetrics]
) -> None:
    """Held-out loss and sample on all ranks, for a sharded model needs them all; reports on the first."""
    engine.eval()
    held_out_loss = evaluate(engine, corpus)
    sample = write_sample(engine, options)
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=engine.device)
    peaks[dist.get_rank()] = peak_bytes(engine.device)
    dist.all_reduce(peaks)
    folder = options.folder
    if options.save_16bit_model:
        engine.save_16bit_model(str(folder))
    if dist.get_rank() != 0:
        return
    plan = engine.plan
    summary = Summary(
        preset=options.preset,
        num_parameters=num_parameters,
        num_ranks=dist.get_world_size(),
        device=torch.cuda.get_device_name() if engine.device.type == "cuda" else "the CPU",
        plan=f"stage {engine.zero_optimization_stage()}: parameters {plan.parameters.placement.value}, gradients "
        f"{plan.gradients.placement.value}, optimizer states {plan.states.placement.value}",
        data=corpus.name,
        steps_asked=options.steps,
        steps_done=len(steps),
        stopped=len(steps) < options.steps,
        seconds=steps[-1].seconds,
        first_loss=steps[0].loss,
        last_loss=steps[-1].loss,
        held_out_loss=held_out_loss,
        tokens_per_second=len(steps) * engine.train_batch_size() * corpus.sequence_length / steps[-1].seconds,
        peak_bytes_per_rank=tuple(peaks.tolist()),
        traffic=tuple(engine.ledger.rows()),
        bytes_by_stage={name: found.total for name, found in engine.planned_bytes_by_stage().items()},
    )
    curve = write_files(folder, summary, steps)
    print(flush=True)
    show(summary)
    if sample:
        print(f"\na sample, after {len(steps)} steps:\n{sample}")
    weights = ", the weights in model.safetensors," if options.save_16bit_model else " and"
    print(f"\n{f'plot: {curve}' if curve else NO_CURVE}\nmetrics.jsonl{weights} summary.json in {folder}", flush=True)


@torch.no_grad()
def evaluate(engine: Engine, corpus: Corpus) -> float:
    """The mean loss on the held-out tail."""
    batches = corpus.held_out_batches(dist.get_rank(), dist.get_world_size(), engine.train_micro_batch_size_per_gpu())
    losses = [engine(tokens.to(engine.device), targets.to(engine.device)).float() for tokens, targets in batches]
    mean = torch.stack(losses).mean() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def write_sample(engine: Engine, options: TrainOptions) -> str:
    """The same text on every rank."""
    model = engine.module
    assert isinstance(model, GPT)
    if not options.sample_length:
        return ""
    prompt = torch.tensor([list(options.prompt.encode() or b"\n")], device=engine.device)
    generator = torch.Generator().manual_seed(options.seed)
    tokens = model.generate(prompt, options.sample_length, temperature=0.7, generator=generator)
    # A vocabulary may be larger than the 256 values of a byte.
    return bytes(min(token, 255) for token in tokens[0].tolist()).decode(errors="replace")


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the current step; a second one, a moment later, stops at once."""
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
