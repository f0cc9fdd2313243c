"""Fuzz one target with atheris, whose inputs are guided by the lines that run: needs pip install atheris.

    python tests/fuzz/coverage_guided.py test_fuzz_config.py::test_any_document_loads_or_is_a_config_error \
        -max_total_time=60

The target and the inputs are those of the test. The arguments after the test are options of libFuzzer, or the file of
an input that it has found. The target runs in this process: memory and time are limited by `-rss_limit_mb` and
`-timeout`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import atheris
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generated  # noqa: E402 - a test module, found by the path above
from hypothesis import HealthCheck, given, settings  # noqa: E402


def guided(run: Callable[[Any], object], strategy: Any, effort: int, examples: tuple[Any, ...] = ()) -> None:
    """Run a function on inputs until libFuzzer ends the process. Replaces `generated.fuzz`."""

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def check(value: Any) -> None:
        try:
            run(value)
        except BaseException:
            print(f"the input of the target: {value!r}", flush=True)
            raise

    for value in examples:
        run(value)
    # Hypothesis draws little from short inputs.
    atheris.Setup([sys.argv[0], "-len_control=0", *sys.argv[2:]], check.hypothesis.fuzz_one_input)
    atheris.Fuzz()


@contextmanager
def in_process(prepare: Any, target: Any, *allowed: type[Exception]) -> Iterator[Callable[[Any], bool]]:
    """Yield a function that runs a target in this process. Replaces `generated.limited`."""
    with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as folder:

        def run(value: Any) -> bool:
            prepare(Path(folder), value)
            try:
                target(Path(folder), value)
            except allowed:
                return False
            return True

        yield run


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    generated.fuzz, generated.limited = guided, in_process
    # Only this package is instrumented: torch would make every input slow.
    with atheris.instrument_imports(include=["onefold"], enable_loader_override=False):
        return pytest.main(["-q", "-s", "-p", "no:cacheprovider", f"{HERE / sys.argv[1]}[{generated.FEW}]"])


if __name__ == "__main__":
    sys.exit(main())
