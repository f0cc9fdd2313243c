"""The section `onefold`, whose keys DeepSpeed does not have."""
# ruff: noqa: RUF009 - key() and section() return dataclasses.field(), as that rule requires.

from dataclasses import dataclass
from typing import Literal

from onefold.config.keys import Dtype, key, section


@dataclass(frozen=True)
class TraceSection:
    """Timeline of selected steps, without changes to the program. `onefold.Profiling` traces from Python code."""

    steps: tuple[int, int] | None = key(
        None, "First and last optimizer step to trace, counted from 1. By default, no step is traced.", minimum=1
    )
    path: str = key("trace.json", "File to which rank 0 writes the trace of all ranks.")
    torch_profiler: bool = key(
        False,
        "Record torch.profiler traces of the same steps, in one file per rank next to `path` "
        "(`trace.torch.rank0.json`).",
        switch="steps",
    )
    memory_snapshot: bool = key(
        False,
        "Write a CUDA memory snapshot with its allocation history after the last traced step and on out-of-memory, "
        "one file per rank (`trace.memory.rank0.pickle`) for pytorch.org/memory_viz. The history is recorded from "
        "`initialize` on. No effect on a CPU.",
    )


StopSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT"]


@dataclass(frozen=True)
class StopSection:
    """Signals with which a scheduler stops a job. All ranks stop after the same optimizer step."""

    save_to: str | None = key(
        None,
        "Folder in which `engine.step()` saves a checkpoint after such a signal. It then ends the program with exit "
        "code 128 + signal. By default, the program saves and exits itself when `engine.stop_requested` is set.",
    )
    signals: tuple[StopSignal, ...] = key(
        (),
        "Signals that stop the job. With `save_to`, the default is SIGTERM and SIGUSR1, otherwise none.",
        or_one=True,
    )
    seconds: float = key(
        30.0,
        "Time from the signal until a rank ends without a further save. A second signal ends it at once.",
        above=0,
    )

    @property
    def handled(self) -> tuple[StopSignal, ...]:
        """The signals that are handled."""
        return self.signals or (("SIGTERM", "SIGUSR1") if self.save_to is not None else ())


@dataclass(frozen=True)
class LossSpikeSection:
    """Check of the mean loss of each step against the losses of the last steps ([guards](guards.md))."""

    factor: float | None = key(
        None,
        "Number of standard deviations, estimated from the median absolute deviation, by which a loss may exceed the "
        "median of the last `window` losses. By default, losses are not checked.",
        above=0,
        or_false=True,
    )
    window: int = key(64, "Number of steps whose losses are compared.", minimum=2, switch="factor")
    action: Literal["warn", "raise", "skip", "rollback"] = key(
        "warn",
        "Reaction to a larger loss, on all ranks. warn: log a warning and step; raise: raise `LossSpikeError` before "
        "any weight changes; skip: skip the step; rollback: load the last checkpoint.",
        switch="factor",
    )


@dataclass(frozen=True)
class GradNormSpikeSection:
    """Check of the gradient norm of each step against those of the last steps ([guards](guards.md))."""

    factor: float | None = key(
        None,
        "Number of standard deviations, estimated from the median absolute deviation, by which a gradient norm before "
        "clipping may exceed the median of the last `window` norms. By default, norms are not checked.",
        above=0,
        or_false=True,
    )
    window: int = key(64, "Number of steps whose gradient norms are compared.", minimum=2, switch="factor")
    action: Literal["warn", "raise", "skip", "rollback"] = key(
        "warn",
        "Reaction to a larger norm, on all ranks. warn: log a warning and step; raise: raise `GradNormSpikeError` "
        "before any weight changes; skip: skip the step; rollback: load the last checkpoint.",
        switch="factor",
    )


@dataclass(frozen=True)
class StallSection:
    """Watch that ends the job if a rank makes no progress ([guards](guards.md#find-ranks-that-are-stuck))."""

    seconds: float | None = key(
        None,
        "Time without progress after which all ranks end with exit code 75: in the program or its data loader, in one "
        "request to a disk, without a heartbeat, or in collectives on all ranks. It must be longer than any forward, "
        "and any work between two calls of the engine. By default, nothing is watched.",
        above=0,
        or_false=True,
    )
    first_step_seconds: float | None = key(
        None,
        "The same bound until the first step is complete. The default is ten times `seconds`.",
        above=0,
        switch="seconds",
    )
    folder: str | None = key(
        None,
        "Folder of `heartbeats.json` and `stacks.txt`, not a URL. The default is the folder of `onefold.report`, or "
        "`stall` in the working directory if that is a URL or missing.",
        switch="seconds",
    )


@dataclass(frozen=True)
class PeerCopiesSection:
    """Copies of the training state in the memory of the nodes ([launch](launch.md#lose-fewer-steps-at-a-failure))."""

    every: int | None = key(
        None,
        "Number of steps between two copies of weights, states and positions to shared memory, in the background. "
        "Restarted ranks resume from the last one if it is newer than the checkpoint that the program loads. It needs "
        "`onefold launch` with `--max-restarts`. By default, nothing is copied.",
        minimum=1,
    )


@dataclass(frozen=True)
class OnefoldSection:
    """Keys that are specific to onefold. DeepSpeed does not have them."""

    collective: Literal["auto", "native", "exchange"] = key(
        "auto",
        "Algorithm of the gradient reduction. auto: sum in fp32 in a fixed order, first inside each node, so that "
        "every node sends one sum to the others; exchange: the same result, with each rank receiving its slice from "
        "all other ranks; native: the backend's reduce-scatter.",
    )
    node_sums_dtype: Dtype = key(
        "fp32",
        "Data type in which gradient sums are sent between nodes. bf16 and fp16 halve the traffic, but the results "
        "then depend on the distribution of ranks over nodes.",
    )
    node_size: int | None = key(
        None, "Number of consecutive ranks per node. The default is the launcher's local world size.", minimum=1
    )
    units: tuple[str, ...] = key(
        (),
        "Classes, names or name patterns (`*`) of the modules that become units. By default, units are chosen from the "
        "structure of the model.",
    )
    device_memory: float | None = key(
        None,
        "Device memory for model states, in GB (1e9 bytes), which `ratio: auto` fills first. The default is the memory "
        "that is free at the start, less a quarter for activations.",
        above=0,
    )
    host_memory: float | None = key(
        None,
        "Host memory for the offloaded states of all ranks of a node, in GB. The default is the available memory, less "
        "a tenth. It limits `ratio: auto` and the second states of `step_in_backward`.",
        above=0,
    )
    device_cache: float | None = key(
        None,
        "Device memory for copies of offloaded state that save traffic, in GB: gradients that are accumulated or "
        "stepped on the GPU, then parameters. Results do not depend on it. auto: three quarters of the free memory, or "
        "nine tenths of `device_memory` if that is less, minus the peak of the first steps. 0 stores no copies.",
        minimum=0,
        auto=True,
    )
    honour_writes: bool = key(
        True,
        "Copy in-place writes to unsharded parameters (`p.clamp_()`, `p.data.mul_()`) into the fp32 master weights at "
        "the next step. The check reads two more bytes per parameter. false: writes to parameters that have a master "
        "weight are lost.",
    )
    nonfinite_gradients: Literal["auto", "raise", "skip", "ignore", "rollback"] = key(
        "auto",
        "Reaction of a step, on all ranks, to an infinite or NaN gradient. raise: `FloatingPointError` with the units "
        "and ranks, before any weight changes; skip: skip the step; ignore: step as plain torch does; rollback: load "
        "the last checkpoint that the engine has saved or loaded, and continue with the next batch. auto: fp16 skips, "
        "bf16 follows `check_grad_overflow`, fp32 raises.",
    )
    max_rollbacks: int = key(
        3, "Number of rollbacks without a step beyond those reached before, after which the error is raised.", minimum=0
    )
    loss_spike: LossSpikeSection = section(LossSpikeSection)
    grad_norm_spike: GradNormSpikeSection = section(GradNormSpikeSection)
    reexecute_steps: bool = key(
        False,
        "Re-execute a step whose gradients are not finite (if `nonfinite_gradients` reacts to them) or whose loss or "
        "gradient norm is a spike, to tell a bit flip from a bug. Inputs are kept until the step. The first step is "
        "always re-executed, to check that its bits can be reproduced.",
    )
    replica_check_every: int | None = key(
        None,
        "Number of steps between two comparisons of what all ranks must have with the same bits: unsharded parameters "
        "and buffers. A difference raises `ReplicaError` with units and ranks. By default, nothing is compared.",
        minimum=1,
    )
    state_dtype: Literal["fp32", "int8", "bf16"] = key(
        "fp32",
        "Data type of the optimizer states. int8: one byte per value and one scale per 256 values, so that Adam keeps "
        "2 bytes per parameter instead of 8; bf16: stochastic rounding at every step.",
    )
    master_dtype: Literal["fp32", "bf16_int16", "bf16_int8", "bf16"] = key(
        "fp32",
        "Format of the master weights of bf16 weights. bf16_int16: the bf16 weight and the remaining 16 bits of the "
        "fp32 value, which saves 2 bytes per parameter where whole weights are stored (stages 0 to 2, one rank) and "
        "equals fp32 except for ties; bf16_int8: the weight and 8 of these bits; bf16: the weight alone, with "
        "stochastic rounding at every step.",
    )
    int8_min_numel: int = key(4096, "Parameters with fewer elements keep fp32 states.", minimum=0)
    fp32_state_names: tuple[str, ...] = key(
        (), "Name patterns of parameters (`*embed*`) that keep fp32 states for any `state_dtype`."
    )
    offloaded_step: Literal["auto", "host", "device", "both"] = key(
        "auto",
        "Processor that runs the optimizer step of offloaded states. host: the CPU; device: the GPU, through which "
        "gradients, master weights and states are streamed, with the same result as without offload; both: a part of "
        "the units each, at the same time. auto: device if states or master weights are stored in a reduced format, "
        "otherwise host if its memory is not page-locked, otherwise both.",
    )
    delayed_host_step: bool = key(
        False,
        "Run the host step during the next forward and backward, which then use weights that are one step old. This "
        "changes the result of the training.",
    )
    step_in_backward: bool = key(
        False,
        "Step offloaded shards as soon as their gradients are reduced, while the backward of earlier units runs. The "
        "result is the same. With `gradient_clipping`, fp16, or `nonfinite_gradients` raise or skip, such a step "
        "writes second master weights and states, and is discarded if gradients turn out to be clipped or not finite. "
        "Second states are allocated for as many units as fit in half of the free host memory, or in `host_memory`. "
        "Without these keys there are none, and hyperparameters must not change between backward and step.",
    )
    batch_chunks: int | None = key(
        0,
        "Number of chunks in which each block computes a micro-batch. Chunks are recomputed in backward, so the "
        "activations of one chunk are held at a time, and a block is gathered once for all chunks. auto: chunks of "
        "about 8,192 tokens; 0: no chunks, and no recomputation.",
        minimum=0,
        auto=True,
    )
    tiled_loss: int | None = key(
        0,
        "Number of tiles of tokens in which causal language models of transformers compute logits and loss in "
        "training, so that all logits never exist at one time. They return no logits then. true: tiles of about 256 "
        "MiB of logits; 0: whole logits.",
        minimum=0,
        auto=True,
        true_is_auto=True,
    )
    tiled_mlp: int | None = key(
        0,
        "Number of tiles of tokens in which MLPs compute in training. Tiles are recomputed in backward, so that the "
        "activations of one tile are held at a time. A block is gathered once for all tiles. true: tiles of about "
        "8,192 tokens; 0: no tiles.",
        minimum=0,
        auto=True,
        true_is_auto=True,
    )
    tiled_mlp_modules: tuple[str, ...] = key(
        (),
        "Classes, names or name patterns (`*`) of the modules that `tiled_mlp` computes in tiles. They must compute "
        "each token separately. By default, MLPs are found by their layers (`up_proj` and `down_proj`, `fc1` and "
        "`fc2`, ...), without experts.",
        switch="tiled_mlp",
    )
    expert_parallel_size: int = key(
        1,
        "Number of parts into which the experts of a mixture of experts are divided. Each rank computes one part, and "
        "ranks send each other the tokens for their experts, instead of gathering all experts. It must divide the "
        "number of ranks and of experts.",
        minimum=1,
    )
    cuda_graphs: Literal["off", "on", "blocks", "model"] = key(
        "off",
        "Capture forward and backward in CUDA graphs, which take one launch each. blocks: one graph for each block; "
        "model: one for the whole model, whose gradients are reduced after the backward, in stages 0 to 2; on (or "
        "true): the model if there is one rank and nothing is sharded or offloaded, otherwise blocks. They are "
        "captured the fourth time that they are called with the same shapes, and run eagerly before that, in "
        "evaluation, and if a graph could not repeat them.",
    )
    nccl_error_handling: Literal["onefold", "torch"] = key(
        "onefold",
        "Component that ends NCCL collectives that hang. onefold: the hang detector, which names the ranks, with "
        "torch's watchdog and flight recorder disabled in the whole process; torch: the watchdog and the flight "
        "recorder. No effect on an existing process group.",
    )
    report: str | None = key(
        None,
        "Folder, or URL in an object store, in which rank 0 records the run in `run.jsonl`, with one line per step, "
        "for `onefold report` and `onefold watch`. By default, no record is written.",
    )
    metrics_address: str | None = key(
        None,
        "Address (`host:port`) at which rank 0 serves loss, learning rate, gradient norm, memory and traffic of the "
        "last step, and with `stall` the heartbeats of all ranks, to Prometheus, at /metrics and without "
        "authentication. By default, nothing listens.",
    )
    trace: TraceSection = section(TraceSection)
    stop: StopSection = section(StopSection)
    stall: StallSection = section(StallSection)
    peer_copies: PeerCopiesSection = section(PeerCopiesSection)
