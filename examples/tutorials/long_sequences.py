"""Long sequences: divide them among ranks, compute the loss in tiles, and compare memory, traffic and losses.

    onefold launch --nproc 2 long_sequences.py     # two ranks on CPUs; without --nproc one rank per GPU

docs/tutorials/long-sequences.md explains the results.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM

import onefold

VOCABULARY, WIDTH = 4096, 64
LENGTHS = (256, 512, 1024)
SETTINGS: dict[str, dict[str, Any]] = {
    "whole sequences": {},
    "tiled loss": {"onefold": {"tiled_loss": 8}},
    "divided": {"sequence_parallel_size": 2},
    "divided, tiled loss": {"sequence_parallel_size": 2, "onefold": {"tiled_loss": 8}},
}
COLORS = ("#2f6fc1", "#e08a2e", "#3a9a6a", "#8a62c9")


@dataclass
class Result:
    """Measurements of one run on rank 0."""

    setting: str
    length: int
    loss: float
    """The mean over all sequences of the last step."""
    peak: int
    """The largest number of bytes that the last forward and backward added to the device at one time."""
    sent: dict[str, int]
    """Bytes that the rank sent in the last step, by kind."""


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=max(LENGTHS),
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


class PeakMemory:
    """Measure the largest number of bytes that the device holds at one time in a context, above those at its start."""

    def __init__(self, device: torch.device) -> None:
        self._type = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
        self._profile = torch.profiler.profile(profile_memory=True)
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        changes = [each for each in events if each.name() == "[memory]" and each.device_type() == self._type]
        held = 0
        for change in sorted(changes, key=lambda each: each.start_ns()):
            held += change.nbytes()
            self.bytes = max(self.bytes, held)


def train(setting: str, length: int) -> Result | None:
    """Train for two steps on random tokens. Return the measurements on rank 0."""
    config = {
        # One sequence for each rank, or one for two ranks: two sequences per step in both cases.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SETTINGS[setting].get("sequence_parallel_size", 1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "log_level": "warning",
        **SETTINGS[setting],
    }
    engine, _, _, _ = onefold.initialize(model=make_model(), config=config)
    parallel = engine.sequence_parallel
    tokens = torch.Generator().manual_seed(0)
    with engine:
        for step in range(2):
            before = engine.ledger.copy()
            rows = torch.randint(VOCABULARY, (engine.world_size, 1, length), generator=tokens).to(engine.device)
            mine = rows if parallel.size > 1 else rows[engine.global_rank :][:1]
            losses = []
            peak = PeakMemory(engine.device)
            with peak if step == 1 else nullcontext():  # the first step allocates the optimizer states
                for row in mine:
                    part = parallel.split({"input_ids": row, "labels": row})
                    loss = parallel.mean_loss(engine(**part).loss, part["labels"])
                    engine.backward(loss)
                    losses.append(loss.detach())
                    engine.step()
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
        is_first = engine.global_rank == 0
    if not is_first:
        return None
    traffic = engine.ledger.since(before)
    sent = {"gradients": traffic.bytes("reduce-scatter"), "parameters": traffic.bytes("gather")}
    sent["attention"] = traffic.bytes("attention")
    return Result(setting, length, mean.item() / engine.world_size, peak.bytes, sent)


def print_table(results: list[Result]) -> None:
    print(f"{'setting':<20}  tokens        peak   gradients  parameters   attention  last loss")
    for each in results:
        cells = "".join(f"{size / 1e6:>12.2f}" for size in (each.peak, *each.sent.values()))
        print(f"{each.setting:<20}{each.length:>8}{cells}  {each.loss:.5f}")
    print(
        "in MB of rank 0: peak of activations and gradients; bytes sent in a step for gradients, parameters, attention"
    )


def draw(results: list[Result], path: Path) -> None:
    """Draw the peak by the length of the sequences, and what is sent for the longest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    memory, traffic = figure.subplots(1, 2)
    for setting, color in zip(SETTINGS, COLORS, strict=True):
        runs = [each for each in results if each.setting == setting]
        memory.plot(
            [each.length for each in runs], [each.peak / 1e6 for each in runs], "o-", label=setting, color=color
        )
    memory.set_xlabel("tokens of a sequence")
    memory.set_ylabel("peak of activations and gradients, MB per rank")
    memory.set_xticks(LENGTHS)
    memory.set_ylim(bottom=0)
    memory.legend(frameon=False)
    longest = [each for each in results if each.length == max(LENGTHS)]
    names = [each.setting for each in longest]
    left = [0.0] * len(longest)
    for kind, color in zip(longest[0].sent, COLORS, strict=False):
        widths = [each.sent[kind] / 1e6 for each in longest]
        traffic.barh(names, widths, 0.6, left, label=kind, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    traffic.invert_yaxis()
    traffic.set_xlabel(f"MB sent per rank and step, {max(LENGTHS)} tokens")
    traffic.legend(frameon=False)
    for axes in (memory, traffic):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/long-sequences"))
    out = parser.parse_args().out
    found = [train(setting, length) for setting in SETTINGS for length in LENGTHS]
    results = [result for result in found if result is not None]
    if results:
        out.mkdir(parents=True, exist_ok=True)
        print_table(results)
        draw(results, out / "long-sequences.png")
        print(f"picture: {out}/long-sequences.png")


if __name__ == "__main__":
    main()
