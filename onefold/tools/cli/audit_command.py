"""Run `onefold audit`: compare steps of a script in plain torch, in its ZeRO stage, and in FSDP2 and DeepSpeed."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onefold.config import load_config
from onefold.tools.cli.terminal import fails_on, print_text
from onefold.tools.cli.trials import error_line
from onefold.tools.cli.usage import UsageError

PLAIN, ONEFOLD, FSDP2, DEEPSPEED = "plain torch", "onefold", "FSDP2", "DeepSpeed"
# Relative differences up to which losses, gradients and updates are equal: fp32 sums in another order, and their
# amplification by Adam where gradients are close to zero.
_LOSS, _GRADIENT, _UPDATE = 1e-4, 1e-3, 0.02
# Gradients below this share of the norm of all gradients are rounding errors, as those of the biases of keys.
_NOISE = 1e-5
# The difference of ZeRO to plain torch for parameters without a gradient.
_UNUSED = (
    ". It has no gradient, which counts as zero, so weight decay and momentum apply. Freeze parameters that are never "
    "used with requires_grad_(False)"
)


@dataclass
class Variant:
    """A run of the script with one engine."""

    name: str
    folder: Path
    error: str = ""
    """Why the run has failed."""
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def step(self, number: int) -> dict[str, Any]:
        """Return loss, gradients, weights and buffers of a step."""
        import torch

        return torch.load(self.folder / f"step{number}.pt", weights_only=True)  # type: ignore[no-any-return]


@fails_on(OSError)
def audit(options: argparse.Namespace) -> int:
    """Run `onefold audit`."""
    if options.script is None and options.config is None:
        raise UsageError("nothing to audit. Give a script, or --config FILE.")
    if options.script is not None and not Path(options.script).is_file():
        raise UsageError(f"{options.script}: no such script")
    if options.config is not None:
        load_config(options.config)
    names = [PLAIN, ONEFOLD, FSDP2, *([DEEPSPEED] if has_deepspeed() else [])]
    print(f"{options.steps} steps on {options.ranks} CPU ranks in fp32: {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="onefold-audit-") as folder:
        found = []
        for name in names:
            print(f"running {name} ...", file=sys.stderr, flush=True)
            found.append(run_variant(name, Path(folder, name.replace(" ", "-")), options))
            if name == PLAIN and found[0].error:
                raise UsageError(f"the script does not run in plain torch: {found[0].error}")
        differences = report(found, options.steps)
    return 1 if differences else 0


def has_deepspeed() -> bool:
    """Return whether DeepSpeed is installed, and not onefold under its name."""
    spec = find_spec("deepspeed")
    return spec is not None and Path(spec.origin or "", "../runtime/zero/stage3.py").resolve().exists()


def run_variant(name: str, folder: Path, options: argparse.Namespace) -> Variant:
    """Run the script with one engine on CPU ranks."""
    folder.mkdir(parents=True)
    config = options.config and os.path.abspath(options.config)
    job = {"variant": name, "folder": str(folder), "steps": options.steps, "layers": options.layers}
    job |= {"stage": options.stage, "config": config, "script": options.script, "arguments": options.arguments}
    command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--nproc", str(options.ranks)]
    command += ["--module", "onefold.tools.cli.audit_rank", json.dumps(job)]
    variant, log = Variant(name, folder), folder / "log.txt"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with log.open("wb") as output:
        try:
            subprocess.run(command, stdout=output, stderr=output, timeout=options.timeout, check=False, env=environment)
        except subprocess.TimeoutExpired:
            variant.error = f"no end within {options.timeout} s. The ranks may wait for each other"
    records = [folder / f"rank{rank}.json" for rank in range(options.ranks)]
    if all(path.exists() for path in records):
        return Variant(name, folder, ranks=[json.loads(path.read_text()) for path in records])
    variant.error = variant.error or error_line(log.read_text(errors="replace")) or "it ended without a message"
    return variant


def report(found: Sequence[Variant], steps: int) -> int:
    """Print the findings, and return the number of differences and divergences."""
    plain, count = found[0], 0
    stage = plain.ranks[0]["stage"]
    losses = [f"{plain.step(number)['loss']:.5f}" for number in range(1, steps + 1)]
    print_text(f"plain torch: losses {', '.join(losses)}")
    for variant in found[1:]:
        name = f"onefold, stage {stage}" if variant.name == ONEFOLD else variant.name
        if variant.error:
            print_text(f"{name}: does not run: {variant.error}")
            count += variant.name == ONEFOLD  # a peer that cannot run the script is no finding about it
            continue
        difference = first_difference(plain, variant, steps)
        print_text(f"{name}: {difference or 'equal to plain torch, up to rounding'}")
        count += difference is not None
    for variant in found:
        for text in divergences(variant.ranks) if variant.ranks else []:
            print_text(f"ranks diverge in {variant.name}: {text}")
            count += 1
    names = plain.ranks[0]["never"]
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        print_text(f"parameters that never get a gradient: {', '.join(names[:10])}{more}")
    if len(plain.ranks) > 1 and all(rank["losses"] == plain.ranks[0]["losses"] for rank in plain.ranks):
        print_text("all ranks have the same losses: they probably read the same data")
    if plain.ranks[0]["left_out"]:
        print_text(f"not audited: {', '.join(plain.ranks[0]['left_out'])}")
    for notice in plain.ranks[0]["notices"]:
        print_text(f"config: {notice}")
    return count


def first_difference(plain: Variant, other: Variant, steps: int) -> str | None:
    """Describe the first tensor that differs, in the order of a step, or return None."""
    first, its_first = plain.step(0), other.step(0)
    for kind in ("weights", "buffers"):
        changed = next((name for name in first[kind] if not first[kind][name].equal(its_first[kind][name])), None)
        if changed is not None:
            return f"the {kind.removesuffix('s')} {changed} differs before the first step"
    before, has_gradient = (first["weights"], its_first["weights"]), False
    for number in range(1, steps + 1):
        a, b = plain.step(number), other.step(number)
        if not abs(a["loss"] - b["loss"]) <= _LOSS * abs(a["loss"]):  # also true of NaN
            return f"the loss of step {number} is {b['loss']:.6f} instead of {a['loss']:.6f}"
        total = math.sqrt(sum(float(each.norm()) ** 2 for each in a["gradients"].values()))
        has_gradient = has_gradient or total > 0
        for name, expected in a["gradients"].items():
            got = b["gradients"][name]
            off, size = float((expected - got).norm()), float(expected.norm())
            if not off <= _GRADIENT * size + _NOISE * total:
                return f"step {number}: the gradient of {name} differs, {_sizes(off, size, float(got.norm()))}"
        for name, weight in a["weights"].items():
            if name in a["gradients"] and 0 < float(a["gradients"][name].norm()) <= _NOISE * total:
                continue
            expected, got = weight - before[0][name], b["weights"][name] - before[1][name]
            off, size = float((expected - got).norm()), float(expected.norm())
            if not off <= _UPDATE * size + 1e-7 * float(weight.norm()):
                text = f"step {number}: the update of {name} differs, {_sizes(off, size, float(got.norm()))}"
                has_none = name in a["gradients"] and a["gradients"][name].shape != weight.shape
                return text + (_UNUSED if has_none else "")
        for name, expected in a["buffers"].items():
            got = b["buffers"][name]
            off, size = float((expected - got).norm()), float(expected.norm())
            if not (expected.equal(got) or off <= _GRADIENT * size):  # as infinities are
                return f"step {number}: the buffer {name} differs, {_sizes(off, size, float(got.norm()))}"
        before = a["weights"], b["weights"]
    return None if has_gradient else "nothing was compared, because no parameter has a gradient"


def _sizes(off: float, expected: float, got: float) -> str:
    ratio = f"by {off / expected:.1%} of its norm" if expected else "where it is zero"
    return f"{ratio} ({got:.4g} instead of {expected:.4g})"


def divergences(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe how ranks differ that must be equal."""
    found, first = [], ranks[0]
    for number, rank in enumerate(ranks[1:], start=1):
        made = [name for name in first["start"] if rank["start"].get(name) != first["start"][name]]
        if made:
            found.append(f"rank {number} makes other weights than rank 0 ({made[0]} first). Seed all ranks alike.")
        pairs = enumerate(zip(rank["weights"], first["weights"], strict=True), start=1)
        step = next((step for step, (mine, its) in pairs if mine != its), None)
        if step is not None:
            found.append(f"after step {step} rank {number} has other weights than rank 0")
    return found
