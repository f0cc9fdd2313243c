"""The forecasts in the page about long sequences are those of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onefold.tools.estimate.forecast import forecast
from onefold.tools.estimate.machines import GB, find_machine
from onefold.tools.estimate.models import from_transformers
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, settings_for
from onefold.tools.estimate.shapes import transformers_config

PAGE = Path(__file__).parents[2] / "docs/long-sequences.md"
SECTIONS = {"tiled_loss": "onefold", "tiled_mlp": "onefold", "cpu_checkpointing": "activation_checkpointing"}


def rows() -> list[list[str]]:
    """The cells of the table of keys."""
    (table,) = re.findall(r"^\| keys \|.*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:] if line]


@pytest.mark.slow
def test_the_table_of_keys_is_what_the_plan_forecasts():
    pytest.importorskip("transformers")
    shape = {**transformers_config("Llama 7B"), "max_position_embeddings": 131_072}
    machine = find_machine("8xH100")
    question = Question(from_transformers("llama-7b", shape, recompute=True), machine, DEFAULT_CONFIG, 1, 65_536)
    (setting,) = (each for each in settings_for(machine) if each.name == "stage 3")
    assert [row[0] for row in rows()] == ["none", *SECTIONS]
    for key, *printed in rows():
        if key in SECTIONS:
            question = question.with_key(SECTIONS[key], key, True)
        (found,) = forecast(question, [setting], finds_batch=False)
        sizes = (found.device.total, found.device.activations, found.device.logits, found.host_node)
        assert printed == [*(f"{size / GB:.1f}" for size in sizes), f"{found.step:.2f}"], key
