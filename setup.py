"""Fill in the metadata of a release that depend on its repository: its URLs, and the links of the README.

The page of a package index has no files next to it. Links to files of the repository become absolute if the repository
is known (`ONEFOLD_REPOSITORY`, or the variables of GitHub Actions), and plain text otherwise.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]*)\)")


def repository() -> str:
    """Return the URL of the repository, or "" if it is not known."""
    name = os.environ.get("GITHUB_REPOSITORY")
    default = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""
    return os.environ.get("ONEFOLD_REPOSITORY", default)


def description(text: str, url: str, version: str) -> str:
    """Return the README with links that do not depend on the place where it is shown."""

    def replace(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/v{version}/{target})" if url else words

    return LINK.sub(replace, text)


url = repository()
(version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "onefold/version.py").read_text())
pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}
setup(
    long_description=description((ROOT / "README.md").read_text(), url, version),
    long_description_content_type="text/markdown",
    project_urls={
        **({"Repository": url, "Issues": f"{url}/issues"} if url else {}),
        **({name: f"{url}/blob/v{version}/{page}" for name, page in pages.items()} if url else {}),
    },
)
