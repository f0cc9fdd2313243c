"""Count what makes the package hard or easy to read: `python tests/structure.py`.

Lines and modules of each area, import cycles, upward imports, long files, docstrings that start with a verb, checks of
our own classes with `isinstance`; and, by tracing one training step on this process, the files and classes that an
unshard and an offloaded optimizer step run through.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "onefold"
AREAS = ("library", "compat", "tools")
# Modules that only lead to others, by the names that users type.
FRONT_DOOR = {"onefold", "onefold.env_report", "onefold.train"}


def area_of(path: Path) -> str:
    """Return the area of a module: the library, DeepSpeed's names, or tools."""
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in ("compat", "tools") else "library"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the package that a file imports: at the top, in functions, and for types only."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("onefold"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("onefold")]
        found |= {name for name in names if name in modules}
    return found - {module_of(path)}


def graph() -> dict[str, set[str]]:
    """Return the imports of every module."""
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    return {module: imports_of(path, set(files)) for module, path in files.items()}


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == node:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def packages(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between packages; a module directly below `onefold` is a package by itself."""

    def package(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[1:3] if parts[1:2] == ["tools"] else parts[1:2]) or "onefold"

    found: dict[str, set[str]] = {}
    for module, others in edges.items():
        if module not in FRONT_DOOR:
            found.setdefault(package(module), set()).update(package(other) for other in others - FRONT_DOOR)
    return {name: others - {name} for name, others in found.items()}


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Iterate over the functions that have a docstring, without properties."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                decorators = {ast.unparse(each) for each in node.decorator_list}
                if doc and not decorators & {"property", "cached_property", "functools.cached_property"}:
                    yield path, node, doc


def code_lines(path: Path) -> int:
    """Return the lines without docstrings, comments and blank lines."""
    text = path.read_text()
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def own_isinstance_checks(folder: Path) -> int:
    """Return the number of `isinstance` checks of classes that the package defines."""
    ours = {
        n.name for p in PACKAGE.rglob("*.py") for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ClassDef)
    }
    count = 0
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                kinds = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                count += bool(kinds & ours)
    return count


class Trace:
    """Records the files and classes of the package that run between `with` and its end, on all threads."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.classes: dict[str, None] = {}
        self._is_active = False
        threading.setprofile(self._called)  # for threads that start from now on

    def __enter__(self) -> Trace:
        self._is_active = True
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        self._is_active = False

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self._is_active and event == "call" and name.startswith(f"{PACKAGE}/"):
            self.files[name.removeprefix(f"{PACKAGE}/")] = None
            owner = frame.f_locals.get("self")
            if owner is not None and type(owner).__module__.startswith("onefold"):
                self.classes[type(owner).__name__] = None


def trace_unshard() -> Trace:
    """Trace the unshard of one unit, in a forward whose order is recorded."""
    trace = Trace()
    engine, x = _engine({"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0})
    unit = engine.state.schedule.sharded_units[2]
    unshard = unit.unshard

    def traced(*given: Any) -> None:
        with trace:
            unshard(*given)

    unit.unshard = traced
    engine(x)
    engine.destroy()
    return trace


def trace_offloaded_step() -> Trace:
    """Trace the step of the shards whose states are in host memory, from the norm to the new parameters."""
    trace = Trace()
    engine, x = _engine({"stage": 2, "offload_optimizer": {"device": "cpu"}})
    step = engine.state.step._host
    start = step.start

    def traced(*given: Any) -> None:
        with trace:
            start(*given)
            step.wait()

    step.start = traced
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()
    engine.destroy()
    return trace


def _engine(zero: dict[str, Any]) -> tuple[Any, Any]:
    """Return an engine that has taken two steps, and a batch."""
    import torch

    import onefold

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "log_level": "warning"}
    engine = onefold.initialize(model=model, config={**config, "zero_optimization": zero})[0]
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    for _ in range(2):
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
    engine.wait_for_step()
    return engine, x


def main() -> None:
    edges, files = graph(), sorted(PACKAGE.rglob("*.py"))
    for area in AREAS:
        of_area = [path for path in files if area_of(path) == area]
        lines = sum(len(path.read_text().splitlines()) for path in of_area)
        print(f"{area}: {lines:,} lines ({sum(map(code_lines, of_area)):,} of code), {len(of_area)} modules")
    print(f"import cycles between modules: {len(found := cycles(edges))}")
    for group in found:
        print(f"  {', '.join(group)}")
    print(f"import cycles between packages: {len(found := cycles(packages(edges)))}")
    for group in found:
        print(f"  {', '.join(group)}")
    upward = [
        (module, other)
        for module, others in edges.items()
        for other in others
        if module not in FRONT_DOOR
        and not module.startswith(("onefold.compat", "onefold.tools"))
        and other.startswith(("onefold.compat", "onefold.tools"))
    ]
    print(f"imports of compat or tools in the library: {len(upward)} {upward}")
    long = [f"{path.relative_to(ROOT)} {n}" for path in files if (n := len(path.read_text().splitlines())) > 500]
    print(f"files of more than 500 lines: {len(long)} {', '.join(long)}")
    print(f"isinstance checks of our own classes in optim: {own_isinstance_checks(PACKAGE / 'optim')}")
    for what, trace in (("an unshard", trace_unshard()), ("an offloaded step", trace_offloaded_step())):
        print(f"{what} runs through {len(trace.files)} files: {', '.join(sorted(trace.files))}")
        print(f"  and {len(trace.classes)} classes: {', '.join(sorted(trace.classes))}")


if __name__ == "__main__":
    main()
