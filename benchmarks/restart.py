"""Time from the death of a rank or of a node to the next optimizer step, by phase.

Scenarios: a rank is killed on one node; all processes of one of two nodes are killed; the cable between two nodes is
cut. Nodes are network namespaces. Every start loads the newest checkpoint, which is saved every few steps, or with
`--peer-copies` the newest peer copy; then nothing is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

# Ranks and launchers record times, and import torch when they have begun to.
BEGUN = time.time()
SCENARIOS = ("rank", "node-killed", "node-cut")
PHASES = ("noticed", "ended", "rendezvous", "process", "imports", "model", "initialize", "load", "step")
SAVE_EVERY, JOB_SECRET = 3, "ONEFOLD_JOB_SECRET"
MARK = "ONEFOLD_RESTART_BENCHMARK"


def append(path: Path, **record: Any) -> None:
    """Append a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- a rank ------------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train and save until the process is killed, and record the time of each phase."""
    times = {"process": BEGUN if "torch" not in sys.modules else time.time()}
    import torch

    import onefold
    from benchmarks.model import GPT, PRESETS, make_batch

    onefold.initialize  # noqa: B018  imports the engine
    times["imports"] = time.time()
    shape = PRESETS[options.preset]
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": options.stage},
        "onefold": {"peer_copies": {"every": SAVE_EVERY if options.peer_copies else None}},
    }
    folder, start = options.folder, int(os.environ["ONEFOLD_RESTARTS"])
    with without_initial_values() if start > 0 and options.skip_init else nullcontext():
        model = GPT(shape)
    times["model"] = time.time()
    engine = onefold.initialize(model=model, config=config)[0]
    times["initialize"] = time.time()
    if options.peer_copies or (folder / "saved").exists():
        engine.load_checkpoint(str(folder / "saved"))
    times["load"] = time.time()
    resumed = engine.global_steps
    while True:
        tokens, targets = make_batch(shape, 1, options.tokens, engine.global_rank, engine.device)
        engine.backward(engine(tokens, targets))
        engine.step()
        if "step" not in times:
            times["step"] = time.time()
            known = {"rank": engine.global_rank, "world": engine.world_size, "resumed": resumed}
            append(folder / f"times.{start}", **known, **times)
        if engine.global_steps % SAVE_EVERY == 0 and not options.peer_copies:
            engine.save_checkpoint(str(folder / "saved"))
        append(folder / f"pids.{start}.{engine.global_rank}", pid=os.getpid(), steps=engine.global_steps)


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Skip the random initialization of weights, all of which are loaded afterwards."""
    from torch.nn import init

    names = ("normal_", "uniform_", "kaiming_uniform_")
    before = {name: getattr(init, name) for name in names}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *arguments, **keywords: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)


# -- a launcher --------------------------------------------------------------------------------------------------------


def launch(options: argparse.Namespace) -> int:
    """Run `onefold launch` with the remaining arguments, and record the times of its agent."""
    from onefold.tools.cli.main import main as cli
    from onefold.tools.cli.rank_agent import RankAgent

    log: Path = options.folder / f"launcher.{options.launcher}"

    def record(name: str, event: str, before: bool) -> None:
        method = getattr(RankAgent, name)

        def recorded(self: RankAgent, *arguments: Any, **keywords: Any) -> Any:
            if before:
                append(log, event=event, at=time.time())
            result = method(self, *arguments, **keywords)
            if not before:
                append(log, event=event, at=time.time())
            return result

        setattr(RankAgent, name, recorded)

    record("_result", "noticed", before=True)
    record("_end_start", "noticed", before=True)
    record("_kill", "ended", before=False)
    record("_start_workers", "rendezvous", before=True)
    return cli(["launch", *options.arguments])


# -- the benchmark -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, scenario: str) -> dict[str, float]:
    """Return the seconds of each phase after one fault."""
    from benchmarks.network import UNSHAPED, Rate, two_hosts

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        train_arguments = ["--module", "benchmarks.restart", "--train", "--folder", str(folder)]
        train_arguments += ["--preset", options.preset, "--tokens", str(options.tokens), "--stage", str(options.stage)]
        train_arguments += ["--peer-copies"] if options.peer_copies else []
        train_arguments += ["--skip-init"] if options.skip_init else []
        flags = ["--max-restarts", "3", *(["--fork-server"] if options.fork_server else [])]
        hosts = stack.enter_context(two_hosts(Rate(UNSHAPED))) if scenario != "rank" else [None]
        nodes, secret = [], secrets.token_hex(32)
        stack.callback(end_all, nodes, str(folder))
        for number, host in enumerate(hosts):
            inside = ["ip", "netns", "exec", host.namespace] if host is not None else []
            of_node = ["--nproc", "2" if host is None else "1"]
            environment = {**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1", "ONEFOLD_NODE": str(number)}
            environment[JOB_SECRET] = secret
            if host is not None:
                of_node += ["--nnodes", "1:2", "--master_addr", hosts[0].address]
                environment["GLOO_SOCKET_IFNAME"] = host.interface
            command = [sys.executable, "-m", "benchmarks.restart", "--launcher", str(number), "--folder", str(folder)]
            with open(folder / f"log.{number}", "w") as log:
                arguments = [*flags, *of_node, *train_arguments]
                nodes.append(
                    subprocess.Popen([*inside, *command, "--", *arguments], env=environment, stdout=log, stderr=log)
                )
        # Two copies have begun, so that the first of them is complete.
        last = (2 if options.peer_copies else 1) * SAVE_EVERY
        wait_for(lambda: len(steps := read(folder / "pids.0.1")) and steps[-1]["steps"] > last, folder)
        victim = read(folder / "pids.0.1")[-1]["pid"]
        died = time.time()
        if scenario == "rank":
            os.kill(victim, signal.SIGKILL)
        elif scenario == "node-killed":
            for pid in pids_of(str(folder), node="1"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            subprocess.run(["ip", "-n", hosts[1].namespace, "link", "set", hosts[1].interface, "down"], check=True)
        wait_for(lambda: read(folder / "times.1"), folder)
        time.sleep(0.5)  # the other rank writes its times
        times = read(folder / "times.1")
        assert all(of_rank["resumed"] >= last - SAVE_EVERY > 0 or not options.peer_copies for of_rank in times), times
        events = [event for event in read(folder / "launcher.0") if event["at"] > died]
        at = {"noticed": min(event["at"] for event in events if event["event"] == "noticed")}
        at["rendezvous"] = next(event["at"] for event in events if event["event"] == "rendezvous")
        ended = [event["at"] for event in events if event["event"] == "ended" and event["at"] < at["rendezvous"]]
        at["ended"] = min(end for end in ended if end >= at["noticed"])
        for phase in PHASES[3:]:
            at[phase] = max(of_rank[phase] for of_rank in times)
        seconds, before = {}, died
        for phase in PHASES:
            seconds[phase], before = at[phase] - before, at[phase]
        return {**seconds, "total": before - died}


def wait_for(condition: Any, folder: Path, seconds: float = 240.0) -> None:
    """Wait until a condition is met, or raise with the logs of the launchers."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("log.*")))
            raise SystemExit(f"the job has not made progress within {seconds:g} s:\n{logs}")
        time.sleep(0.05)


def pids_of(mark: str, node: str | None = None) -> Iterator[int]:
    """Return the processes of the job, or of one of its nodes."""
    wanted = {f"{MARK}={mark}", *([f"ONEFOLD_NODE={node}"] if node is not None else [])}
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdecimal() and wanted <= set((path / "environ").read_text(errors="replace").split("\0")):
                yield int(path.name)


def end_all(nodes: list[subprocess.Popen[bytes]], mark: str) -> None:
    """Kill all processes of the job."""
    for pid in pids_of(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for node in nodes:
        node.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    add = parser.add_argument
    add("--preset", default="109m", help="model (default: %(default)s)")
    add("--scenarios", default=",".join(SCENARIOS), help="comma-separated (default: %(default)s)")
    add("--peer-copies", action="store_true", help="resume from peer copies, and save nothing")
    add("--skip-init", action="store_true", help="build the model without initial values at a restart")
    add("--fork-server", action="store_true", help="fork the ranks, as `onefold launch --fork-server`")
    add("--rounds", type=int, default=3)
    add("--tokens", type=int, default=64, help="tokens of a rank and step")
    add("--stage", type=int, default=2)
    add("--disk", help="folder of the checkpoints (default: that of temporary files)")
    add("--report", metavar="FILE")
    add("--folder", type=Path, help=argparse.SUPPRESS)
    add("--train", action="store_true", help=argparse.SUPPRESS)
    add("--launcher", help=argparse.SUPPRESS)
    add("arguments", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.train:
        train(options)
    if options.launcher is not None:
        return launch(options)
    from benchmarks.table import describe_run, format_table

    rows = []
    for scenario in options.scenarios.split(","):
        rounds = [measure(options, scenario) for _ in range(options.rounds)]
        for phases in rounds:
            print(scenario, " ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items()), flush=True)
        medians = [statistics.median(phases[name] for phases in rounds) for name in (*PHASES, "total")]
        most = max(phases["total"] for phases in rounds)
        rows.append([scenario, *(f"{seconds:.1f}" for seconds in medians), f"{most:.1f}"])
    table = format_table(["fault", *PHASES, "total", "longest"], rows)
    details = {
        "job": f"GPT {options.preset}, stage {options.stage}, 2 gloo ranks of one thread, fp32, "
        f"{options.tokens} tokens a rank and step, a {'peer copy' if options.peer_copies else 'checkpoint'} every "
        f"{SAVE_EVERY} steps",
        "columns": f"seconds, the median of {options.rounds} faults; phases end with the event of their name",
    }
    text = describe_run("Restarts", "benchmarks.restart", details) + "\n" + table + "\n"
    print(text)
    if options.report:
        Path(options.report).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
