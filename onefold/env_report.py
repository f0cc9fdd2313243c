"""Show what this machine has: `python -m onefold.env_report` is `onefold env`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `onefold env` with these arguments, by default those of the process."""
    from onefold.tools.cli.main import main

    return main(["env", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
