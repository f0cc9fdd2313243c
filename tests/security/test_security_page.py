"""docs/security.md names a test for each claim, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "security.md").read_text()
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 20
    for file, function in named:
        assert f"\ndef {function}(" in FILES[file].read_text(), f"{file}::{function}"


def test_every_row_of_a_table_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(rows) > 15
    assert [row for row in rows if "`test_" not in row] == []
