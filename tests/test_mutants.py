"""The list of mutations still fits the code, and the script that tries them tells what it has seen."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_applies_once_and_names_its_tests(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} holds what {mutation.name} replaces so many times"
    assert mutants.mutated(text, mutation) not in (None, text)
    files = [word for word in shlex.split(mutation.tests) if ".py" in word]
    assert files
    for file in files:
        assert (ROOT / "tests" / file.partition("::")[0]).exists(), file


def test_names_are_told_apart():
    assert [name for name, count in Counter(one.name for one in MUTATIONS).items() if count > 1] == []


SOURCE = "def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n"
TESTS = (
    "from thing import double, half\n\n\n"
    "def test_double():\n    assert double(3) == 6\n\n\n"
    "def test_half():\n    assert half(4) >= 0\n\n\n"
    "def test_broken():\n    assert False\n"
)
TRIED = {
    "caught": Mutation("caught", "thing.py", "x * 2", "x * 3", "test_thing.py -k double"),
    "SURVIVED": Mutation("weak", "thing.py", "x / 2", "x / 3", "test_thing.py -k half"),
    "DOES NOT APPLY": Mutation("stale", "thing.py", "x * 5", "x * 6", "test_thing.py"),
    "UNCLEAR": Mutation("broken", "thing.py", "x * 2", "x * 3", "test_thing.py -k broken"),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these need none, and start the sooner
    (tmp_path / "tests").mkdir()
    (tmp_path / "thing.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_thing.py").write_text(TESTS)
    return tmp_path


@pytest.mark.parametrize("verdict", TRIED)
def test_one_mutation_is_told_from_another(tree, capsys, verdict):
    """Caught is only what fails with the mutation and passes without it."""
    mutation = TRIED[verdict]
    status = mutants.main([], [mutation], tree)
    said = capsys.readouterr().out
    assert f"[ 1/1] {mutation.name}  {verdict}" in said
    assert f"{int(verdict == 'caught')} of 1 caught" in said
    assert status == (0 if verdict == "caught" else 1)
    assert (tree / "thing.py").read_text() == SOURCE  # only a copy was ever changed


def test_tests_that_are_not_there_are_no_catch(tree):
    for tests in ("test_nothing.py", "test_thing.py -k nothing"):
        outcome = mutants.try_out(Mutation("lost", "thing.py", "x * 2", "x * 3", tests), tree)
        assert outcome.verdict == mutants.UNCLEAR
        assert (tree / "thing.py").read_text() == SOURCE


def test_mutations_are_listed_and_chosen_by_name(tree, capsys):
    assert mutants.main(["--list"], list(TRIED.values()), tree) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["caught", "weak", "stale", "broken"]
    assert mutants.main(["--only", "stal*"], list(TRIED.values()), tree) == 1
    assert "DOES NOT APPLY" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mutants.main(["--only", "nobody"], list(TRIED.values()), tree)


def test_what_is_no_python_does_not_apply():
    assert mutants.mutated("x = 1\n", Mutation("bad", "thing.py", "1", "(", "test_thing.py")) is None
