"""What the launcher starts as each rank: `python -m onefold.cli.rank [--module] SCRIPT ...`.

SCRIPT runs as under Python itself, with one difference: the traceback of an uncaught exception goes to the file in
which torch's elastic agent looks for it, not to the terminal. When one rank fails its peers fail too, on broken
connections; the launcher reads the files and shows the one that matters.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from types import TracebackType

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
OWN_FILES = (__file__, "<frozen runpy>", runpy.__file__)


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook: the traceback, without the frames of this file, in torch's error-file format."""
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher was interrupted too, and says so once
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if not error_file:
        sys.stderr.write(text)
        return
    now = time.time()
    record = {
        "message": {
            "message": f"{kind.__name__}: {error}",
            # torch reads whole seconds; ranks fail within milliseconds of each other, so the launcher needs the rest.
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "exact_timestamp": now},
        }
    }
    with open(error_file, "w") as file:
        json.dump(record, file)


def main(arguments: list[str]) -> None:
    """Run a script, or after `--module` a module, with the rest as its arguments."""
    sys.excepthook = record_exception
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        # As for `python SCRIPT`: imports are looked up beside the script, not in the folder it was started from.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
