"""Run the first tier in two processes of pytest, side by side: `make test`.

Half of the folders need one core (commands, forecasts, configs, documents), the others start ranks. One after the other
they leave a machine of two cores a third idle. Arguments go to both processes; with a path among them there is one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ON_ONE_CORE = ("bench", "cli", "config", "docs", "estimate", "pages", "plan", "project", "report", "train")
FIRST_TIER = ("-q", "-m", "not gpu and not slow")
NOTHING_CHOSEN = 5


def folders() -> tuple[list[str], list[str]]:
    """Return the test folders that start ranks, and those that need one core."""
    found = sorted(path.name for path in FOLDER.iterdir() if any(path.glob("test_*.py")))
    of = {name: str(FOLDER / name) for name in found}
    return [of[name] for name in found if name not in ON_ONE_CORE], [of[name] for name in found if name in ON_ONE_CORE]


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *FIRST_TIER, *arguments]
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.call(pytest)
    on_ranks, on_one_core = folders()
    with tempfile.TemporaryFile("w+") as output:
        other = subprocess.Popen([*pytest, "-p", "no:cacheprovider", *on_one_core], stdout=output, stderr=output)
        try:
            codes = [subprocess.call([*pytest, *on_ranks]), other.wait()]
        finally:
            other.kill()
        output.seek(0)
        print(f"\nIn the second process ({', '.join(ON_ONE_CORE)}):\n{output.read()}", flush=True)
    if codes == [NOTHING_CHOSEN, NOTHING_CHOSEN]:
        return NOTHING_CHOSEN
    return next((code for code in codes if code not in (0, NOTHING_CHOSEN)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
