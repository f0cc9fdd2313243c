"""The README tells the truth: its example runs and its files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
(TREE,) = re.findall(r"```\nonefold/\n(.*?)```", DESIGN, re.DOTALL)


def test_the_example_runs_and_learns(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    script = tmp_path / "example.py"
    script.write_text(f"{example}\n    if step == 0:\n        first = loss.item()\nassert loss.item() < 0.9 * first\n")
    command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_the_files_of_the_map_exist():
    for line in TREE.splitlines():
        folder = ROOT / "onefold" if line.startswith(" ") else ROOT
        paths = [word for word in line.split("   ")[0].split() if "/" in word or word.endswith(".py")]
        assert not line.strip() or paths, line
        for path in paths:
            assert (folder / path).exists(), line


def test_every_file_is_on_the_map():
    named = set(TREE.split())
    for path in (ROOT / "onefold").rglob("*.py"):
        place = path.relative_to(ROOT / "onefold")
        folders = {f"{parent}/" for parent in place.parents}
        assert str(place) in named or folders & named or path.name == "__init__.py", place


def test_the_functions_of_a_units_life_exist():
    """Every `Class.method` and `file: function` of the table in docs/design.md."""
    (table,) = re.findall(r"## A unit's lifecycle\n(.*?)\n## ", DESIGN, re.DOTALL)
    package = "\n".join(path.read_text() for path in (ROOT / "onefold").rglob("*.py"))
    where = "\n".join(line.split("|")[-2] for line in table.splitlines() if line.startswith("|"))
    names = re.findall(r"`(?:([a-z_/]+\.py)(?:: )?)?([A-Za-z_.]*)`", where)
    assert len(names) > 30
    for file, name in names:
        text = (ROOT / "onefold" / file).read_text() if file else package
        owner, _, function = name.rpartition(".")
        assert not owner or f"class {owner}" in text, name
        known = (f"def {function}(", f"class {function}")
        assert not function or any(form in text for form in known), name


def test_the_documents_it_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_format_is_as_documented(tmp_path):
    """The reader in docs/checkpoints.md, which knows nothing of onefold, reads what onefold wrote."""
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (reader,) = re.findall(r"```python reader\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "save.py"
    script.write_text(
        "import sys, torch, onefold\n"
        "model = torch.nn.Linear(1100, 1000)\n"
        'config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "log_level": "error"}\n'
        "engine = onefold.initialize(model=model, config=config)[0]\n"
        "engine.save_checkpoint(sys.argv[1], tag='t')\n"
        "torch.save(model.state_dict(), sys.argv[1] + '/plain.pt')\n"
    )
    subprocess.run([sys.executable, str(script), str(tmp_path / "out")], check=True, timeout=120)
    found: dict = {}
    exec(reader, found)
    plain = torch.load(tmp_path / "out" / "plain.pt", weights_only=True)
    for name, tensor in plain.items():
        assert (found["read"](tmp_path / "out" / "t", f"model/{name}") == tensor.numpy()).all(), name
