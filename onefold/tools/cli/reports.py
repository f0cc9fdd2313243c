"""Run `onefold report`."""

from __future__ import annotations

import argparse

from onefold.report.run_file import RunFile
from onefold.tools.cli.terminal import fails_on
from onefold.tools.pages.page import write_page
from onefold.tools.pages.plots import write_pngs


@fails_on(OSError)
def report(options: argparse.Namespace) -> int:
    """Run `onefold report`."""
    page = write_page(options.dir, options.out)
    print(f"report: {page}")
    if options.png:
        for path in write_pngs(RunFile.read(options.dir), page.parent):
            print(f"plot: {path}")
    return 0
