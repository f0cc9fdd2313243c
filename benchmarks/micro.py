"""The small measurements behind choices that LOG.md and docs/design.md record: `python -m benchmarks.micro`.

One core, because each is a question of memory traffic or accuracy, not of parallelism.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from onefold.comm.hang_detector import HangDetector
from onefold.offload.grad_shard import square_sum

ELEMENTS = 13_700_000 // 65536 * 65536


def best_of(work: Callable[[], object], rounds: int = 5) -> float:
    """Milliseconds of the fastest round, after one to warm up."""
    work()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found) * 1000


def norms() -> None:
    vector = torch.randn(20_000_000 // 65536 * 65536)
    exact = vector.double().square().sum().sqrt().item()
    ways = {
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(vector),
        "torch.dot": lambda: torch.dot(vector, vector).sqrt(),
        "blocks of 2,048 (ours)": lambda: square_sum(vector).sqrt(),
    }
    for name, way in ways.items():
        print(f"norm of 20M elements, {name:<26} error {way().item() / exact - 1:+.1e}, {best_of(way):.1f} ms")


def adam() -> None:
    parameter, gradient, average, square = (torch.rand(ELEMENTS) for _ in range(4))
    step, half = torch.full((), 5.0), torch.full((1,), 0.5)

    def apply(start: int, stop: int, scaled: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        torch._fused_adamw_(
            [parameter[start:stop]], [scaled], [average[start:stop]], [square[start:stop]], [], [step],
            lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            grad_scale=scale,
        )  # fmt: skip

    def tiled(tile: int) -> Callable[[], None]:
        scratch = torch.empty(tile)

        def work() -> None:
            for start in range(0, ELEMENTS, tile):
                stop = min(start + tile, ELEMENTS)
                apply(start, stop, torch.mul(gradient[start:stop], half, out=scratch[: stop - start]))

        return work

    plain = best_of(lambda: apply(0, ELEMENTS, gradient))
    inside = best_of(lambda: apply(0, ELEMENTS, gradient, torch.full((), 2.0)))
    name = f"fused Adam of {ELEMENTS / 1e6:.1f}M elements"
    print(f"{name}: unscaled {plain:.1f} ms, scaled inside the kernel {inside:.1f} ms")
    for tile in (1 << 17, 1 << 20):
        print(f"{name}: scaled in tiles of {tile:,} {best_of(tiled(tile)):.1f} ms")


def compiler() -> None:
    code = "import time, torch; start = time.time(); import torch._dynamo; print(time.time() - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"importing torch's compiler after torch: {float(done.stdout):.1f} s")


def hang_detector() -> None:
    """What a launch pays for the hang detector: on a rank of two, whose thread does not run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    detector = HangDetector(dist.group.WORLD, 1)
    detector.size = 2
    guard = detector.make_guard()
    detector.close()

    def launch() -> None:
        for _ in range(10_000):
            with guard.launching("gather of", ["blocks.3"]):
                pass

    print(f"hang detector around a launch: {best_of(launch) / 10:.2f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    norms()
    adam()
    compiler()
    hang_detector()
