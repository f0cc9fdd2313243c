"""Check a release: one version, few dependencies, workflows and policies, metadata, and a wheel that works alone."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import onefold

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# Distributions by the names of their modules, where these differ.
DISTRIBUTIONS = {"yaml": "pyyaml"}
# Modules that are imported where their feature is used only, or below an `if` or a `try`.
LAZY = {"triton"}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0].lower() for each in requirements}


def test_there_is_one_version():
    version = onefold.__version__
    assert "version" in PROJECT["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_the_dependencies_are_what_modules_import():
    """Compare the declared dependencies with the imports at the top level of all modules."""
    found = set()
    for path in (ROOT / "onefold").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    third_party = found - set(sys.stdlib_module_names) - {"onefold", *LAZY}
    allowed = names_of(PROJECT["dependencies"]) | {"pydantic"}  # of packaging/deepspeed, for deepspeed.runtime.config
    assert {DISTRIBUTIONS.get(name, name) for name in third_party} == allowed


def test_the_extras_that_messages_name_exist():
    text = "".join(path.read_text() for path in (ROOT / "onefold").rglob("*.py"))
    named = set(re.findall(r"onefold\[(\w+)\]", text)) | set(
        re.findall(r"'\.\[(\w+)\]'", (ROOT / "README.md").read_text())
    )
    assert named
    assert named - PROJECT["optional-dependencies"].keys() == set()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        match = re.fullmatch(r"make ([\w-]+)( (TORCH|ARGS)=.*)?", command)
        assert match, command
        assert match[1] in TARGETS | {"site"}, command


def test_workflows_test_the_oldest_and_the_newest_torch():
    rows = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    versions = [row["torch"] for row in rows["include"]]
    (oldest,) = (each.partition(">=")[2] for each in PROJECT["dependencies"] if each.startswith("torch"))
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert versions == [f"{oldest}.0", pinned[1]]


def test_templates_and_policies_exist():
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text()), template
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
    assert "## Releases and deprecation" in (ROOT / "CONTRIBUTING.md").read_text()
    assert (ROOT / ".github/pull_request_template.md").exists()


@pytest.mark.parametrize("repository", ["", "someone/onefold"])
def test_the_metadata_have_no_relative_links(tmp_path, repository):
    """Build the metadata as an index shows them, in and outside of a workflow of GitHub."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "onefold").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "onefold" / name, tmp_path / "onefold")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "ONEFOLD"))}
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as p; p('.')"
    environ |= {"GITHUB_REPOSITORY": repository} if repository else {}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, capture_output=True)
    (folder,) = tmp_path.glob("*.dist-info")
    metadata = importlib.metadata.Distribution.at(folder).metadata
    text, url = metadata.get_payload(), f"https://github.com/{repository}"
    targets = set(re.findall(r"\]\(([^)]*)\)", text))
    assert all(target.startswith("https://") for target in targets)
    assert (f"{url}/blob/v{onefold.__version__}/docs/moving.md" in targets) == bool(repository)
    assert "[how]" in text if repository else "unchanged (how" in text
    pages = dict(entry.split(", ") for entry in metadata.get_all("Project-URL") or [])
    assert pages.get("Repository") == (url if repository else None)


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v1.2.3", "## 1.2.3 (2026-11-19)", ""),
        ("v1.2.4", "## 1.2.3 (2026-11-19)", "'v1.2.4' is not v1.2.3"),
        ("v1.2.3", "## 1.2.3 (unreleased)", "no section '## 1.2.3 (YYYY-MM-DD)'"),
    ],
)
def test_a_tag_fits_the_version_and_the_changelog(tmp_path, tag, heading, message):
    (tmp_path / "onefold").mkdir()
    (tmp_path / "onefold" / "version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "release-check", f"TAG={tag}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not message), done.stderr
    assert message in done.stderr


def test_another_torch_is_installed_into_an_existing_environment(tmp_path):
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).write_text("torch==2.13.0\n")
    (tmp_path / ".venv").mkdir()
    for name in ("constraints.txt", ".installed"):
        (tmp_path / ".venv" / name).write_text("torch==2.13.0\n")
    for arguments, installs in (([], False), (["TORCH=2.13.0"], False), (["TORCH=2.11.0"], True)):
        command = ["make", "-n", "-f", str(ROOT / "Makefile"), "test", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ("pip install" in done.stdout) == installs, done.stdout


def link_distribution(name: str, target: Path, seen: set[str]) -> None:
    """Link a distribution and its requirements into a folder of packages."""
    if name in seen:
        return
    seen.add(name)
    found = importlib.metadata.distribution(name)
    for file in found.files or []:
        first = file.parts[0]
        source = Path(str(found.locate_file(first)))
        if first != ".." and source.exists() and not (target / first).exists():
            (target / first).symlink_to(source)
    for requirement in found.requires or []:
        if "extra ==" not in requirement and "platform_system" not in requirement:
            link_distribution(re.split(r"[^\w.-]", requirement)[0].lower(), target, seen)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    """Install the wheel next to its declared dependencies and theirs only, and run commands that train and plan."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "onefold"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.name for file in files] == [
        f"onefold-{onefold.__version__}-py3-none-any.whl", f"onefold-{onefold.__version__}.tar.gz"
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)

    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for name in names_of(PROJECT["dependencies"]):
        link_distribution(name, packages, seen)
    assert {"torch", "sympy", "pygments"} < seen
    assert "transformers" not in seen
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(files[0])]
    subprocess.run(pip, check=True, capture_output=True)
    assert next(packages.glob("onefold/py.typed"))

    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ONEFOLD"))}

    def run(*command: str) -> str:
        program = str(environment / "bin" / command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import onefold; print(onefold.__file__, onefold.__version__)")
    assert where.split() == [str(packages / "onefold/__init__.py"), onefold.__version__]
    assert json.loads(run("onefold", "plan", "--params", "7e9", "--machine", "8xA100", "--json"))["settings"]
    run("onefold", "train", "--steps", "3", "--preset", "tiny", "--ranks", "2", "--out", "run")
    assert (tmp_path / "run" / "report.html").exists()
    run("onefold", "env")
