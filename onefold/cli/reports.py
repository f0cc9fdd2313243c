"""What `onefold report` does."""

from __future__ import annotations

import argparse

from onefold.cli.terminal import fails_on
from onefold.report.page import write_page
from onefold.report.plots import write_pngs
from onefold.report.run_file import RunFile


@fails_on(OSError)
def report(options: argparse.Namespace) -> int:
    page = write_page(options.dir, options.out)
    print(f"report: {page}")
    if options.png:
        for path in write_pngs(RunFile.read(options.dir), page.parent):
            print(f"plot: {path}")
    return 0
