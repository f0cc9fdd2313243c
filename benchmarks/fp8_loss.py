"""The loss in FP8 next to bf16: `python -m benchmarks.fp8_loss --preset 1.3b --steps 300`.

Each system trains the same GPT from the same weights on the same batches of a language that it can learn: after each
of `--words` tokens, one of four others follows with fixed probabilities. The loss of a row is the mean over the last
20 steps, because losses of single batches differ by more than precisions do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAST = 20
HEADER = ["system", "first loss", "after a third", "after two thirds", "last", "last / first row"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_loss", description=__doc__)
    parser.add_argument("--preset", default="1.3b", help="shape of the GPT (benchmarks/model.py)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--words", type=int, default=512, help="tokens of the language")
    parser.add_argument("--systems", default="onefold-2,fp8-onefold-2,fp8-onefold-2-rowwise")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def losses_of(system: str, options: argparse.Namespace) -> list[float]:
    """Train on this rank, and return the loss of each step."""
    import torch

    from benchmarks.model import GPT, PRESETS
    from benchmarks.systems import SYSTEMS, Workload
    from benchmarks.worker import start_group

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    start_group(system, device)
    shape = PRESETS[options.preset]
    workload = Workload(options.preset, "bf16", options.batch, options.sequence, options.steps, 0, "cuda")
    torch.manual_seed(0)

    def construct() -> GPT:
        with device:
            return GPT(shape)

    step = SYSTEMS[system](construct, workload)
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(options.words, (options.words, 4), generator=generator)
    chances = torch.tensor([0.6, 0.2, 0.1, 0.1])
    losses = []
    for _ in range(options.steps):
        line = [torch.randint(options.words, (options.batch,), generator=generator)]
        chosen = torch.multinomial(chances, options.batch * options.sequence, replacement=True, generator=generator)
        for which in chosen.view(options.sequence, options.batch):
            line.append(following[line[-1], which])
        tokens = torch.stack(line, 1).to(device)
        losses.append(step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).detach().clone())
    return [float(loss) for loss in losses]


def run(system: str) -> list[float] | str:
    """Train a system in a process of its own, and return its losses or its last line of errors."""
    command = [sys.executable, "-m", "benchmarks.fp8_loss", *sys.argv[1:], "--worker", system]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | ranks | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    return json.loads(lines[0].removeprefix("LOSSES ")) if lines else done.stderr.strip().rpartition("\n")[2]


def main() -> None:
    options = parse_arguments()
    if options.worker is not None:
        print("LOSSES " + json.dumps(losses_of(options.worker, options)), flush=True)
        return
    print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|", flush=True)
    reference = 0.0
    for system in options.systems.split(","):
        found = run(system)
        if isinstance(found, str):
            print(f"| {system} | failed: {found} |", flush=True)
            continue
        means = [sum(found[end - LAST : end]) / LAST for end in (len(found) * part // 3 for part in (1, 2, 3))]
        reference = reference or means[-1]
        cells = [system, f"{found[0]:.4f}", *(f"{mean:.4f}" for mean in means), f"{means[-1] / reference:.4f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
