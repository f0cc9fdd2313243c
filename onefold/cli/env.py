"""`onefold env`: what this machine has and what onefold will use of it."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  onefold env            a table: versions, devices, interconnect, memory, disk
  onefold env --json     the same for programs, and for bug reports
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "env",
        help="show what this machine has",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from onefold.env_report import show

    show(as_json=options.json)
    return 0
