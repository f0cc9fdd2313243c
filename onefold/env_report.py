"""Show what this machine has: `python -m onefold.env_report` is `onefold env`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from onefold.tools.env_report import main

    sys.exit(main())
