"""The list of mutations still fits the code, and the script that tries them tells what it has seen."""

from __future__ import annotations

import functools
import json
import shlex
from collections import Counter
from pathlib import Path

import mutants
import pytest
from models import more
from mutations import MUTATIONS, Mutation
from mutations_tier import TIER_MUTATIONS

ROOT = Path(__file__).parents[2]


@functools.cache
def find_test(word: str) -> str:
    return mutants.find_test(ROOT, word)


@pytest.mark.parametrize("mutation", [*MUTATIONS, *TIER_MUTATIONS], ids=lambda mutation: mutation.name)
def test_every_mutation_applies_once_and_names_its_tests(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} holds what {mutation.name} replaces so many times"
    assert mutants.mutated(text, mutation) not in (None, text)
    files = [word for word in shlex.split(mutation.tests) if ".py" in word]
    assert files
    for file in files:
        assert (ROOT / find_test(file.partition("::")[0])).exists(), file


def test_names_are_told_apart():
    assert [
        name for name, count in Counter(one.name for one in [*MUTATIONS, *TIER_MUTATIONS]).items() if count > 1
    ] == []


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


@pytest.mark.parametrize("verdict", ["caught", "SURVIVED", "DOES NOT APPLY", more("UNCLEAR")])
def test_one_mutation_is_told_from_another(tree, capsys, verdict):
    """Caught is only what fails with the mutation and passes without it."""
    mutation = TRIED[verdict]
    status = mutants.main([], [mutation], tree)
    said = capsys.readouterr().out
    assert f"[ 1/1] {mutation.name}  {verdict}" in said
    assert f"{int(verdict == 'caught')} of 1 caught" in said
    assert status == (0 if verdict == "caught" else 1)
    assert (tree / "thing.py").read_text() == SOURCE  # only a copy was ever changed


@pytest.mark.slow
def test_tests_that_are_not_there_are_no_catch(tree):
    for tests in ("test_nothing.py", "test_thing.py -k nothing"):
        outcome = mutants.try_out(Mutation("lost", "thing.py", "x * 2", "x * 3", tests), tree)
        assert outcome.verdict == mutants.UNCLEAR
        assert (tree / "thing.py").read_text() == SOURCE


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_left_out(tree, capsys):
    """A collection error is no failure of a test, with the mutation or without it."""
    (tree / "tests" / "test_optional.py").write_text("import no_such_package\n")
    tests = "test_optional.py test_thing.py -k double"
    assert mutants.main([], [Mutation("caught", "thing.py", "x * 2", "x * 3", tests)], tree) == 0
    assert "cannot be imported here: test_optional.py" in capsys.readouterr().out
    mutants.main([], [Mutation("alone", "thing.py", "x * 2", "x * 3", "test_optional.py")], tree)
    assert "UNCLEAR" in capsys.readouterr().out
    importing = Mutation("importing", "thing.py", "def double", "def triple", "test_thing.py")
    assert mutants.try_out(importing, tree).verdict == mutants.UNCLEAR


@pytest.mark.slow
def test_what_fails_without_the_mutation_too_hides_nothing(tree):
    """A broken test stands before the one that sees the mutation, in a folder below `tests/`."""
    (tree / "tests" / "below").mkdir()
    (tree / "tests" / "test_thing.py").unlink()
    broken = "def test_broken_first():\n    assert False\n\n\n"
    path = tree / "tests" / "below" / "test_thing.py"
    path.write_text(TESTS.replace("def test_double", f"{broken}def test_double"))
    outcome = mutants.try_out(Mutation("caught", "thing.py", "x * 2", "x * 3", "test_thing.py"), tree)
    assert (outcome.verdict, outcome.tier) == (mutants.CAUGHT, "first")
    assert outcome.test == "tests/below/test_thing.py::test_double"


@pytest.mark.slow
def test_the_slow_tier_may_be_left_out(tree):
    path = tree / "tests" / "test_thing.py"
    path.write_text("import pytest\n" + TESTS.replace("def test_double", "@pytest.mark.slow\ndef test_double"))
    mutation = Mutation("slow", "thing.py", "x * 2", "x * 3", "test_thing.py -k 'double or half'")
    assert mutants.try_out(mutation, tree).tier == "slow"
    assert mutants.try_out(mutation, tree, mutants.Environment(["first"])).verdict == mutants.SURVIVED


@pytest.mark.slow
def test_several_are_tried_at_a_time_and_written_down(tree, tmp_path_factory, capsys):
    file = tmp_path_factory.mktemp("written") / "outcomes.json"
    tried = [TRIED["caught"], TRIED["SURVIVED"], TRIED["DOES NOT APPLY"]]
    assert mutants.main(["--jobs", "2", "--json", str(file)], tried, tree) == 1
    assert "1 of 3 caught" in capsys.readouterr().out
    written = {row["name"]: row for row in json.loads(file.read_text())}
    assert {name: row["verdict"] for name, row in written.items()} == {
        "caught": "caught", "weak": "SURVIVED", "stale": "DOES NOT APPLY"
    }  # fmt: skip
    assert written["caught"]["test"] == "tests/test_thing.py::test_double"
    assert written["caught"]["package"] == "thing.py"
    assert written["caught"]["seconds"] > 0
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
