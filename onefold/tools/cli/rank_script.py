"""The program of a rank: `python -m onefold.tools.cli.rank_script [--module | --program] SCRIPT ...`.

It runs SCRIPT as Python would, except that the traceback of an uncaught exception is written to the file that the agent
reads, not to the terminal, and that the rank is killed when its launcher dies. torch is not imported, because a script
may set variables that torch reads at import.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from onefold.redaction import redact

# The start of the command of a rank that runs another program, and of one that is an interpreter.
PROGRAM_RANK = (sys.executable, "-m", "onefold.tools.cli.rank_script")
PYTHON_RANK = (sys.executable, "-u", "-m", "onefold.tools.cli.rank_script")
# The variable with the process id of the launcher.
LAUNCHER_VARIABLE = "ONEFOLD_LAUNCHER"
_PR_SET_PDEATHSIG = 1
OWN_FILES = (__file__, str(Path(__file__).with_name("fork_server.py")), "<frozen runpy>", runpy.__file__)


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback without the frames of this file to torch's error file. This is an excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher was interrupted too, and reports it once
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    text = redact("".join(traceback.format_exception(kind, error, trace)))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        sys.stderr.write(text)
        return
    now = time.time()
    # torch stores whole seconds, but ranks fail within milliseconds of each other.
    extra = {"py_callstack": text, "timestamp": str(int(now)), "exact_timestamp": now}
    # Rename a complete file, because the agent may end this rank at any time.
    part = f"{error_file}.part"
    with open(part, "w") as file:
        json.dump({"message": {"message": redact(f"{kind.__name__}: {error}"), "extraInfo": extra}}, file)
    os.replace(part, error_file)


def die_with_launcher() -> None:
    """Let the kernel kill this process when the launcher that started it dies, by SIGKILL as well."""
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def run_script(arguments: list[str]) -> None:
    """Run a script, or after `--module` a module, or after `--program` a program, with the rest as its arguments."""
    die_with_launcher()
    sys.excepthook = record_exception
    for stream in (sys.stdout, sys.stderr):  # `python -u` writes parts of lines, which the terminal mixes with others'
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if arguments[0] == "--program":
        os.execvp(arguments[1], arguments[1:])
    if arguments[0] == "--local_rank":
        arguments = arguments[1:]
        arguments.insert(1 + (arguments[0] == "--module"), f"--local_rank={os.environ['LOCAL_RANK']}")
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        # As with `python SCRIPT`, imports are resolved next to the script, not in the current folder.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
