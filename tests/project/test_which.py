"""The map from modules to tests is whole: every module has its line, and every test file is somebody's."""

from __future__ import annotations

import parts
import pytest
import which

PACKAGE = which.ROOT / "onefold"
FILES = {path.name: path for path in (which.ROOT / "tests").rglob("test_*.py")}


def has_code(text: str) -> bool:
    return len(text.splitlines()) > 1  # more than the docstring of a folder


MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" or has_code(path.read_text())
)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_line(module):
    assert which.tests_of(f"onefold/{module}"), f"give {module} a line in tests/which.py: the tests that see it broken"


def test_every_line_is_of_a_module():
    gone = [name for name in which.TESTS if not (PACKAGE / name).exists()]
    assert gone == []


def test_every_test_file_is_named_and_exists():
    named = {name for line in (*which.TESTS.values(), which.OTHERS) for name in line.split()}
    there = {path.stem.removeprefix("test_") for path in (which.ROOT / "tests").rglob("test_*.py")}
    assert named - there == set()
    assert there - named == set(), "name them beside the modules that they test, in tests/which.py"


def test_the_command_prints_files_once_and_in_order(capsys):
    assert which.main(["onefold/window.py", "./onefold/loader.py"]) == 0
    assert capsys.readouterr().out.split() == [
        f"tests/engine/test_{name}.py" for name in ("window", "engine", "loader")
    ]
    assert which.main(["onefold/config/keys.py"]) == 0
    assert capsys.readouterr().out.split() == [
        f"tests/config/test_{name}.py" for name in ("config", "support", "params")
    ]
    assert which.main(["onefold/nowhere.py"]) == 1
    assert "is not in the table" in capsys.readouterr().err
    assert which.main([]) == 2


def test_the_quick_check_names_tests_that_exist():
    """`make check` runs the first case of each."""
    for name in (which.ROOT / "tests" / "check.txt").read_text().split():
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
