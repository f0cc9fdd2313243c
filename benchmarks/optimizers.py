"""How low a small GPT's loss gets with each optimizer, over learning rates: `python -m benchmarks.optimizers`.

Each run is `onefold train`, with the same data, seed, batch and schedule; only the optimizer differs, or, with
`--formats fp32,int8`, what its states and masters are held in. The loss is the mean of the last steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT
from benchmarks.systems import BF16, INT8, SPLIT_8, SPLIT_16
from benchmarks.table import describe_run, format_table
from onefold.report.run_file import RunFile

BETAS, DECAY = [0.9, 0.95], 0.1
CLIPPING = 1.0
RATES = {
    "AdamW": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "Muon": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    "Shampoo": (5e-3, 1e-2, 2e-2, 4e-2),
}
FORMATS: dict[str, dict[str, str]] = {
    "fp32": {},
    "int8": INT8,
    "split16": SPLIT_16,
    "split8": SPLIT_8,
    "int8+split16": {**INT8, **SPLIT_16},
    "int8+split8": {**INT8, **SPLIT_8},
    "bf16": BF16,
}
LAST = 20


@dataclass(frozen=True)
class Trial:
    """One optimizer at one rate, with its states in one format, from one seed."""

    optimizer: str
    rate: float
    format: str
    seed: int

    def section(self) -> dict[str, Any]:
        params: dict[str, Any] = {"lr": self.rate, "betas": BETAS, "eps": 1e-8, "weight_decay": DECAY}
        if self.optimizer != "AdamW":
            params["adam_lr"] = 2e-3  # of embeddings, head and vectors
        return {"type": self.optimizer, "params": params}


def run(trial: Trial, options: argparse.Namespace) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": CLIPPING,
            "bf16": {"enabled": options.dtype == "bf16"},
            "zero_optimization": {"stage": options.stage},
            "optimizer": trial.section(),
            "onefold": FORMATS[trial.format],
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"},
            },
        }
        Path(folder, "ds_config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "onefold.tools.cli.main", "train", "--config", f"{folder}/ds_config.json"]
        command += ["--preset", options.preset, "--steps", str(options.steps), "--out", f"{folder}/out"]
        command += ["--sample-length", "0", "--ranks", str(options.ranks), "--seed", str(trial.seed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            return {"problem": done.stderr.strip().splitlines()[-1]}
        steps = RunFile.read(Path(folder, "out")).steps
    losses, seconds = [row.loss or 0.0 for row in steps], [row.seconds for row in steps]
    clipped = statistics.mean((row.grad_norm or 0.0) > CLIPPING for row in steps)
    return {"loss": statistics.mean(losses[-LAST:]), "seconds": statistics.median(seconds), "clipped": clipped}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank and step (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--optimizers", default="AdamW,Muon,Shampoo")
    parser.add_argument("--formats", default="fp32", help=f"of {', '.join(FORMATS)} (default: %(default)s)")
    parser.add_argument("--rates", help="instead of each optimizer's own list")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, from seeds 0, 1, ... (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more than one makes seconds meaningless")
    parser.add_argument("--report", help="a markdown file for the table")
    options = parser.parse_args()
    given = [float(rate) for rate in options.rates.split(",")] if options.rates else None
    trials = [
        Trial(name, rate, form, seed)
        for name in options.optimizers.split(",")
        for rate in given or RATES[name]
        for form in options.formats.split(",")
        for seed in range(options.seeds)
    ]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for trial, found in zip(trials, pool.map(lambda each: run(each, options), trials), strict=True):
            told = f"{found['loss']:.4f}" if "loss" in found else str(found["problem"])
            seconds = f"{found['seconds']:.4f}" if "seconds" in found and options.jobs == 1 else "-"
            clipped = f"{found['clipped']:.0%}" if "clipped" in found else "-"
            rows.append([trial.optimizer, f"{trial.rate:g}", trial.format, str(trial.seed), told, clipped, seconds])
            print(*rows[-1], flush=True)
    table = format_table(
        ["optimizer", "rate", "format", "seed", f"loss, mean of the last {LAST} steps", "steps clipped", "s/step"], rows
    )
    print(table)
    if options.report:
        job = f"{options.steps} steps, {options.ranks} rank(s), {options.batch} sequences each, {options.dtype}"
        head = describe_run("Optimizers", "benchmarks.optimizers", {"model": f"GPT {options.preset}", "job": job})
        Path(options.report).write_text(f"{head}\n{table}\n")


if __name__ == "__main__":
    main()
