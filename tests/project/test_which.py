"""Every module has its tests, by its package or by name; the quick check and the parts for GPUs name what exists."""

from __future__ import annotations

from collections import Counter

import parts
import pytest
import which

PACKAGE = which.ROOT / "onefold"
AREAS = (PACKAGE, PACKAGE / "tools")
TESTS = which.ROOT / "tests"
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
# Folders that belong to no package.
OTHERS = {"docs", "fixtures", "fuzz", "gpu", "matrix", "project", "security"}


def has_code(text: str) -> bool:
    return len(text.splitlines()) > 1  # more than the docstring of a folder


MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" or has_code(path.read_text())
)


def test_every_module_has_tests():
    for module in MODULES:
        found = which.tests_of(f"onefold/{module}")
        assert found, f"name the tests that see {module} broken in ELSEWHERE of tests/which.py"
        assert [path for path in found if not (which.ROOT / path).exists()] == [], module


def test_every_line_is_of_a_module_and_names_other_folders():
    assert [name for name in which.ELSEWHERE if not (PACKAGE / name).exists()] == []
    for module, tests in which.ELSEWHERE.items():
        own = f"{which.package_of(module)}/"
        assert [test for test in tests.split() if test.startswith(own)] == []


def test_every_folder_of_tests_is_a_packages():
    """Names of files are unique: tests import cases from each other by name, and other tools name them by file."""
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert {name for name in folders - OTHERS if not any((area / name).is_dir() for area in AREAS)} == set()
    names = Counter(path.name for path in TESTS.rglob("*.py") if "fixtures" not in path.parts)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_command_prints_folders_and_files_once_and_in_order(capsys):
    assert which.main(["onefold/window.py", "./onefold/loader.py"]) == 0
    assert capsys.readouterr().out.split() == [
        f"tests/engine/test_{name}.py" for name in ("window", "engine", "loader")
    ]
    assert which.main(["onefold/comm/exchange.py"]) == 0
    assert capsys.readouterr().out.split() == ["tests/comm", "tests/runtime/test_exactness.py"]
    assert which.main(["onefold/nowhere.py"]) == 1
    assert "No tests are known for onefold/nowhere.py" in capsys.readouterr().err
    assert which.main([]) == 2


def test_the_quick_check_names_tests_that_exist():
    """`make check` runs the first case of each."""
    for name in (TESTS / "check.txt").read_text().split():
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in FILES[file].read_text(), name


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_every_file_of_the_gpu_is_in_one_part_and_no_part_is_much_longer(num_parts):
    files = [*parts.SECONDS, "test_other.py"]
    found = [parts.files_of(f"{number}/{num_parts}", files) for number in range(1, num_parts + 1)]
    assert sorted(name for part in found for name in part) == sorted(files)
    times = [sum(parts.SECONDS.get(name, 1) for name in part) for part in found]
    assert max(times) - min(times) <= max(parts.SECONDS.values())


def test_files_that_are_timed_exist_and_other_parts_are_refused():
    assert parts.SECONDS.keys() - FILES.keys() == set()
    for wrong in ("", "1", "0/3", "4/3", "a/b"):
        with pytest.raises(ValueError, match="expected a number and how many there are"):
            parts.files_of(wrong, [])
