"""Can the tests fail? One bug at a time is put into a copy of the tree, and the tests that ought to see it are run.

    python tests/mutants.py                    all of `mutations.py`
    python tests/mutants.py --only 'mics-*'    some of them
    python tests/mutants.py --list             their names

A mutation is *caught* where a test fails that passes without it. It *survived* where all tests pass: write the test
that fails. It *does not apply* where the code has changed since: write it anew, or delete it. All but caught is a
failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent

CAUGHT, SURVIVED, STALE, UNCLEAR = "caught", "SURVIVED", "DOES NOT APPLY", "UNCLEAR"

# A test that hangs on a mutation has seen it too.
PATIENCE = 600.0


@dataclass(frozen=True)
class Outcome:
    verdict: str
    reason: str


def mutated(text: str, mutation: Mutation) -> str | None:
    """The text with the bug in it; None unless what it replaces is there once and the result is Python."""
    if text.count(mutation.old) != 1 or mutation.old == mutation.new:
        return None
    changed = text.replace(mutation.old, mutation.new)
    try:
        compile(changed, mutation.file, "exec")
    except SyntaxError:
        return None
    return changed


# pytest's exit status where no test was chosen.
NOTHING_SELECTED = 5


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the tree, without what was built in it: the tree itself is never touched."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    with tempfile.TemporaryDirectory(prefix="onefold-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=ignored)
        yield copy


def try_out(mutation: Mutation, tree: Path) -> Outcome:
    """Put the bug in, run its tests, take it out again."""
    path = tree / mutation.file
    text = path.read_text() if path.exists() else ""
    changed = mutated(text, mutation)
    if changed is None:
        return Outcome(STALE, f"{mutation.file} holds what it replaces {text.count(mutation.old)} times")
    # What the last one left there would be taken for this one's failures.
    shutil.rmtree(tree / ".pytest_cache", ignore_errors=True)
    try:
        path.write_text(changed)
        passed = False
        for tier in ("not slow", "slow"):  # further cases of the same tests, where the quick ones pass
            status, said = _run_tests(mutation, tree, tier)
            passed |= status == 0
            if status not in (0, NOTHING_SELECTED):
                break
    finally:
        path.write_text(text)
    if passed and status in (0, NOTHING_SELECTED):
        return Outcome(SURVIVED, f"{mutation.tests} passes")
    if status is None:
        return Outcome(CAUGHT, f"the tests did not end within {PATIENCE:.0f} s")
    if status not in (1, 2):  # nothing was run: no such file, nothing selected
        return Outcome(UNCLEAR, f"pytest ended with {status}: {_last(said)}")
    without, again = _run_tests(mutation, tree, tier, "--last-failed", "--last-failed-no-failures", "none")
    if without != 0:
        return Outcome(UNCLEAR, f"the test that failed fails without the mutation too: {_failure(again)}")
    return Outcome(CAUGHT, _failure(said))


def _run_tests(mutation: Mutation, tree: Path, tier: str, *more: str) -> tuple[int | None, str]:
    """pytest's exit status and what it said; no status where it did not end."""
    words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(mutation.tests)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", f"not gpu and {tier}", *words, *more]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks that still wait for each other
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return status, said.read()


def _failure(said: str) -> str:
    """The test that failed, in pytest's own summary."""
    found = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return found[0][:160] if found else _last(said)


def _last(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


def main(arguments: Sequence[str] | None = None, mutations: Sequence[Mutation] = MUTATIONS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a name, or a pattern of names; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="names, files and tests, without running anything")
    asked = parser.parse_args(arguments)
    chosen = [one for one in mutations if not asked.only or any(fnmatchcase(one.name, name) for name in asked.only)]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(asked.only or [])}: --list names all")
    width = max(len(mutation.name) for mutation in chosen)
    if asked.list:
        for mutation in chosen:
            print(f"{mutation.name:<{width}}  {mutation.file:<32}  {mutation.tests}")
        return 0
    outcomes = {}
    with copied(root) as tree:
        for number, mutation in enumerate(chosen, 1):
            print(f"[{number:>2}/{len(chosen)}] {mutation.name:<{width}}  ", end="", flush=True)
            start = time.monotonic()
            outcomes[mutation] = outcome = try_out(mutation, tree)
            print(f"{outcome.verdict:<8} {time.monotonic() - start:>4.0f} s  {outcome.reason}", flush=True)
    left = {mutation.name: outcome for mutation, outcome in outcomes.items() if outcome.verdict != CAUGHT}
    print(f"\n{len(chosen) - len(left)} of {len(chosen)} caught")
    for name, outcome in left.items():
        print(f"  {name}: {outcome.verdict}. {outcome.reason}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
