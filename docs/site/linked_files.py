"""An extension of Sphinx: links from pages to files and folders of the repository that are no pages.

Text files, such as examples, become highlighted pages, and folders become lists of such pages, so that the site can be
read without the repository and without a network. HTML files are copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

FOLDER = "files"


class LinkFiles(SphinxTransform):
    """Point links to files and folders of the repository to their pages."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the nodes that MyST makes for links to anything but pages."""
        for node in list(self.document.findall(lambda node: isinstance(node, nodes.Element))):
            is_link = isinstance(node, addnodes.download_reference) or (
                isinstance(node, addnodes.pending_xref) and node.get("reftype") == "myst" and not node.get("refdomain")
            )
            path = self._path(node["reftarget"]) if is_link else None
            if path is None:
                continue
            readme = f"{path}/README"
            if readme in self.env.found_docs:
                node.replace_self(self._link(readme, node))
                continue
            linked_files(self.env).setdefault(self.env.docname, set()).add(path)
            node.replace_self(self._link(page_of(path), node))

    def _path(self, target: str) -> str | None:
        """Return the path of a link from the root of the repository, or None if it leads nowhere."""
        _, absolute = self.env.relfn2path(target, self.env.docname)
        found = Path(absolute)
        if not found.exists() or not found.is_relative_to(self.env.srcdir):
            return None
        return found.relative_to(self.env.srcdir).as_posix()

    def _link(self, page: str, node: nodes.Element) -> nodes.reference:
        target = page if page.endswith(".html") else f"{page}.html"
        uri = relative_uri(f"{self.env.docname}.html", target)
        return nodes.reference("", "", *node.children, refuri=uri, internal=True)


def linked_files(env: Any) -> dict[str, set[str]]:
    """Return the files and folders that each page links to."""
    if not hasattr(env, "onefold_linked_files"):
        env.onefold_linked_files = {}
    found: dict[str, set[str]] = env.onefold_linked_files
    return found


def page_of(path: str) -> str:
    """Return the page that shows a file or folder."""
    return f"{FOLDER}/{path}"


def _forget(app: Sphinx, env: Any, docname: str) -> None:
    linked_files(env).pop(docname, None)


def _merge(app: Sphinx, env: Any, docnames: Any, other: Any) -> None:
    linked_files(env).update(linked_files(other))


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    root = Path(app.srcdir)
    wanted = sorted(set().union(*linked_files(app.env).values()))
    for path in wanted:
        if (root / path).is_dir():
            wanted += sorted(file.relative_to(root).as_posix() for file in (root / path).iterdir() if file.is_file())
    for path in dict.fromkeys(wanted):
        if path.endswith(".html"):
            copied = Path(app.outdir, page_of(path))
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, copied)
            continue
        body = _listing(root / path) if (root / path).is_dir() else _highlighted(root / path)
        yield page_of(path), {"title": path, "body": f"<h1>{escape(path)}</h1>{body}"}, "page.html"


def _listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    rows = "".join(f'<li><a href="{folder.name}/{escape(name)}.html">{escape(name)}</a></li>' for name in names)
    return f"<ul>{rows}</ul>"


def _highlighted(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(path.read_text(), lexer, HtmlFormatter(wrapcode=True))


def _copy_index(app: Sphinx, error: Exception | None) -> None:
    """Copy the start page to index.html, which web servers and people open first."""
    start = Path(app.outdir, f"{app.config.root_doc}.html")
    if error is None and start.exists():
        shutil.copyfile(start, start.with_name("index.html"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform and the pages."""
    app.add_transform(LinkFiles)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("html-collect-pages", _pages)
    app.connect("build-finished", _copy_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
