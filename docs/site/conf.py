"""Settings of Sphinx for the documentation site: `make site`.

The source folder is the root of the repository, so that links between pages in docs/, examples/ and benchmarks/reports
are the same on the site and in the repository.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from page_tree import ROOT_PAGE, site_pages

from onefold import __version__

project = "onefold"
version = release = __version__
html_title = f"onefold {version}"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "page_tree",
    "linked_files",
    "command_help",
]

root_doc = ROOT_PAGE.removesuffix(".md")
include_patterns = site_pages()

# Anchors of headings as on GitHub.
myst_heading_anchors = 4

highlight_language = "none"
smartquotes = False  # they would turn -- of options into a dash
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
default_role = "py:obj"  # `name` in a docstring: a link if the reference describes the name, else code

# References to unknown names of this package in pages are errors. Type hints may name classes of other packages and
# classes that the reference does not describe, and `code` in a docstring need not be a name.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj|exc|data|meth|func|attr)", ".*")]


def _hide_constructors(app, what, name, obj, options, signature, return_annotation):
    """Leave out the signatures of classes that the user does not construct."""
    return ("", None) if name in ("onefold.Engine", "onefold.optim.sharded.ShardedOptimizer") else None


def setup(app) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-process-signature", _hide_constructors)


# Fragments of JSON, such as one section of a config, are not JSON.
suppress_warnings = ["misc.highlighting_failure"]
