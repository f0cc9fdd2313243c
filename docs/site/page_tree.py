"""The pages of the site and their order: an extension of Sphinx that makes its tree from the tables of docs/README.md.

docs/README.md is the index of the documentation on the site and in the repository. Each of its headings is a part of
the site's navigation, and the pages that the section links to are its entries. So a page is listed in one place only.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).parents[2]
ROOT_PAGE = "README.md"
INDEX = "docs/README.md"
REPORTS = "benchmarks/reports/README.md"
_LINK = re.compile(r"\]\(([^)\s#]+\.md)\)")


def linked_pages(page: str, text: str) -> list[str]:
    """Return the pages that the text of `page` links to, as paths from the root of the repository."""
    found = (normpath(PurePosixPath(page).parent / target) for target in _LINK.findall(text) if "://" not in target)
    return list(dict.fromkeys(found))


def page_tree() -> dict[str, list[str]]:
    """Return the pages of each part of the site, by heading of docs/README.md."""
    parts = re.split(r"^## (.+)$", (ROOT / INDEX).read_text(), flags=re.MULTILINE)
    return {head: linked_pages(INDEX, text) for head, text in zip(parts[1::2], parts[2::2], strict=True)}


def report_pages() -> list[str]:
    """Return the dated reports of benchmarks, newest first."""
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / REPORTS).parent.rglob("*.md"))
    return sorted(set(found) - {REPORTS}, key=lambda page: PurePosixPath(page).name, reverse=True)


def site_pages() -> list[str]:
    """Return all pages: those of the index, the reports, and all other pages in docs, which Sphinx reports."""
    listed = [page for pages in page_tree().values() for page in pages]
    in_docs = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return list(dict.fromkeys([ROOT_PAGE, INDEX, *listed, *in_docs, *report_pages()]))


def _toctree(pages: list[str], *options: str) -> str:
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""])


def _add_toctree(app: Any, docname: str, content: list[str]) -> None:
    if f"{docname}.md" == ROOT_PAGE:
        content[0] += _toctree([INDEX], ":hidden:")
        for head, pages in page_tree().items():
            content[0] += _toctree(pages, ":hidden:", f":caption: {head}")
    elif f"{docname}.md" == REPORTS:
        content[0] += _toctree(report_pages())


def setup(app: Any) -> dict[str, Any]:
    """Add the tables of contents when Sphinx reads a page."""
    app.connect("source-read", _add_toctree)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
