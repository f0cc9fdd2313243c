"""The launcher of one node, started by `onefold launch --ssh` on another: `python -m onefold.tools.cli.remote_node`.

It reads its job from the first line of stdin (`ssh_launch.py`), then signals from further lines. At the end of stdin it
stops its ranks. The ranks have an empty stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

from onefold import __version__
from onefold.stop_signals import FORWARDED
from onefold.tools.cli.rank_processes import EXIT_USAGE, print_error
from onefold.tools.cli.ranks import Job, run_ranks

_MAX_BYTES = 1 << 24


def main() -> int:
    """Run the ranks of this node, and return the exit code of its launcher."""
    control = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    line = control.readline(_MAX_BYTES)
    try:
        order: dict[str, Any] = json.loads(line)
        if order["version"] != __version__:
            raise ValueError(f"it is of onefold {order['version']}, but this node has {__version__}. Install the same")
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        job = Job(**order["job"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        print_error(f"onefold: node {os.uname().nodename} cannot read the job from stdin: {error}")
        return EXIT_USAGE
    threading.Thread(target=_obey, args=(control,), name="onefold-control", daemon=True).start()
    return run_ranks(order["command"], job)


def _obey(control: BinaryIO) -> None:
    """Send the signals that arrive as lines to this process, and SIGTERM when the connection ends."""
    for line in control:
        word, _, number = line.decode("ascii", "replace").strip().partition(" ")
        if word == "signal" and number in {str(int(known)) for known in FORWARDED}:
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
