"""Run small programs that each end in their own way, for one start of an interpreter.

Importing torch takes seconds. Here one process imports it together with onefold and forks for each program; the fork
runs it to the end of the interpreter, so that exit handlers, exceptions and signals do what they do in a real program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FORKS = """
import json, os, sys
import torch, onefold, onefold.engine
torch.set_num_threads(1)
programs, folder = json.load(sys.stdin), sys.argv[1]
ended = {}
for number, (name, (code, arguments)) in enumerate(programs.items()):
    child = os.fork()
    if child == 0:
        break
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(ended))
    sys.exit()
for stream, kind in ((1, "out"), (2, "err")):
    os.dup2(os.open(os.path.join(folder, f"{number}.{kind}"), os.O_WRONLY | os.O_CREAT), stream)
sys.argv = ["program", *arguments]
exec(compile(code, "program", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_programs(programs: Mapping[str, tuple[str, str]], timeout: float = 120) -> dict[str, Ended]:
    """Run programs one after the other, each with the one argument that stands beside its code; how each ended."""
    given = {name: (textwrap.dedent(code), [argument]) for name, (code, argument) in programs.items()}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, folder],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        codes: dict[str, int] = json.loads(done.stdout)
        said = [
            [Path(folder, f"{number}.{kind}").read_text() for kind in ("out", "err")] for number in range(len(given))
        ]
    return {name: Ended(codes[name], *texts) for name, texts in zip(given, said, strict=True)}
