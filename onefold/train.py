"""Run one rank of the built-in trainer: `onefold launch --module onefold.train`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from onefold.tools.train.__main__ import main

    sys.exit(main())
