"""The README tells the truth: its example runs and its files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    script = tmp_path / "example.py"
    script.write_text(f"{example}\n    if step == 0:\n        first = loss.item()\nassert loss.item() < 0.9 * first\n")
    command = [sys.executable, "-m", "onefold.cli.main", "launch", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_files_it_names_exist():
    (tree,) = re.findall(r"## The house\n\n```\n(.*?)```", TEXT, re.DOTALL)
    for line in tree.splitlines():
        path = line.split()[0]
        folder = ROOT / "onefold" if line.startswith(" ") else ROOT
        assert (folder / path).exists(), line


def test_every_file_of_the_core_is_named():
    for path in (ROOT / "onefold").rglob("*.py"):
        parts = path.relative_to(ROOT / "onefold").parts
        if path.name != "__init__.py" or len(parts) == 1:
            assert parts[-1] in TEXT or f"{parts[0]}/ " in TEXT, path


def test_the_documents_it_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
