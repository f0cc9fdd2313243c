"""Saving and loading beside `torch.save` a rank and torch.distributed.checkpoint: `python -m benchmarks.checkpoints`.

All hold the same bytes (fp32 weights and both Adam moments, each rank its half), all flush files to the disk, onefold
also takes and checks checksums. `--store s3://bucket/run` lets onefold save to an object store.

A background save is measured twice: the stall of the training loop (for onefold the call, and what the next step waits
for the copy of optimizer states, which goes on beside its forward and backward), and until it is on disk (for onefold
with that step in it). Extra memory is the high-water mark of resident memory during a save, above what was resident
before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.model import GPT, PRESETS, make_batch
from benchmarks.systems import NOTHING_KEPT, Workload, adamw, zero_config
from benchmarks.table import describe_run, format_table
from benchmarks.worker import peak_resident_mb
from onefold.storage.place import place, remove_tree, tree_size

SYSTEMS = ("torch.save", "dcp", "dcp-async", "onefold", "onefold-async")
Timed = dict[str, float]


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _settle_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Measured:
    """Seconds and extra memory of one piece of work that all ranks begin together."""

    def __init__(self) -> None:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        self._before = int(found.group(1)) / 1024
        _settle_device()
        self._started = time.perf_counter()

    def seconds(self) -> float:
        _settle_device()
        return time.perf_counter() - self._started

    def extra_mb(self) -> float:
        return peak_resident_mb() - self._before


def build_model(workload: Workload) -> GPT:
    with torch.device(workload.device):
        return GPT(PRESETS[workload.preset])


def fsdp2(workload: Workload) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = build_model(workload)
    mesh = dist.init_device_mesh(workload.device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    tokens, targets = make_batch(PRESETS[workload.preset], 1, 64, dist.get_rank(), torch.device(workload.device))
    model(tokens, targets).backward()
    optimizer.step()
    return model, optimizer


def torch_save(workload: Workload) -> tuple[Callable[[Path], Timed], Callable[[Path], float]]:
    model, optimizer = fsdp2(workload)
    shards = {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            shards[f"{name}.{state}"] = optimizer.state[parameter][state].to_local()

    def save(folder: Path) -> Timed:
        measured = Measured()
        folder.mkdir(exist_ok=True)
        path = folder / f"{dist.get_rank()}.pt"
        with path.open("wb") as file:
            torch.save(shards, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        flush(folder)
        return {"save": measured.seconds(), "extra": measured.extra_mb()}

    def load(folder: Path) -> float:
        measured = Measured()
        found = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
        for name, shard in shards.items():
            shard.copy_(found[name])
        dist.barrier()
        return measured.seconds()

    return save, load


def dcp(background: bool) -> Callable[[Workload], tuple[Callable[[Path], Timed], Callable[[Path], float]]]:
    def build(workload: Workload) -> tuple[Callable[[Path], Timed], Callable[[Path], float]]:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = fsdp2(workload)

        def state() -> dict[str, Any]:
            weights, states = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": states}

        def save(folder: Path) -> Timed:
            measured = Measured()
            writer = checkpoint.FileSystemWriter(folder, sync_files=True)
            if not background:
                checkpoint.save(state(), storage_writer=writer)
                return {"save": measured.seconds(), "extra": measured.extra_mb()}
            future = checkpoint.async_save(state(), storage_writer=writer)
            stall = measured.seconds()
            future.result()  # type: ignore[union-attr]
            dist.barrier()
            return {"stall": stall, "save": measured.seconds(), "extra": measured.extra_mb()}

        def load(folder: Path) -> float:
            measured = Measured()
            found = state()
            checkpoint.load(found, storage_reader=checkpoint.FileSystemReader(folder))
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            dist.barrier()
            return measured.seconds()

        return save, load

    return build


def onefold_(background: bool) -> Callable[[Workload], tuple[Callable[[Path], Timed], Callable[[Path], float]]]:
    def build(workload: Workload) -> tuple[Callable[[Path], Timed], Callable[[Path], float]]:
        import onefold

        config = zero_config(3, workload)
        config["zero_optimization"] |= NOTHING_KEPT
        model = build_model(workload)
        engine, *_ = onefold.initialize(model=model, model_parameters=model.parameters(), config=config)
        tokens, targets = make_batch(PRESETS[workload.preset], 1, 64, dist.get_rank(), torch.device(workload.device))
        engine.backward(engine(tokens, targets))
        engine.step()

        def save(folder: Path) -> Timed:
            measured = Measured()
            engine.save_checkpoint(str(folder), background=background)
            stall = measured.seconds()
            if background:
                # What is left to copy is copied beside the next step, which waits for it before it changes anything.
                engine.backward(engine(tokens, targets))
                waiting = time.perf_counter()
                engine._saver.wait_until_copied()
                stall += time.perf_counter() - waiting
                engine.step()
            engine.wait_for_checkpoint()
            timed = {"save": measured.seconds(), "extra": measured.extra_mb()}
            return {**timed, "stall": stall} if background else timed

        def load(folder: Path) -> float:
            engine.global_steps = 0  # as a fresh engine, which has nothing to lose and does not check bytes twice
            measured = Measured()
            engine.load_checkpoint(str(folder))
            dist.barrier()
            return measured.seconds()

        return save, load

    return build


BUILD = {
    "torch.save": torch_save,
    "dcp": dcp(background=False),
    "dcp-async": dcp(background=True),
    "onefold": onefold_(background=False),
    "onefold-async": onefold_(background=True),
}


def run_rank(
    system: str, workload: Workload, folder: Path, repeats: int, result: Path, store: str | None = None
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if workload.device == "cuda" else "gloo")
    torch.manual_seed(0)
    save, load = BUILD[system](workload)
    rows: list[Timed] = []
    extra = 0.0
    for repeat in range(repeats + 1):  # the first one warms up, and may make buffers that stay
        target: Any = place(store) / str(repeat) if store else folder / str(repeat)
        row = save(target)
        row["load"] = load(target)
        row["extra"] = extra = max(extra, row["extra"])
        if dist.get_rank() == 0:
            row["mb"] = tree_size(target) / 1e6
            remove_tree(target)
        if repeat:
            rows.append(row)
    if dist.get_rank() == 0:
        os.sync()
    result.write_text(json.dumps(rows))
    dist.destroy_process_group()


def run(
    system: str, workload: Workload, ranks: int, repeats: int, folder: Path, store: str | None = None
) -> list[Timed]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=folder) as results:
        shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"OMP_NUM_THREADS": "1", "BENCH": json.dumps([system, vars(workload), results, repeats, store])}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.checkpoints"],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"{system}:\n" + b"\n".join(errors).decode())
        measured = [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(ranks)]
    # The slowest rank counts.
    return [{key: max(row.get(key, 0.0) for row in rows) for key in rows[0]} for rows in zip(*measured, strict=True)]


def main() -> None:
    if "BENCH" in os.environ:
        system, workload, results, repeats, store = json.loads(os.environ["BENCH"])
        result = Path(results, f"{os.environ['RANK']}.json")
        run_rank(system, Workload(**workload), Path(results), repeats, result, store)
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="120m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="saves and loads a run, after one to warm up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="what onefold computes in")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to save")
    parser.add_argument("--store", help="the URL of an object store to save to; with --systems onefold,onefold-async")
    parser.add_argument("--report", type=Path, help="also write a dated report here")
    options = parser.parse_args()
    systems = options.systems.split(",")
    if options.store and not all(system.startswith("onefold") for system in systems):
        parser.error("--store needs --systems onefold, onefold-async or both")
    workload = Workload(options.preset, options.dtype, 1, 64, 1, 0, options.device)
    rows: dict[str, list[Timed]] = {system: [] for system in systems}
    for round_index in range(options.rounds):
        for system in systems[round_index % len(systems) :] + systems[: round_index % len(systems)]:
            rows[system] += run(system, workload, options.ranks, options.repeats, options.folder, options.store)
            print(f"round {round_index + 1}, {system}: {rows[system][-1]}", flush=True)

    def cell(system: str, key: str, form: str) -> str:
        values = [row[key] for row in rows[system] if key in row]
        return format(statistics.median(values), form) if values else "-"

    keys = {"save s": ("save", ".2f"), "stall s": ("stall", ".3f"), "load s": ("load", ".2f")}
    keys |= {"extra MB a rank": ("extra", ".0f"), "on disk MB": ("mb", ".0f")}
    table = format_table(
        ["system", *keys],
        [[system, *(cell(system, *key) for key in keys.values())] for system in systems],
    )
    print(table)
    if options.report:
        title = f"Checkpoints of {options.preset} on {options.ranks} ranks"
        details = {"runs": f"{options.rounds} rounds of {options.repeats} saves and loads a system, medians"}
        about = "\n" + (__doc__ or "").split("\n\n", 1)[1]
        options.report.write_text(describe_run(title, "benchmarks.checkpoints", details) + about + "\n" + table + "\n")


if __name__ == "__main__":
    main()
