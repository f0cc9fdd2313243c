"""Can the tests fail? One bug at a time is put into a copy of the tree, and the tests that ought to see it are run.

    python tests/mutants.py                    all of `mutations.py`
    python tests/mutants.py --only 'mics-*'    some of them
    python tests/mutants.py --list             their names
    python tests/mutants.py --set tier --first-tier --jobs 5 --json outcomes.json
                                               those of `mutations_tier.py`, five at a time, in the first tier

A mutation is *caught* where a test fails that passes without it. It *survived* where all tests pass: write the test
that fails. It *does not apply* where the code has changed since: write it anew, or delete it. All but caught is a
failure. A test that fails without the mutation too is left out, and so is a file that cannot be imported, for want of
an optional package: neither says anything of a mutation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from mutations import MUTATIONS, Mutation
from mutations_tier import TIER_MUTATIONS

SETS = {"all": MUTATIONS, "tier": TIER_MUTATIONS}

ROOT = Path(__file__).parent.parent

CAUGHT, SURVIVED, STALE, UNCLEAR = "caught", "SURVIVED", "DOES NOT APPLY", "UNCLEAR"

# Seconds for one test file. A file that hangs with a mutation, and ends without it, has seen it.
PATIENCE = 600.0

TIERS = {"first": "not slow", "slow": "slow"}


@dataclass(frozen=True)
class Outcome:
    verdict: str
    reason: str
    test: str = ""
    """The test that failed."""
    tier: str = ""
    """The tier of that test."""


@dataclass
class Environment:
    """What all mutations of a run share. Several threads use it."""

    tiers: Sequence[str] = tuple(TIERS)
    single_threaded: bool = False
    not_imported: frozenset[str] = frozenset()
    """Test files that cannot be collected without any mutation."""
    broken: set[str] = field(default_factory=set)
    """Tests that fail without any mutation."""


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


# pytest's exit statuses where a test failed, and where none was chosen.
FAILED, NOTHING_SELECTED = 1, 5


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the tree, without what was built in it: the tree itself is never touched."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    with tempfile.TemporaryDirectory(prefix="onefold-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=ignored)
        yield copy


def try_out(mutation: Mutation, tree: Path, environment: Environment | None = None) -> Outcome:
    """Put the bug in, run its test files one after the other, take it out again."""
    environment = environment or Environment()
    path = tree / mutation.file
    text = path.read_text() if path.exists() else ""
    changed = mutated(text, mutation)
    if changed is None:
        return Outcome(STALE, f"{mutation.file} holds what it replaces {text.count(mutation.old)} times")
    files, options = _split_words(mutation.tests)
    files = [file for file in files if file not in environment.not_imported]
    if not files:
        return Outcome(UNCLEAR, f"no file of {mutation.tests} can be imported here")
    passed = False
    for tier in environment.tiers:  # the slow tier has further cases of the same tests
        for file in files:
            outcome = _try_file(path, text, changed, tree, [file, *options], tier, environment)
            if outcome.verdict not in (SURVIVED, NOTHING_RUN):
                return outcome
            passed |= outcome.verdict == SURVIVED
    return Outcome(SURVIVED, f"{mutation.tests} passes") if passed else Outcome(UNCLEAR, "no test was selected")


# No test of a file was selected, or each that failed fails without the mutation too.
NOTHING_RUN = "nothing run"


def _try_file(
    path: Path, text: str, changed: str, tree: Path, words: list[str], tier: str, environment: Environment
) -> Outcome:
    """Run one file with the bug in it until a test fails that passes without it."""
    while True:
        try:
            path.write_text(changed)
            status, said = _run_tests(words, tree, tier, environment)
        finally:
            path.write_text(text)
        if status == 0:
            return Outcome(SURVIVED, "")
        if status == NOTHING_SELECTED:
            return Outcome(NOTHING_RUN, "")
        if status is None:
            if _run_tests(words, tree, tier, environment)[0] in (0, FAILED):
                return Outcome(CAUGHT, f"{words[0]} did not end within {PATIENCE:.0f} s", words[0], tier)
            return Outcome(UNCLEAR, f"{words[0]} does not end within {PATIENCE:.0f} s without the mutation either")
        failed = next(iter(_failed_tests(said)), "")
        if status != FAILED or not failed:  # no such file, or one that cannot be collected
            return Outcome(UNCLEAR, f"pytest ended with {status}: {_failure(said)}")
        without, again = _pytest([failed], tree, environment)
        if without == 0:
            return Outcome(CAUGHT, _failure(said), failed, tier)
        print(f"left out, as it fails without a mutation too: {_failure(again)}", file=sys.stderr, flush=True)
        # Others of the file may fail as well: all of them are found at once.
        _, said = _run_tests(words, tree, tier, environment, to_the_end=True)
        environment.broken |= {failed, *_failed_tests(said)}


def _split_words(tests: str) -> tuple[list[str], list[str]]:
    """The test files that a mutation names, and what else it gives to pytest."""
    words = shlex.split(tests)
    return [word for word in words if ".py" in word], [word for word in words if ".py" not in word]


def find_test(tree: Path, word: str) -> str:
    """The path of a test file, or of a test in one, from the tree: wherever the file is below `tests/`."""
    name, colons, test = word.partition("::")
    if name.startswith("tests/"):
        return word
    found = sorted((tree / "tests").rglob(name))
    where = found[0].relative_to(tree) if found else Path("tests", name)
    return f"{where.as_posix()}{colons}{test}"


def _run_tests(
    words: Sequence[str], tree: Path, tier: str, environment: Environment, *, to_the_end: bool = False
) -> tuple[int | None, str]:
    """Run the cases of one tier up to the first failure, without the tests that are known to be broken."""
    paths = [find_test(tree, word) if ".py" in word else word for word in words]
    left_out = [word for test in sorted(environment.broken) for word in ("--deselect", test)]
    marked = ["-m", f"not gpu and {TIERS[tier]}"]
    return _pytest([*([] if to_the_end else ["-x"]), *marked, *paths, *left_out], tree, environment)


def _pytest(words: Sequence[str], tree: Path, environment: Environment) -> tuple[int | None, str]:
    """pytest's exit status and what it said; no status where it did not end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if environment.single_threaded:
        variables["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=tree, env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
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


def files_not_imported(mutations: Sequence[Mutation], tree: Path, environment: Environment) -> frozenset[str]:
    """The test files that pytest cannot collect without any mutation."""
    named = {word.partition("::")[0] for mutation in mutations for word in _split_words(mutation.tests)[0]}
    there = {find_test(tree, name): name for name in sorted(named) if (tree / find_test(tree, name)).exists()}
    if not there:
        return frozenset()
    _, said = _pytest(["--collect-only", *there], tree, environment)
    lines = [line.split() for line in said.splitlines()]
    return frozenset(there[line[1]] for line in lines if line[:1] == ["ERROR"] and line[1:2] and line[1] in there)


_SUMMARY = re.compile(r"(?:FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?")


def _failed_tests(said: str) -> list[str]:
    """The ids of the tests that failed, by pytest's summary."""
    found = (_SUMMARY.fullmatch(line) for line in said.splitlines())
    return [match[1] for match in found if match]


def _failure(said: str) -> str:
    """The test that failed, in pytest's own summary."""
    found = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return found[0][:160] if found else _last(said)


def _last(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


class Report:
    """Prints outcomes as they come, and writes all so far to a JSON file. Several threads use it."""

    def __init__(self, mutations: Sequence[Mutation], file: Path | None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._num, self._width = len(mutations), max(len(mutation.name) for mutation in mutations)
        self._file, self._rows, self._lock = file, list[dict[str, object]](), threading.Lock()

    def add(self, mutation: Mutation, outcome: Outcome, seconds: float) -> None:
        with self._lock:
            self.outcomes[mutation.name] = outcome
            number = f"{len(self.outcomes):>2}/{self._num}"
            told = f"{outcome.verdict:<8} {seconds:>4.0f} s  {outcome.reason}"
            print(f"[{number}] {mutation.name:<{self._width}}  {told}", flush=True)
            package = Path(mutation.file.removeprefix("onefold/")).parts[0]
            self._rows.append(
                {"name": mutation.name, "package": package, "seconds": round(seconds, 1), **asdict(outcome)}
            )
            if self._file is not None:
                unfinished = self._file.with_name(f"{self._file.name}.partial")
                unfinished.write_text(json.dumps(self._rows, indent=1) + "\n")
                os.replace(unfinished, self._file)


def run(mutations: Sequence[Mutation], root: Path, report: Report, environment: Environment, num_jobs: int) -> None:
    """Try all mutations, so many at a time, each in a copy of the tree that no other uses meanwhile."""
    with contextlib.ExitStack() as stack:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(min(num_jobs, len(mutations))):
            trees.put(stack.enter_context(copied(root)))
        tree = trees.get()
        environment.not_imported = files_not_imported(mutations, tree, environment)
        trees.put(tree)
        if environment.not_imported:
            print(f"left out, as they cannot be imported here: {', '.join(sorted(environment.not_imported))}")

        def try_one(mutation: Mutation) -> None:
            tree, start = trees.get(), time.monotonic()
            try:
                report.add(mutation, try_out(mutation, tree, environment), time.monotonic() - start)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(num_jobs) as threads:
            for done in [threads.submit(try_one, mutation) for mutation in mutations]:
                done.result()


def main(arguments: Sequence[str] | None = None, mutations: Sequence[Mutation] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a name, or a pattern of names; may be repeated"
    )
    parser.add_argument("--set", choices=SETS, default="all", help="which list of mutations (default: %(default)s)")
    parser.add_argument("--first-tier", action="store_true", help="run the cases of `make test` alone, no slow ones")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations to try at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes so far after each mutation")
    parser.add_argument("--list", action="store_true", help="names, files and tests, without running anything")
    asked = parser.parse_args(arguments)
    known = SETS[asked.set] if mutations is None else mutations
    chosen = [one for one in known if not asked.only or any(fnmatchcase(one.name, name) for name in asked.only)]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(asked.only or [])}: --list names all")
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs}: at least one mutation is tried at a time")
    if asked.list:
        width = max(len(mutation.name) for mutation in chosen)
        for mutation in chosen:
            print(f"{mutation.name:<{width}}  {mutation.file:<32}  {mutation.tests}")
        return 0
    tiers = ["first"] if asked.first_tier else list(TIERS)
    report = Report(chosen, asked.json)
    run(chosen, root, report, Environment(tiers, single_threaded=asked.jobs > 1), asked.jobs)
    left = {name: outcome for name, outcome in report.outcomes.items() if outcome.verdict != CAUGHT}
    print(f"\n{len(chosen) - len(left)} of {len(chosen)} caught")
    for name, outcome in left.items():
        print(f"  {name}: {outcome.verdict}. {outcome.reason}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
