"""Every page is on the site and in its navigation, and the reference describes every public name."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))  # the extensions of the site are not installed

from page_tree import INDEX, linked_pages, page_tree, report_pages, site_pages

import onefold
import onefold.fsdp
import onefold.zero

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages_below(folder: Path) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in folder.rglob("*.md")}


def test_every_page_is_in_the_navigation():
    listed = [page for pages in page_tree().values() for page in pages]
    assert len(listed) == len(set(listed)), "a page is listed twice"
    assert pages_below(DOCS) - {INDEX} <= set(listed)
    assert all((ROOT / page).is_file() for page in listed), listed
    assert pages_below(ROOT / "benchmarks/reports") <= {*report_pages(), *listed}
    assert set(site_pages()) == {"README.md", INDEX, *listed, *report_pages()}


def test_the_parts_of_the_site_are_in_order():
    parts = ["Get started", "Tutorials", "How-to guides", "Concepts", "Reference", "Development"]
    assert list(page_tree()) == parts
    assert page_tree()["Get started"][0] == "docs/get-started.md"


def test_links_are_read_from_their_page():
    text = "[a](b.md) [c](../d/e.md#f) [g](h.md#i) [b](b.md) [j](k.py) [l](https://m.org/n.md)"
    assert linked_pages("docs/x/y.md", text) == ["docs/x/b.md"]


NAMED = re.compile(r"^\.\. auto(\w+):: (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda page: page.name)
def test_the_names_of_the_reference_exist(page):
    for kind, name in NAMED.findall(page.read_text()):
        if kind == "module":
            importlib.import_module(name)
            continue
        module, _, member = name.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), member)), name


def described() -> str:
    return "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))


PUBLIC = [
    *(f"onefold.{name}" for name in onefold.__all__),
    *(f"onefold.zero.{name}" for name in onefold.zero.__all__),
    *(f"onefold.fsdp.{name}" for name in onefold.fsdp.__all__),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_describes(name):
    assert re.search(rf"^\.\. auto\w+:: {re.escape(name)}$", described(), re.MULTILINE)


def test_the_example_of_the_planner_runs(capsys):
    (example,) = re.findall(r"```python forecast.py\n(.*?)```", (DOCS / "reference/planner.md").read_text(), re.DOTALL)
    exec(compile(example, "docs/reference/planner.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "stage 0 108.3 GB False" in lines
    assert "stage 3 16.5 GB True" in lines
