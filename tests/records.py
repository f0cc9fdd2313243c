"""Records of runs that never were, for tests of whatever reads them: made by what engines write them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onefold.report.run_file import MemoryRow, StepRow, line_of, write_line

KB = 1000
HELD = {"device": {"parameters": 2 * KB, "gradients": 4 * KB, "masters": 4 * KB, "states": 8 * KB}}
REPORT = {
    "planned": HELD,
    "held": {"device": {**HELD["device"], "states": 9 * KB}},
    "buffers": {"pools": 0, "unit_in_use": 300},
    "crossing": {"down": 0, "up": 0, "read": 0, "written": 0},
    "peaks": {"host": 123_456_789},
    "traffic": [{"operation": "gather", "group": "data", "calls": 6, "bytes": 3_000_000}],
    "num_steps": 3,
}


def facts(**more: Any) -> str:
    return write_line(
        "run",
        **{
            "time": 1_700_000_000.0,
            "model": {"class": "Net", "parameters_trained": 1234, "parameters_frozen": 5, "units": {"a": 1234}},
            "plan": "1,234 trained parameters\nparameters  sharded",
            "stage": 2,
            "optimizer": "AdamW",
            "config": {"train_batch_size": 8},
            "world_size": 2,
            "nodes": [2],
            "batch": {"train": 8, "micro": 2, "accumulation": 2, "world": 2},
            "device": "CPU",
            "versions": {"onefold": "0.1.0"},
            "planned": HELD,
            "planned_buffers": {"pools": 0, "unit_in_use": 300},
            "planned_crossing": {"down": 0, "up": 0, "read": 0, "written": 0},
            "traffic": [],
            "waits_for_device": False,
            **more,
        },
    )


def row(step: int, loss: float | None = 1.0, **more: Any) -> StepRow:
    given = {
        "step": step,
        "samples": 8 * step,
        "batch_samples": 8,
        "time": 1_700_000_000.0 + step,
        "seconds": 1.0,
        "loss": loss,
        "learning_rates": (0.001, 0.002),
        "grad_norm": 0.5,
        "loss_scale": None,
        "skipped": False,
        "phases": {"forward": 0.25, "backward": 0.5, "step": 0.125, "outside": 0.125},
        "memory": MemoryRow(HELD, rest=70 * KB, host_resident=88 * KB, host_peak=99 * KB),
        "traffic": (),
        **more,
    }
    return StepRow(**given)


def end(**more: Any) -> str:
    return write_line("end", **{"time": 1_700_000_099.0, "reason": "closed", "error": None, "report": REPORT, **more})


def write_run(folder: Path, *lines: str | StepRow) -> Path:
    """`run.jsonl` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.jsonl"
    path.write_text("".join(line if isinstance(line, str) else line_of(line) for line in lines))
    return path
