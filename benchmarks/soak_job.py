"""The training job of the soak and of the kills: a tiny GPT whose every step is recorded, and which resumes by itself.

The job uses what a run has to restore: shuffled data over several epochs, random numbers of torch and of Python in
the loss, a learning rate schedule, accumulation, clipping and offloaded states. Each rank appends a line for each step
to a file, with its losses as hexadecimal numbers, and a line for each start, load and save to another file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import Dataset

import onefold
from onefold.checkpoint.saving.rank_shard_writer import SaveError
from onefold.tools.train.gpt import GPT, GPTConfig

VOCABULARY, LENGTH = 64, 16
SHAPE = GPTConfig(num_layers=2, num_heads=2, dim=32, sequence_length=LENGTH, vocab_size=VOCABULARY)
# One train batch for 1, 2, 3, 4 and 6 ranks.
ELASTICITY = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "version": 0.1, "max_gpus": 6}
# Part of `save_checkpoint` or of a resume that a sabotaged job does wrong, to show that the checks find it.
SABOTAGES = ("data", "random numbers", "manifest")


@dataclass(frozen=True)
class JobOptions:
    """What one job trains, and where it writes."""

    folder: str
    """Folder of the records."""
    save_dir: str
    """Folder of the checkpoints."""
    stage: int = 3
    offload: bool = False
    """Whether the optimizer states are in host memory."""
    save_every: int = 5
    background: str = "alternate"
    """Which saves are written in the background: never, always or alternate."""
    one_tag: bool = False
    """Whether all checkpoints have the same tag."""
    keep_last: int = 3
    step_seconds: float = 0.0
    """Shortest time of a step. The job sleeps for the rest."""
    sabotage: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobOptions:
        return cls(**json.loads(text))

    def config(self) -> dict[str, Any]:
        """The config of the engine."""
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "elasticity": ELASTICITY,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100_000, "warmup_num_steps": 20}},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            "checkpoint": {"keep_last": self.keep_last},
            "onefold": {"stop": {"save_to": self.save_dir, "signals": ["SIGUSR1"], "seconds": 60}},
        }


class Samples(Dataset[torch.Tensor]):
    """Sequences that are determined by their index: a sum of two waves, so that there is something to learn."""

    def __len__(self) -> int:
        return 606  # an epoch ends within an accumulation window

    def __getitem__(self, index: int) -> torch.Tensor:
        place = torch.arange(LENGTH + 1)
        return (place * (1 + index % 5) + (place // 3) * (index % 7) + index) % VOCABULARY


class SoakJob:
    """The engine of one rank with its data and its records."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        torch.manual_seed(7)
        model = GPT(SHAPE)
        random.seed(11)
        self.engine = onefold.initialize(model=model, config=options.config(), training_data=Samples())[0]
        torch.manual_seed(13 + self.engine.global_rank)
        folder, rank = Path(options.folder), self.engine.global_rank
        start = torch.tensor([os.getpid()])
        dist.broadcast(start, 0)
        self._start = int(start)
        """The process id of rank 0, which all ranks record with their losses."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._losses = os.open(folder / f"losses.{rank}", flags)
        self._events = os.open(folder / f"events.{rank}", flags)
        self._batches = self._all_batches()
        self._saved_last = 0
        if options.sabotage == "manifest":
            _write_manifests_in_place()

    def _all_batches(self) -> Iterator[torch.Tensor]:
        loader = self.engine.training_dataloader
        epoch = loader.state_dict()["epoch"]
        while True:
            loader.sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def note(self, **event: Any) -> None:
        """Append an event to the records of this rank, in one write, so that a kill never leaves a half line."""
        own = {"start": self._start, "world": self.engine.world_size, "pid": os.getpid(), "time": time.time()}
        line = {**event, **own}
        os.write(self._events, json.dumps(line).encode() + b"\n")

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        path, _ = self.engine.load_checkpoint(self.options.save_dir)
        self._saved_last = self.engine.global_steps
        if self.options.sabotage == "random numbers":
            torch.manual_seed(13)
        if self.options.sabotage == "data":
            self.engine.training_dataloader.load_state_dict(
                {"epoch": 0, "samples": 0, "world_size": self.engine.world_size, "batch_size": 1}
            )
        self._batches = self._all_batches()
        self.note(event="resumed", tag=Path(path).name if path else None, step=self.engine.global_steps)

    def step(self) -> None:
        """Train one step, and record its losses."""
        engine, losses = self.engine, []
        number = engine.global_steps + 1
        for _ in range(engine.batch.accumulation):
            tokens = next(self._batches)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            loss = loss * (1 + 0.01 * torch.rand(()) + 0.01 * random.random())
            losses.append(loss.item().hex())
            engine.backward(loss)
            if len(losses) == engine.batch.accumulation:  # `step` does not return if a signal stops the job
                os.write(self._losses, f"{number} {self._start} {' '.join(losses)}\n".encode())
            engine.step()

    def save_if_due(self) -> None:
        """Save after every n-th step. The events name a checkpoint that must be found from now on."""
        options, step = self.options, self.engine.global_steps
        if step % options.save_every:
            return
        background = options.background == "always"
        if options.background == "alternate":
            background = step // options.save_every % 2 == 1
        self.engine.wait_for_checkpoint()
        if self._saved_last > 0:
            self.note(event="published", step=self._saved_last)
        self.engine.save_checkpoint(
            options.save_dir,
            tag="last" if options.one_tag else None,
            client_state={"step": step},
            background=background,
        )
        self._saved_last = step
        if not background:
            self.note(event="published", step=step)

    def digest(self) -> str:
        """Return a checksum of the weights and states that this rank holds."""
        found = xxhash.xxh3_64()
        for parameter in self.engine.module.parameters():
            for part in (
                onefold.utils.safe_get_local_fp32_param(parameter),
                onefold.utils.safe_get_local_optimizer_state(parameter, "exp_avg"),
                onefold.utils.safe_get_local_optimizer_state(parameter, "exp_avg_sq"),
            ):
                if part is not None:
                    found.update(part.contiguous().cpu().numpy().tobytes())
        return found.hexdigest()

    def run(self) -> None:
        """Train to the step that the file `last_step` names, save there, and raise where a file `raise.RANK` appears.

        A foreground save that fails leaves the older checkpoint, and the job continues.
        """
        folder, options = Path(self.options.folder), self.options
        last, raises = folder / "last_step", folder / f"raise.{self.engine.global_rank}"
        while not last.exists() or self.engine.global_steps < int(last.read_text()):
            began = time.monotonic()
            self.step()
            if raises.exists():
                raises.unlink()
                raise RuntimeError(f"the soak lets rank {self.engine.global_rank} fail")
            try:
                self.save_if_due()
            except SaveError as error:
                self.note(event="save failed", step=self.engine.global_steps, error=str(error))
            time.sleep(max(0.0, options.step_seconds - (time.monotonic() - began)))
        self.engine.wait_for_checkpoint()
        self.engine.save_checkpoint(options.save_dir)
        self.note(event="finished", step=self.engine.global_steps, digest=self.digest())


def _write_manifests_in_place() -> None:
    """Write manifests slowly under their own names: a sabotage that a kill shows."""
    from onefold.checkpoint.format import folder

    def write_in_place(path: Path, data: bytes) -> None:
        with open(path, "wb", buffering=0) as file:
            for start in range(0, len(data), len(data) // 4 + 1):
                file.write(data[start : start + len(data) // 4 + 1])
                time.sleep(0.03)

    folder.replace_file = write_in_place


def main() -> None:
    torch.set_num_threads(1)
    options = JobOptions.from_json(sys.argv[1])
    onefold.init_distributed()
    job = SoakJob(options)
    job.resume()
    job.run()
    job.engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
