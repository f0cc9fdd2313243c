"""Run frameworks from the package index on onefold under DeepSpeed's name: `make matrix ARGS="--only 'trl*'"`.

Each row has an environment of its own, which shares torch and onefold with a base environment through a `.pth` file,
and is removed afterwards. Each case of a row (cases.py) trains on two gloo ranks without DeepSpeed and in stages 2 and
3, and the losses and the saved weights are compared. Results are kept in docs/compatibility.json, row by row, and
docs/compatibility.md is written from it. The exit code is 1 if a row that ran did not pass.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS, PAGE = ROOT / "docs/compatibility.json", ROOT / "docs/compatibility.md"
BASE = ["torch", "numpy", "rich", "pyyaml", "xxhash", "safetensors", "pydantic", "packaging", "setuptools", "wheel"]
MODES = ["plain", "2", "3"]
TRANSFORMERS = ["4.52.4", "4.53.3", "4.55.4", "5.0.0", "5.2.0", "5.4.0", "5.8.0", "5.12.1", "5.16.1", "5.20.2"]
# How far numbers may be from those without DeepSpeed. Trainers print four decimals.
TOLERANCE = {"trainer_qwen_bf16": 0.03}

# Faults of releases that DeepSpeed meets too.
UPSTREAM = {
    ("transformers 5.2.0", "trainer_new_head", "3"): "this release ties parameters whose data_ptr() is equal, and that "
    "of every sharded parameter is 0, in DeepSpeed too; 5.3.0 does not",
}


@dataclass(frozen=True, eq=False)
class Row:
    name: str
    packages: list[str]
    cases: list[str]
    sdists: list[str] = ()  # type: ignore[assignment]
    together: bool = True
    """Whether one process may run all cases: not if the framework ends the process group."""


ON_TOP = ["accelerate", "peft_lora", "trl_sft", "trl_dpo", "lightning"]
TRAINER = ["trainer_llama", "trainer_qwen_bf16", "trainer_new_head"]
ROWS = [
    Row(
        "spring 2025",
        ["transformers==4.51.3", "accelerate==1.6.0", "peft==0.15.2", "trl==0.17.0", "lightning==2.5.1"],
        [*TRAINER, *ON_TOP],
    ),
    *(Row(f"transformers {release}", [f"transformers=={release}", "accelerate"], TRAINER) for release in TRANSFORMERS),
    Row(
        "autumn 2025",
        ["transformers==4.57.6", "accelerate==1.11.0", "peft==0.17.1", "trl==0.24.0", "lightning==2.5.6"],
        [*TRAINER, *ON_TOP],
    ),
    Row(
        "newest",
        ["transformers", "accelerate", "peft", "trl", "lightning", "sentence-transformers[train]"],
        [*TRAINER, *ON_TOP, "sentence_transformers", "axolotl_configs"],
        ["axolotl"],
    ),
    Row("LLaMA-Factory", ["llamafactory"], ["llamafactory", "llamafactory_lora"], together=False),
    Row("ms-swift", ["ms-swift"], ["ms_swift", "ms_swift_lora"]),
    Row("mmengine", ["mmengine"], ["mmengine"]),
    Row("OpenRLHF calls", [], ["openrlhf"]),
    Row("open-instruct calls", [], ["open_instruct"]),
    Row(
        "configs", [], ["configs"], ["deepspeed", "axolotl", "llamafactory", "ms-swift", "xtuner", "trl", "accelerate"]
    ),
]


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def site_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python*")) / "site-packages"


class Matrix:
    def __init__(self, home: Path, timeout: float, keep: bool) -> None:
        self.home, self.timeout, self.keep = home.resolve(), timeout, keep
        self.base = self.home / "base"

    # -- environments ---------------------------------------------------------------------------------------------

    def pip(self, *arguments: str, environment: Path | None = None) -> None:
        where = ["--python", str((environment or self.base) / "bin/python")]
        command = [str(self.base / "bin/python"), "-m", "pip", *where, "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise RuntimeError("pip: " + " ".join(errors or done.stderr.splitlines()[-1:])[:300])

    def prepare_base(self) -> None:
        if not (self.base / ".installed").exists():
            say(f"base environment with torch in {self.base}")
            subprocess.run([sys.executable, "-m", "venv", str(self.base)], check=True)
            self.pip("install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *BASE)
            (self.base / ".installed").touch()
        sources = [path for name in ("onefold", "packaging") for path in (ROOT / name).rglob("*.*") if path.is_file()]
        newest = f"{max(path.stat().st_mtime for path in sources if path.suffix != '.pyc')}"
        if (self.base / ".installed").read_text() != newest:
            say("onefold and the distribution named deepspeed")
            ours = [str(ROOT), str(ROOT / "packaging/deepspeed")]
            self.pip("install", "--quiet", "--no-deps", "--force-reinstall", "--no-build-isolation", *ours)
            (self.base / ".installed").write_text(newest)

    def prepare(self, row: Row, folder: Path) -> Path:
        """Make the environment of a row."""
        environment = folder / "venv"
        subprocess.run([str(self.base / "bin/python"), "-m", "venv", "--without-pip", str(environment)], check=True)
        (site_of(environment) / "base.pth").write_text(f"{site_of(self.base)}\n")
        if row.packages:
            pins = folder / "constraints.txt"
            pins.write_text(
                "".join(line + "\n" for line in (ROOT / "constraints.txt").read_text().split() if "torch" in line)
            )
            self.pip(
                "install", "--quiet", "--no-compile", "--constraint", str(pins), *row.packages, environment=environment
            )
        for name in ("torchvision", "torchaudio"):  # their builds on the index may need the CUDA build of torch
            code = [str(environment / "bin/python"), "-c", f"import {name}"]
            if (site_of(environment) / name).exists() and subprocess.run(
                code, capture_output=True, check=False
            ).returncode:
                self.pip("uninstall", "--quiet", "--yes", name, environment=environment)
        for name in row.sdists:
            target = folder / "sdists" / name
            self.pip("download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(target), name)
            for archive in target.iterdir():
                shutil.unpack_archive(archive, target)
        return environment

    def versions(self, environment: Path) -> dict[str, str]:
        listed = "{d.name.replace('_', '-'): d.version for d in m.distributions()}"
        code = f"import importlib.metadata as m, json; print(json.dumps({listed}))"
        found = subprocess.run(
            [str(environment / "bin/python"), "-c", code], capture_output=True, text=True, check=True
        )
        versions: dict[str, str] = json.loads(found.stdout)
        return versions

    # -- running --------------------------------------------------------------------------------------------------

    def run_row(self, row: Row) -> dict[str, Any]:
        folder = self.home / row.name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        entry: dict[str, Any] = {"date": f"{datetime.date.today()}", "cases": {}}
        try:
            say(f"{row.name}: installing {' '.join([*row.packages, *row.sdists])}")
            environment = self.prepare(row, folder)
            found = self.versions(environment)
            named = {re.split(r"[\[=]", package)[0] for package in row.packages} | {
                "torch",
                "transformers",
                "accelerate",
            }
            entry["versions"] = {name: found[name] for name in sorted(named) if name in found}
            if row.cases == ["configs"]:
                entry["cases"]["configs"] = self.run_configs(folder)
            else:
                entry["cases"] = self.run_cases(row, environment, folder)
                for (name, case, mode), reason in UPSTREAM.items():
                    if name == row.name and entry["cases"][case][mode]["result"] != "pass":
                        entry["cases"][case][mode]["result"] = f"upstream: {reason}"
        except Exception as error:  # a row that fails must not stop the others
            entry["error"] = f"{error}"[:400]
            say(f"{row.name}: {entry['error']}")
        finally:
            if not self.keep:
                shutil.rmtree(folder, ignore_errors=True)
        return entry

    def run_cases(self, row: Row, environment: Path, folder: Path) -> dict[str, Any]:
        """Run all cases in all modes.

        One process on each rank runs them one after the other, because imports take most of the time. A run that fails
        is repeated in a process of its own, and those that follow go on in another one.
        """
        work = folder / "work"
        work.mkdir()
        for configs in (folder / "sdists").glob("axolotl/*/deepspeed_configs"):
            shutil.copytree(configs, work / "configs")
        found: dict[str, Any] = {case: {} for case in row.cases}
        left, together, began = [(case, mode) for mode in MODES for case in row.cases], row.together, time.monotonic()
        while left:
            problem = None
            try:
                self.ranks(environment, left if together else left[:1], work)
            except Exception as error:
                problem = f"{error}"[:400]
            finished = 0
            while left and (work / left[0][0] / f"{left[0][1]}.json").exists():
                case, mode = left.pop(0)
                finished += 1
                found[case][mode] = json.loads((work / case / f"{mode}.json").read_text())
                found[case][mode]["result"] = self.difference(case, found[case], mode, work / case) or "pass"
                say(f"  {case}, {mode}: {found[case][mode]['result']} ({time.monotonic() - began:.0f} s)")
            if left and not finished:
                case, mode = left.pop(0)
                found[case][mode] = {"result": problem or "no result was written"}
                say(f"  {case}, {mode}: {problem} ({time.monotonic() - began:.0f} s)")
            together = row.together and (not together or problem is None)
        return found

    def ranks(self, environment: Path, runs: list[tuple[str, str]], work: Path) -> None:
        """Run cases in their modes on two ranks. Raise with the last error of the first rank that fails."""
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        shared = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PYTHONPATH": str(ROOT / "examples/huggingface"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hf"), "WANDB_DISABLED": "true",
            "MODELSCOPE_CACHE": str(work / "modelscope"), "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        listed = ",".join(f"{case}:{mode}" for case, mode in runs)
        command = [str(environment / "bin/python"), str(HERE / "cases.py"), listed, str(work)]
        logs = [work / f"{runs[0][0]}-{runs[0][1]}-{len(runs)}-{rank}.log" for rank in range(2)]
        processes = []
        for rank, log in enumerate(logs):
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(command, env=variables, cwd=work, stdout=out, stderr=out, start_new_session=True)
                )
        deadline = time.monotonic() + self.timeout
        finished = 0
        try:
            while any(process.poll() is None for process in processes):
                if (work / runs[finished][0] / f"{runs[finished][1]}.json").exists() and finished < len(runs) - 1:
                    finished, deadline = finished + 1, time.monotonic() + self.timeout
                    say(f"    {finished} of {len(runs)} runs finished, now {runs[finished][0]}, {runs[finished][1]}")
                failed = [rank for rank, process in enumerate(processes) if process.poll()]
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            time.sleep(1.0 if any(process.poll() for process in processes) else 0.0)  # the other rank may say more
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        failed = [rank for rank, process in enumerate(processes) if process.returncode not in (0, -signal.SIGKILL)]
        if failed:
            lines = [line.strip() for line in logs[failed[0]].read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception|NotFound)\b", line)]
            raise RuntimeError((errors or lines or ["no output"])[-1].removeprefix(f"[rank{failed[0]}]: "))
        if any(process.returncode for process in processes):
            raise RuntimeError("not finished in time")

    def difference(self, case: str, found: dict[str, Any], mode: str, work: Path) -> str | None:
        """Return what differs from the run without DeepSpeed."""
        if mode == "plain":
            return None
        tolerance = TOLERANCE.get(case, 2e-4)
        for name, expected in found["plain"].items():
            if name == "result":
                continue
            value = found[mode].get(name)
            if not same(value, expected, tolerance):
                return f"{name} {shown(value)}, without DeepSpeed {shown(expected)}"
        saved = [work / f"saved-{which}" for which in ("plain", mode)]
        if saved[0].is_dir():
            return weights_differ(saved[0], saved[1], 10 * tolerance)
        return None

    def run_configs(self, folder: Path) -> dict[str, Any]:
        done = subprocess.run(
            [str(self.base / "bin/python"), str(HERE / "configs.py"), str(folder / "sdists")],
            capture_output=True, text=True, check=False, timeout=self.timeout,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        say(f"  configs: {len(found)}, errors: {sum(verdict.startswith('error') for verdict in found.values())}")
        return found


def same(value: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and len(expected) > 0
            and all(same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, float):
        return isinstance(value, float) and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) else f"{value}"


def weights_differ(plain: Path, other: Path, tolerance: float) -> str | None:
    """Compare saved safetensors files."""
    from safetensors.torch import load_file
    from torch import equal

    expected, found = (
        {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        for folder in (plain, other)
    )
    # Saving through DeepSpeed's clone_tensors_for_torch_save writes tied weights twice.
    copies = [name for name in found if name not in expected and any(equal(found[name], found[n]) for n in expected)]
    if expected.keys() != found.keys() - {*copies}:
        return f"saved names differ: {', '.join(sorted(expected.keys() ^ found.keys())[:4])}"
    for name, value in expected.items():
        if value.shape != found[name].shape:
            return f"saved {name} has shape {tuple(found[name].shape)}, without DeepSpeed {tuple(value.shape)}"
        # Where a gradient is all but zero, rounding decides in which direction Adam moves a weight.
        off = (value.float() - found[name].float()).abs()
        share = (~(off <= tolerance)).float().mean().item()
        if share > 0.005:
            return f"{share:.1%} of saved {name} is off, by up to {off.max().item():.2g}"
    return None


# -- the page -----------------------------------------------------------------------------------------------------


def passed(entry: dict[str, Any]) -> bool:
    """Return whether all cases of a row pass. A config that is refused by scope passes."""
    verdicts = []
    for case, found in entry["cases"].items():
        verdicts += (
            [not v.startswith("error") for v in found.values()]
            if case == "configs"
            else [found[mode]["result"].startswith(("pass", "upstream")) for mode in MODES]
        )
    return "error" not in entry and bool(verdicts) and all(verdicts)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page(results: dict[str, Any]) -> str:
    lines = [
        "# Compatibility",
        "",
        "Frameworks and releases from the package index, run on onefold under the name `deepspeed` on two CPU ranks",
        "(gloo). Each case trains three steps without DeepSpeed (DDP) and in stages 2 and 3. `pass` means that the",
        "losses, and the weights where the case saves them, equal those without DeepSpeed. `tests/matrix/cases.py` has",
        "the program of each case. The rows of OpenRLHF and open-instruct make the calls that these projects make.",
        "`upstream` marks a fault of a release that DeepSpeed meets too.",
        "",
        "`make matrix` writes this page, and `make matrix ARGS=\"--only 'trl*'\"` runs some of the rows again.",
        "",
        "| row | case | versions | last loss without DeepSpeed | stage 2 | stage 3 | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in results.items():
        versions = ", ".join(f"{package} {version}" for package, version in entry.get("versions", {}).items())
        if "error" in entry:
            lines.append(f"| {name} | | {versions} | {cell(entry['error'])} | | | {entry['date']} |")
        for case, found in entry["cases"].items():
            if case == "configs":
                continue
            plain = found["plain"]
            first = shown(plain["losses"][-1]) if "losses" in plain else cell(plain["result"])
            cells = [cell(found[mode]["result"]) for mode in MODES[1:]]
            lines.append(f"| {name} | {case} | {versions} | {first} | {' | '.join(cells)} | {entry['date']} |")
    configs = results.get("configs", {})
    found = configs.get("cases", {}).get("configs", {})
    if found:
        count = {
            kind: sum(verdict.startswith(kind) for verdict in found.values()) for kind in ("taken", "refused", "error")
        }
        lines += [
            "",
            "## DeepSpeed configs",
            "",
            f"{len(found)} configs that packages on the index ship, or that public repositories use, read through",
            f"`DeepSpeedConfig`: {count['taken']} taken, {count['refused']} refused because they ask for something",
            f"that onefold does not offer, {count['error']} errors ({configs['date']}).",
            "",
            "| config | result |",
            "|---|---|",
            *(f"| {name} | {cell(verdict)} |" for name, verdict in found.items()),
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="rows by name, with * and ?; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--failed", action="store_true", help="only rows that have no result, or did not pass")
    parser.add_argument("--home", type=Path, default=ROOT / "build/matrix", help="folder for the environments")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one case in one mode")
    parser.add_argument("--keep", action="store_true", help="keep environments and logs")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    patterns = arguments.only or ["*"]
    rows = list(dict.fromkeys(row for pattern in patterns for row in ROWS if fnmatch.fnmatch(row.name, pattern)))
    if arguments.failed:
        rows = [row for row in rows if row.name not in results or not passed(results[row.name])]
    if arguments.list:
        for row in rows:
            print(f"{row.name}: {', '.join(row.cases)} ({' '.join([*row.packages, *row.sdists]) or 'no packages'})")
        return 0
    if not rows:
        print("no row has such a name; --list prints them", file=sys.stderr)
        return 2
    matrix = Matrix(arguments.home, arguments.timeout, arguments.keep)
    matrix.prepare_base()
    failed = []
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.name}")
        entry = matrix.run_row(row)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[row.name] = entry
        ordered = {known.name: results[known.name] for known in ROWS if known.name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        PAGE.write_text(page(ordered))
        failed += [] if passed(entry) else [row.name]
    print(page({row.name: results[row.name] for row in rows}))
    say(f"{len(rows) - len(failed)} of {len(rows)} rows pass" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
