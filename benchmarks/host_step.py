"""The host's step, its alternatives taking turns in one process: `python -m benchmarks.host_step`.

How a 16-bit gradient and parameter are cast around torch's fused AdamW, and with how many elements at once; on a GPU
also with how many cores the engine's own step runs best.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.model import GPT, PRESETS, make_batch
from benchmarks.systems import AUTO, CPU, Workload, zero_config
from benchmarks.table import format_table
from onefold.offload import state_codec
from onefold.offload.buffer import Buffer
from onefold.offload.host_memory import page_aligned
from onefold.optim import pipeline
from onefold.optim.pipeline import ElementwiseUpdate, StateWindow, StepValues
from onefold.optim.rules import AdamRule
from onefold.plan.state_formats import INT8, INT8_SQUARES, SPLIT_8, SPLIT_16, StateFormat
from onefold.tools.bench.offload_bench import OneGroup

Update = Callable[[slice], None]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_step", description=__doc__)
    parser.add_argument("--millions", type=int, default=192, help="parameters of the casts, in millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms-only", action="store_true", help="measure states in fewer bytes alone")
    parser.add_argument("--preset", choices=list(PRESETS), default="1.3b", help="the model of the engine's step")
    return parser.parse_args()


def updates(numel: int) -> dict[str, Update]:
    """Ways to update a stretch, on the same memory."""
    wide = [page_aligned(4 * numel).view(torch.float32) for _ in range(3)]
    gradient = page_aligned(2 * numel).view(torch.bfloat16).normal_()
    master, first, second = wide
    scratch, number, scale = torch.empty(1 << 24), torch.ones(()), torch.full((1,), 0.5)

    def adam(at: slice, scaled: torch.Tensor) -> None:
        torch._fused_adamw_(
            [master[at]], [scaled], [first[at]], [second[at]], [], [number], lr=1e-4, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def cast_in(at: slice) -> torch.Tensor:
        return scratch[: at.stop - at.start].copy_(gradient[at])

    def cast_both(at: slice) -> None:
        adam(at, cast_in(at))
        gradient[at].copy_(master[at])

    spare = [page_aligned(4 * numel).view(torch.float32) for _ in range(3)]

    def keep_old(at: slice) -> None:
        for old, values in zip(spare, wide, strict=True):
            old[at].copy_(values[at])
        adam(at, cast_in(at))

    def product_of_two_dtypes(at: slice) -> None:
        adam(at, torch.mul(gradient[at], scale, out=scratch[: at.stop - at.start]))

    return {
        "gradient cast in (ours)": lambda at: adam(at, cast_in(at)),
        "and the parameter cast out": cast_both,
        "and what was there kept, to undo the step": keep_old,
        "gradient cast and scaled": lambda at: adam(at, cast_in(at).mul_(0.5)),
        "the same by one product": product_of_two_dtypes,
    }


@torch.no_grad()
def measure_casts(numel: int, rounds: int) -> str:
    """Billions of parameters a second, median of rounds that take turns."""
    ways = updates(numel)
    sizes = [1 << 20, 1 << 21, 1 << 22]
    rates: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in sizes}
    for number in range(rounds + 1):
        for (way, size), found in rates.items():
            start = time.perf_counter()
            for low in range(0, numel, size):
                ways[way](slice(low, min(low + size, numel)))
            if number:
                found.append(numel / (time.perf_counter() - start) / 1e9)
    rows = [[way, *(f"{statistics.median(rates[way, size]):.2f}" for size in sizes)] for way in ways]
    return format_table(["G parameters/s", *(f"tiles of {size >> 20}M" for size in sizes)], rows)


@torch.no_grad()
def measure_forms(numel: int, rounds: int) -> str:
    """Billions of parameters a second of the engine's own tiles, by what masters and states are held in."""
    hyper = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True}
    gradient = page_aligned(2 * numel).view(torch.bfloat16).fill_(1e-3)
    shapes = {
        "fp32": (None, None, None),
        "int8": (None, INT8, INT8_SQUARES),
        "split16": (SPLIT_16, None, None),
        "int8, split16": (SPLIT_16, INT8, INT8_SQUARES),
        "int8, split8": (SPLIT_8, INT8, INT8_SQUARES),
    }
    sizes = [torch.get_num_threads() << shift for shift in (14, 15, 16, 17, 18)]
    rows, of_tile = [], state_codec.host_tile
    for name, forms in shapes.items():
        held = [_held(form, numel) for form in forms]
        window = StateWindow(0, numel, held[0], {"exp_avg": held[1], "exp_avg_sq": held[2]})
        rates = []
        for size in sizes:
            pipeline.host_tile = state_codec.host_tile = lambda size=size: size
            elementwise, found = ElementwiseUpdate([AdamRule()], 1 << 22), []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                elementwise.update(OneGroup(), gradient, StepValues(1, 0.5, [hyper]), window, 0, numel, None)
                found.append(numel / (time.perf_counter() - start) / 1e9)
            rates.append(f"{statistics.median(found[1:]):.3f}")
        rows.append([name, *rates])
    pipeline.host_tile = state_codec.host_tile = of_tile
    per_core = [f"{size // torch.get_num_threads() >> 10}K values a core" for size in sizes]
    return format_table(["G parameters/s", *per_core], rows)


def _held(form: StateFormat | None, numel: int) -> Buffer:
    if form is None:
        return Buffer.of(page_aligned(4 * numel).view(torch.float32))
    return Buffer([torch.zeros(part.numel(numel), dtype=part.dtype) for part in form.parts], numel, form)


def measure_cores(preset: str, rounds: int) -> str:
    """Seconds a step of the engine, with all cores and with some left to the trainer, taking turns."""
    import onefold

    shape, device, cores = PRESETS[preset], torch.device("cuda"), torch.get_num_threads()
    workload = Workload(preset, "bf16", 8, 1024, num_steps=5, num_warmup_steps=2, device="cuda")
    rows = []
    for name, offload, share in (("all states", CPU, None), ("30% of the states", AUTO, 0.7)):
        with device:
            model = GPT(shape)
        config = {**zero_config(2, workload), "log_level": "warning"}
        config["zero_optimization"] |= {"overlap_comm": True, "offload_optimizer": offload}
        if share is not None:
            num = sum(parameter.numel() for parameter in model.parameters())
            config["onefold"] = {"device_memory": (2 + share * 14) * num / 1e9}
        engine = onefold.initialize(model=model, config=config)[0]
        assert engine.state.schedule.memory is not None
        seconds: dict[int, list[float]] = {}
        for _ in range(rounds):
            for num_cores in (cores, cores - 1, cores - 2, cores - 4):
                engine.state.schedule.memory.worker.submit(torch.set_num_threads, num_cores).result()
                torch.set_num_threads(cores)
                seconds.setdefault(num_cores, []).append(_seconds_a_step(engine, shape, workload, device))
        rows += [[name, str(num), " ".join(f"{each:.3f}" for each in found)] for num, found in seconds.items()]
        engine.destroy()
    return format_table(["on the host", "cores", "s a step, each round"], rows)


def _seconds_a_step(engine: object, shape: object, workload: Workload, device: torch.device) -> float:
    marks = []
    for number in range(workload.num_warmup_steps + workload.num_steps):
        tokens, targets = make_batch(shape, workload.batch, workload.sequence, number, device)  # type: ignore[arg-type]
        engine.backward(engine(tokens, targets))  # type: ignore[attr-defined, operator]
        engine.step()  # type: ignore[attr-defined]
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    first = marks[workload.num_warmup_steps - 1]
    return first.elapsed_time(marks[-1]) / 1000 / workload.num_steps


def main() -> None:
    arguments = parse_arguments()
    if arguments.forms_only:
        print(measure_forms(arguments.millions << 20, arguments.rounds))
        return
    print(measure_casts(arguments.millions << 20, arguments.rounds))
    print("\n" + measure_forms(arguments.millions << 20, arguments.rounds))
    if torch.cuda.is_available():
        print("\n" + measure_cores(arguments.preset, arguments.rounds))


if __name__ == "__main__":
    main()
