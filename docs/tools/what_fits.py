"""Write docs/what-fits.html, a page for trying shapes, machines and settings. `make docs` runs this script.

The template `what_fits.html` has the page and its script, `planned_states.py` the model states of each setting by
onefold's plan, `formulas.py` the rest of the arithmetic. This file defines the controls, their values, and the formula
behind each row of a table.
"""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from itertools import product
from pathlib import Path
from typing import Any

import formulas
from case import PerElement
from planned_states import SETTING, planned_states
from to_javascript import translate_module

from onefold.plan import Placement
from onefold.plan.plan import TABLE
from onefold.tools.estimate.machines import GB, GPUS, find_machine
from onefold.tools.estimate.question import DEFAULT_CONFIG, settings_for
from onefold.tools.estimate.shapes import SHAPES

DEFAULTS: dict[str, Any] = {
    **SHAPES["Llama 7B"],
    **{"gpus": 8, "nodes": 1, "gpu_memory": 80, "host_memory": 2048, "nvme": 8000},
    **{"stage": 2, "offload_optimizer": "none", "offload_param": "none", "precision": "bf16"},
    **{"state_dtype": "fp32", "master_dtype": "fp32"},
    **{"micro_batch": 1, "sequence_length": 4096, "sequence_parallel": 1, "accumulation": 1},
    **{"recompute": True, "host_checkpoints": False, "tiled_loss": False},
}
"""Values of the controls: a `Case` with a stage and a precision by name, and memory in GB."""

STOPS: dict[str, list[int]] = {
    "layers": [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 160],
    "hidden": [256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384],
    "heads": [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128],
    "kv_heads": [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128],
    "ffn": [512, 1024, 2048, 3072, 4096, 5632, 8192, 11008, 13824, 14336, 16384, 20480, 28672, 40960, 53248, 65536],
    "vocabulary": [256, 8192, 16000, 32000, 50257, 64000, 100352, 128256, 152064, 200064, 262144],
    "gpus": [1, 2, 4, 8, 16],
    "nodes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
    "gpu_memory": sorted({gpu.memory // GB for gpu in GPUS.values()}),
    "host_memory": [32, 64, 128, 256, 512, 1024, 2048, 4096],
    "nvme": [0, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000],
    "micro_batch": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256],
    "sequence_length": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
    "accumulation": [1, 2, 4, 8, 16, 32, 64, 128, 256],
}
"""The stops of each slider; its number field takes any value between the first and the last."""

CHOICES: dict[str, list[Any]] = {
    "stage": list(TABLE),
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_param": ["none", "cpu", "nvme"],
    "sequence_parallel": [1, 2, 4, 8],
    "precision": ["bf16", "fp8", "fp32"],
    "state_dtype": ["fp32", "int8"],
    "master_dtype": ["fp32", "bf16_int16", "bf16_int8"],
}

GPU_KINDS = {
    "parameters": "stored_parameters",
    "gathered": "gathered",
    "gradients": "gradients",
    "masters": "masters",
    "moments": "moments",
    "activations": "activations",
    "logits": "logits",
    "overhead": "overhead",
}
HOST_KINDS = {
    "parameters": "host_parameters",
    "gradients": "host_gradients",
    "masters and moments": "host_states",
    "activations": "host_activations",
    "processes": "host_processes",
}
NVME_KINDS = {"parameters": "nvme_parameters", "masters and moments": "nvme_states"}


def machines() -> dict[str, dict[str, int]]:
    """Return the values of the controls for each machine: eight server GPUs, or one desktop GPU."""
    found = {}
    for name in GPUS:
        machine = find_machine(f"8x{name}" if find_machine(name).is_server else name)
        label = f"{machine.gpus} x {name}, {machine.gpu.memory // GB} GB"
        memory = {"gpu_memory": machine.gpu.memory, "host_memory": machine.host_memory, "nvme": machine.nvme}
        found[label] = {"gpus": machine.gpus, "nodes": 1, **{name: value // GB for name, value in memory.items()}}
    return found


def settings() -> dict[str, dict[str, Any]]:
    """Return the values of the controls for each setting of `onefold plan`, in its order."""
    found = {}
    for setting in settings_for(find_machine("8xH100")):
        offload = {name: setting.zero.get(name, {"device": "none"})["device"] for name in _OFFLOADS}
        found[setting.name] = {"stage": setting.zero["stage"], **offload}
    return found


_OFFLOADS = ("offload_optimizer", "offload_param")


def planned_table() -> dict[str, Any]:
    """Return the planned model states of all settings. Equal rows are stored once.

    `places` has the row of each setting, in the order of the choices: the last of `SETTING` varies fastest, then
    whether a step accumulates, then whether there are several GPUs.
    """
    found = [
        planned_states({**dict(zip(SETTING, setting, strict=False)), "accumulation": steps, "gpus": gpus, "nodes": 1})
        for *setting, steps, gpus in product(*(CHOICES[name] for name in SETTING), (1, 2), (1, 2))
    ]
    rows = [
        tuple(astuple(value) if isinstance(value, PerElement) else value for value in row.values()) for row in found
    ]
    unique = list(dict.fromkeys(rows))
    return {
        "setting": SETTING,
        "columns": list(found[0]),
        "fields": [field.name for field in fields(PerElement)],
        "rows": unique,
        "places": [unique.index(row) for row in rows],
    }


def page() -> str:
    """Return docs/what-fits.html."""
    stages = {stage: [placement is Placement.SHARDED for placement in row] for stage, row in TABLE.items()}
    facts = {
        "shapes": SHAPES,
        "defaults": DEFAULTS,
        "stops": STOPS,
        "choices": CHOICES,
        "planned": planned_table(),
        "stages": stages,
        "machines": machines(),
        "settings": settings(),
        "config": DEFAULT_CONFIG,
        "kinds": {"gpu": GPU_KINDS, "host": HOST_KINDS, "nvme": NVME_KINDS},
    }
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = template.replace("@@facts@@", json.dumps(facts, separators=(",", ":")))
    return text.replace("@@formulas@@", translate_module(formulas))


if __name__ == "__main__":
    print(page(), end="")
