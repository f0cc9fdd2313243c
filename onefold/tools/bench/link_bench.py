"""Measure the links between ranks of this machine with the engine's gather and reduce-scatter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from onefold.comm import AllGatherOp, Ledger, Reduction, data_group, init_distributed, local_device, make_collective

# Elements per rank of a collective whose time is its latency, and repetitions of each collective.
_SMALL, _ROUNDS = 1024, 5
_TIMEOUT = 300


@dataclass(frozen=True)
class LinkRates:
    """Rates between the ranks of one node."""

    ranks: int
    sent: float
    """Bytes/s that a rank sends in a gather and a reduce-scatter."""
    call: float
    """Seconds of the smallest collective."""


class LinkError(Exception):
    """The measuring ranks failed."""


def measure_links(ranks: int, num_bytes: int) -> LinkRates:
    """Measure the links between `ranks` new processes, on GPUs if there are any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not torch.cuda.is_available():
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "onefold.tools.bench.link_bench", str(num_bytes)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=_TIMEOUT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise LinkError(f"{ranks} ranks could not measure their links: {output[0][-500:]}")
    rates = json.loads(output[0].splitlines()[-1])
    return LinkRates(ranks, rates["sent"], rates["call"])


def _measure(num_bytes: int) -> dict[str, float]:
    """Measure as one rank. A collective starts after all ranks have finished the previous one."""
    init_distributed()
    group, device, ledger = data_group(), local_device(), Ledger()
    collective = make_collective("auto", group, ledger, device)
    numel = max(num_bytes // 4 // group.size, _SMALL) * group.size

    def run(full: torch.Tensor) -> float:
        length, best = full.numel() // group.size, float("inf")
        own = full.narrow(0, group.rank * length, length)
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            collective.start_gather([AllGatherOp(full)]).finish()
            collective.start_reduce_scatter([Reduction(full, own.clone(), torch.float32, False)]).finish()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    call = run(torch.zeros(_SMALL * group.size, device=device)) / 2
    before = ledger.copy()
    seconds = run(torch.zeros(numel, device=device))
    sent = sum(row.bytes for row in ledger.since(before).rows()) / _ROUNDS
    torch.distributed.destroy_process_group()
    return {"sent": sent / seconds, "call": call}


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
