"""Run the first tier in two processes of pytest, side by side: `make test`.

Tests that need one core, and waits between ranks, leave a machine of two cores a third idle in one process. The folders
are divided so that both processes take about the same time. Arguments go to both processes; with a path among them
there is one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SECOND = (
    "bench",
    "cli",
    "compat",
    "config",
    "docs",
    "engine",
    "estimate",
    "fsdp",
    "optim",
    "pages",
    "plan",
    "project",
    "report",
    "security",
    "train",
)
FIRST_TIER = ("-q", "-m", "not gpu and not slow")
NOTHING_CHOSEN = 5


def folders() -> tuple[list[str], list[str]]:
    """Return the test folders of the first and of the second process."""
    found = sorted(path.name for path in FOLDER.iterdir() if any(path.glob("test_*.py")))
    of = {name: str(FOLDER / name) for name in found}
    return [of[name] for name in found if name not in SECOND], [of[name] for name in found if name in SECOND]


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *FIRST_TIER, *arguments]
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.call(pytest)
    first, second = folders()
    with tempfile.TemporaryFile("w+") as output:
        other = subprocess.Popen([*pytest, "-p", "no:cacheprovider", *second], stdout=output, stderr=output)
        try:
            codes = [subprocess.call([*pytest, *first]), other.wait()]
        finally:
            other.kill()
        output.seek(0)
        print(f"\nIn the second process ({', '.join(SECOND)}):\n{output.read()}", flush=True)
    if codes == [NOTHING_CHOSEN, NOTHING_CHOSEN]:
        return NOTHING_CHOSEN
    return next((code for code in codes if code not in (0, NOTHING_CHOSEN)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
