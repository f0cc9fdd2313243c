"""Training over a real network: two hosts with some ranks each, joined by one cable of a chosen rate.

The hosts are network namespaces of this machine and the cable is a pair of virtual interfaces, so every byte between
them passes through the kernel's network stack, which shapes it and counts it. Each setting runs in fresh processes; how
long a step took stands beside how many bytes left a host, as the kernel and as onefold's ledger have it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.launch import ROOT, Outcome, last_words, run_all, wait
from benchmarks.model import GPT, PRESETS, Block, ModelShape, make_batch
from benchmarks.systems import NOTHING_KEPT, SYSTEMS, Step, Workload, zero_config
from benchmarks.table import describe_run, failure_notes, format_table

HOST = "a host's ranks"
HPZ = {"zero_hpz_partition_size": HOST}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
FLAT = {"collective": "exchange"}
REFERENCE = "stage-3"
# Micro-steps, or chunks, into which a batch is divided.
NUM_PARTS = 4


@dataclass(frozen=True)
class Setting:
    """What is measured: a stage with keys of its own, or another system."""

    stage: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    micro_steps: int = 1
    """Micro-steps per step, into which the batch is divided."""


SETTINGS: dict[str, Setting] = {
    "ddp": Setting(system="ddp"),
    "fsdp2": Setting(system="fsdp2-reshard"),
    "fsdp2-bf16": Setting(system="fsdp2-reshard-bf16"),
    "stage-1": Setting(1),
    "stage-2": Setting(2),
    REFERENCE: Setting(),
    "stage-1-flat": Setting(1, own=FLAT),
    "stage-2-flat": Setting(2, own=FLAT),
    "stage-3-flat": Setting(own=FLAT),
    "stage-3-bf16": Setting(own={"node_sums_dtype": "bf16"}),
    "hpZ": Setting(zero=HPZ),
    "qwZ": Setting(zero=QWZ),
    "qgZ": Setting(zero=QGZ),
    "all-three": Setting(zero={**HPZ, **QWZ, **QGZ}),
    "micro-steps": Setting(micro_steps=NUM_PARTS),
    "chunks": Setting(own={"batch_chunks": NUM_PARTS}),
    "experts-2": Setting(own={"expert_parallel_size": 2}),
    "experts-4": Setting(own={"expert_parallel_size": 4}),
}
UNSHAPED = "unshaped"
HEADER = [
    "ranks",
    "link",
    "setting",
    "step s",
    f"{REFERENCE} / this",
    "link busy",
    "processor s",
    "left a host MB",
    "ledger MB",
    "kernel / ledger",
    "stayed MB",
    "loss",
]
NEEDS = "It needs Linux, the commands `ip` and `tc` of iproute2, and the rights of root (CAP_SYS_ADMIN, CAP_NET_ADMIN)."
EXAMPLES = f"""\
settings:
  {REFERENCE}       parameters as bf16, gathered in forward and again in backward; gradients as bf16, added inside a
                host and then across, in fp32
  stage-1, -2   parameters as bf16, gathered after the step; gradients as in {REFERENCE}
  ...-flat      onefold.collective exchange: straight between all ranks
  ...-bf16      onefold.node_sums_dtype bf16: sums cross between hosts as bf16
  hpZ           zero_hpz_partition_size: the gather of backward stays inside a host
  qwZ           zero_quantized_weights: parameters travel as 8 bits
  qgZ           zero_quantized_gradients: gradients travel as 8 bits inside a host, then as 4 bits across
  all-three     hpZ, qwZ and qgZ together
  micro-steps   {REFERENCE} with the batch in {NUM_PARTS} micro-steps (--batch {NUM_PARTS} or more)
  chunks        {REFERENCE} with the batch in {NUM_PARTS} chunks (onefold.batch_chunks)
  experts-2, -4 {REFERENCE} with onefold.expert_parallel_size (--experts 4 or more)
  ddp           PyTorch's DistributedDataParallel with autocast: gradients as fp32
  fsdp2, -bf16  PyTorch's FSDP2, which reshards; gradients as fp32, or as bf16

examples:
  python -m benchmarks.network                            all settings: no limit, then 100 mbit
  python -m benchmarks.network --rate 50mbit,1gbit        two cables
  python -m benchmarks.network --ranks 2,4                two ranks on each host, and four
  python -m benchmarks.network --settings {REFERENCE},all-three --rate 100mbit --steps 8
  python -m benchmarks.network --settings {REFERENCE},micro-steps,chunks --batch 8 --rate 1gbit
  python -m benchmarks.network --settings {REFERENCE},experts-2,experts-4 --experts 8 --rate 1gbit
  python -m benchmarks.network --report network.md        a report too, with network.png beside it

{NEEDS}
"""


class NoNetwork(RuntimeError):
    """This machine cannot have the hosts or the cable."""


@dataclass(frozen=True)
class Rate:
    """What a cable carries each way, as `tc` has it: 200mbit, 1.5gbit; or no limit but this machine's own."""

    name: str

    @property
    def bits(self) -> float | None:
        if self.name == UNSHAPED:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", self.name)
        if found is None or not float(found.group(1)):
            raise ValueError(f"{self.name!r} is no rate: write 200mbit, 1.5gbit, or {UNSHAPED}")
        return float(found.group(1)) * {"k": 1e3, "m": 1e6, "g": 1e9}[found.group(2)]


@dataclass(frozen=True)
class Host:
    """A namespace, with one end of the cable."""

    namespace: str
    address: str
    interface: str


@dataclass(frozen=True)
class Traffic:
    """Bytes that one host sent in a step: to the other one and to itself, by the kernel and by the ledger."""

    left: float
    left_by_ledger: float
    stayed: float
    stayed_by_ledger: float


@dataclass(frozen=True)
class Crossing(Outcome):
    """One run of one setting, with what each of its hosts sent and a rank's processor seconds a step."""

    processor_seconds: float = 0.0
    hosts: list[Traffic] = field(default_factory=list)

    def mean(self, kind: str) -> float:
        return statistics.mean(getattr(host, kind) for host in self.hosts)


# -- two hosts -------------------------------------------------------------------------------------------------------


@contextmanager
def two_hosts(rate: Rate) -> Iterator[list[Host]]:
    """Two namespaces that reach each other and nothing else; they are gone afterwards, whatever happens."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoNetwork(f"There is no `{command}` here. {NEEDS}")
    hosts = [Host(f"onefold-{os.getpid()}-{letter}", f"10.213.9.{n}", "cable") for n, letter in enumerate("ab", 1)]
    try:
        first, second = hosts
        for host in hosts:
            _configure("ip", "netns", "add", host.namespace)
        there = ["peer", second.interface, "netns", second.namespace]
        _configure("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth", *there)
        for host in hosts:
            inside = ["ip", "-n", host.namespace]
            _configure(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _shape(host, rate)
            _configure(*inside, "link", "set", host.interface, "up")
            # Ranks of one host reach each other by its address, which the kernel serves over the loopback.
            _configure(*inside, "link", "set", "lo", "up")
        yield hosts
    finally:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shape(host: Host, rate: Rate) -> None:
    """A token bucket: 10 ms of the rate may pass at once, and at least two of TCP's largest packets; none is lost."""
    if rate.bits is None:
        return
    burst = max(128 << 10, round(rate.bits / 8 / 100))
    bucket = ["tbf", "rate", rate.name, "burst", str(burst), "limit", str(burst + (16 << 20))]
    _configure("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", *bucket)


def _configure(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise NoNetwork(f"Two hosts cannot be made here: `{' '.join(command)}` says: {words}. {NEEDS}")


# -- one run: the parent ---------------------------------------------------------------------------------------------


def run(
    settings: list[str],
    workload: Workload,
    rate: Rate,
    timeout: float,
    shape: ModelShape | None = None,
    num_ranks: int = 2,
) -> list[Crossing]:
    """Trains in fresh processes on two fresh hosts, one setting after another.

    A shape stands in for the workload's preset; `num_ranks`: on each host.
    """
    order = {
        "settings": settings,
        "workload": dataclasses.asdict(workload),
        "shape": dataclasses.asdict(shape or PRESETS[workload.preset]),
    }
    with two_hosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(len(hosts) * num_ranks)]
        logs = [result.with_suffix(".log") for result in results]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            _start(ranks, hosts, order, results, logs)
            problem = wait(ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if problem is not None:
            rank, what = problem
            error = f"rank {rank} {what}: {last_words(logs[rank])}"
            return [Crossing(setting, error=error) for setting in settings]
        measured = [json.loads(result.read_text()) for result in results]
    return [_crossing(setting, [rank[setting] for rank in measured], workload.num_steps) for setting in settings]


def _crossing(setting: str, measured: list[dict[str, Any]], num_steps: int) -> Crossing:
    """Out of what each rank has measured."""
    num_ranks = len(measured) // 2
    by_host = [measured[:num_ranks], measured[num_ranks:]]
    return Crossing(
        setting,
        num_parameters=measured[0]["num_parameters"],
        step_seconds=[max(rank["seconds"] for rank in measured) / num_steps],
        losses=[statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in measured), strict=True)],
        processor_seconds=statistics.mean(rank["processor_seconds"] for rank in measured) / num_steps,
        hosts=[_traffic(ranks, num_steps) for ranks in by_host],
    )


def _start(
    ranks: list[subprocess.Popen[bytes]],
    hosts: list[Host],
    order: dict[str, Any],
    results: list[Path],
    logs: list[Path],
) -> None:
    """Adds each rank to `ranks` as it starts, so that an interrupt leaves none unknown."""
    for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
        node, place = divmod(rank, len(results) // len(hosts))
        host = hosts[node]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(results)),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(len(results) // len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29500",  # nobody else lives in the namespace
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = ["ip", "netns", "exec", host.namespace, sys.executable, "-c"]
        command += ["from benchmarks import network; network.work()", json.dumps(order), host.interface, str(result)]
        with log.open("wb") as output:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))


def _traffic(ranks: list[dict[str, Any]], num_steps: int) -> Traffic:
    """The interfaces are the host's, so any of its ranks has read them; each rank has a ledger of its own."""
    return Traffic(
        left=ranks[0]["left"] / num_steps,
        left_by_ledger=sum(rank["left_by_ledger"] for rank in ranks) / num_steps,
        stayed=ranks[0]["stayed"] / num_steps,
        stayed_by_ledger=sum(rank["stayed_by_ledger"] for rank in ranks) / num_steps,
    )


# -- one run: a rank -------------------------------------------------------------------------------------------------


def work() -> None:
    """What each of the processes does: `python -c ... ORDER INTERFACE RESULT`."""
    import onefold

    order, interface, result = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    workload, shape = Workload(**order["workload"]), ModelShape(**order["shape"])
    onefold.init_distributed()
    measured = {setting: _measure(SETTINGS[setting], workload, shape, interface) for setting in order["settings"]}
    result.write_text(json.dumps(measured))
    dist.destroy_process_group()


def _build(setting: Setting, workload: Workload, model: GPT) -> tuple[Step, Any]:
    """What trains on a batch, and the engine, where it is ours."""
    if setting.system is not None:
        return SYSTEMS[setting.system](lambda: model, workload), None
    import onefold

    for block in model.blocks:
        if isinstance(block, Block) and block.routed is not None:
            onefold.experts(block.routed.experts)
    num_parts = setting.micro_steps
    part = dataclasses.replace(workload, batch=workload.batch // num_parts, micro_steps=num_parts)
    config = zero_config(setting.stage, part)
    on_host = int(os.environ["LOCAL_WORLD_SIZE"])
    zero = {key: on_host if value == HOST else value for key, value in setting.zero.items()}
    config["zero_optimization"] |= {**(NOTHING_KEPT if setting.stage == 3 else {}), **zero}
    config["onefold"] = setting.own
    engine, *_ = onefold.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = []
        for some in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
            losses.append(engine(*some))
            engine.backward(losses[-1])
            engine.step()
        return torch.stack(losses).mean()

    return step, engine


def _measure(setting: Setting, workload: Workload, shape: ModelShape, interface: str) -> dict[str, Any]:
    from onefold.comm.mesh import ACROSS

    torch.manual_seed(workload.seed)
    model = GPT(shape)
    for block in model.blocks:
        block.forward = _widened(block.forward)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    step, engine = _build(setting, workload, model)
    losses = []

    def train(first: int, last: int) -> None:
        for index in range(first, last):
            seed = workload.seed + 1000 * index + dist.get_rank()
            tokens, targets = make_batch(shape, workload.batch, workload.sequence, seed, torch.device("cpu"))
            with WideProducts():
                losses.append(step(tokens, targets).item())

    def counters() -> dict[str, int]:
        rows = engine.ledger.rows() if engine is not None else []
        return {
            "left": sent_bytes(interface),
            "stayed": sent_bytes("lo"),
            "left_by_ledger": sum(row.bytes for row in rows if row.group == ACROSS),
            "stayed_by_ledger": sum(row.bytes for row in rows if row.group != ACROSS),
        }

    train(0, workload.num_warmup_steps)
    dist.barrier()
    before = counters()
    dist.barrier()  # nobody sends anything before all have read
    start, processor_start = time.perf_counter(), time.process_time()
    train(workload.num_warmup_steps, workload.num_warmup_steps + workload.num_steps)
    dist.barrier()  # nobody leaves before all have received everything
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    after = counters()
    dist.barrier()
    if engine is not None:
        engine.destroy()
    moved = {name: after[name] - before[name] for name in before}
    spent = {"seconds": seconds, "processor_seconds": processor_seconds}
    return {"num_parameters": num_parameters, "losses": losses, **spent, **moved}


class WideProducts(TorchFunctionMode):
    """Multiplies 16-bit matrices in fp32: without bf16 arithmetic a CPU is hundreds of times slower, and it would be
    all that is measured here. What travels, and what is saved for backward, keeps its 16 bits.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return _Product.apply(*args[:2])  # the model has no biases
        if function is torch.Tensor.matmul:  # of experts
            return _Product.apply(args[0], args[1].T)
        if function is functional.scaled_dot_product_attention:
            return function(*(values.float() for values in args), **kwargs).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def _widened(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is wide wherever it is called: backward, which recomputes chunks, runs outside of the mode."""

    def wide(*args: Any) -> Any:
        with WideProducts():
            return forward(*args)

    return wide


class _Product(torch.autograd.Function):
    """x times the transposed weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        of_weight = gradient.flatten(0, -2).T @ x.float().flatten(0, -2)
        return (gradient @ weight.float()).to(x.dtype), of_weight.to(weight.dtype)


def sent_bytes(interface: str) -> int:
    """What has left through an interface of this process's namespace."""
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())


# -- tables and pictures ---------------------------------------------------------------------------------------------


def summary(outcome: Outcome) -> str:
    assert isinstance(outcome, Crossing)
    left, ledger = outcome.mean("left"), outcome.mean("left_by_ledger")
    beside = f", {left / ledger:.3f} of the ledger's" if ledger else ""
    return (
        f"{outcome.step_mean:.3f} s a step, {left / 1e6:.2f} MB left each host{beside}, loss {outcome.losses[-1]:.4f}"
    )


@dataclass(frozen=True)
class Figures:
    """One setting on one cable: medians over the rounds. Bytes are a step's and a host's."""

    num_ranks: int
    link: str
    setting: str
    step_seconds: float
    speedup: float | None
    busy: float | None
    processor_seconds: float
    left: float
    left_by_ledger: float
    stayed: float
    loss: float

    @property
    def row(self) -> list[str]:
        by_ledger = self.left_by_ledger
        return [
            f"2 x {self.num_ranks}",
            self.link,
            self.setting,
            f"{self.step_seconds:.3f}",
            "-" if self.speedup is None else f"{self.speedup:.2f}",
            "-" if self.busy is None else f"{self.busy:.0%}",
            f"{self.processor_seconds:.2f}",
            f"{self.left / 1e6:.2f}",
            f"{by_ledger / 1e6:.2f}" if by_ledger else "-",
            f"{self.left / by_ledger:.3f}" if by_ledger else "-",
            f"{self.stayed / 1e6:.2f}",
            f"{self.loss:.5f}",
        ]


def collect(outcomes: dict[str, list[Outcome]], jobs: dict[str, tuple[str, Rate, int]]) -> list[Figures]:
    found = []
    for name, rounds in outcomes.items():
        setting, rate, num_ranks = jobs[name]
        measured = [outcome for outcome in rounds if isinstance(outcome, Crossing) and not outcome.error]
        if not measured:
            continue
        reference = outcomes.get(label(REFERENCE, rate, num_ranks), [])
        speedups = [
            theirs.step_mean / mine.step_mean
            for mine, theirs in zip(rounds, reference, strict=False)
            if not mine.error and not theirs.error
        ]
        seconds = statistics.median(outcome.step_mean for outcome in measured)
        left = statistics.median(outcome.mean("left") for outcome in measured)
        found.append(
            Figures(
                num_ranks=num_ranks,
                link=rate.name,
                setting=setting,
                step_seconds=seconds,
                speedup=statistics.median(speedups) if speedups else None,
                busy=None if rate.bits is None else left * 8 / rate.bits / seconds,
                processor_seconds=statistics.median(outcome.processor_seconds for outcome in measured),
                left=left,
                left_by_ledger=statistics.median(outcome.mean("left_by_ledger") for outcome in measured),
                stayed=statistics.median(outcome.mean("stayed") for outcome in measured),
                loss=measured[-1].losses[-1],
            )
        )
    return found


def label(setting: str, rate: Rate, num_ranks: int) -> str:
    return f"{setting}, {rate.name}, 2 x {num_ranks} ranks"


def draw(figures: list[Figures], path: Path) -> None:
    """Seconds a step on each cable, and bytes that leave a host, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = [dataclasses.replace(figure, link=f"{figure.link}, 2 x {figure.num_ranks} ranks") for figure in figures]
    links = list(dict.fromkeys(figure.link for figure in figures))
    settings = list(dict.fromkeys(figure.setting for figure in figures))
    times, volume = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=[3, 2], layout="constrained")[1]
    width = 0.8 / len(links)
    for index, link in enumerate(links):
        mine = [figure for figure in figures if figure.link == link]
        places = [settings.index(figure.setting) + (index - (len(links) - 1) / 2) * width for figure in mine]
        bars = times.bar(places, [figure.step_seconds for figure in mine], width * 0.95, label=link)
        times.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    times.set_title("seconds a step, by what the link carries each way")
    times.legend(frameon=False)
    mine = [figure for figure in figures if figure.link == links[-1]]
    places = [settings.index(figure.setting) for figure in mine]
    for offset, kind, name in ((-0.2, "left", "kernel's counter"), (0.2, "left_by_ledger", "ledger")):
        heights = [getattr(figure, kind) / 1e6 for figure in mine]
        bars = volume.bar([place + offset for place in places], heights, 0.38, label=name)
        volume.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    volume.set_title(f"MB that leave a host in a step ({links[-1]})")
    volume.legend(frameon=False)
    for axes in (times, volume):
        axes.set_xticks(range(len(settings)), settings)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    pyplot.savefig(path, dpi=120)


COLUMNS = (
    "bytes are one host's and one step's; left a host: tx_bytes of the cable's end; ledger: rows `across` of its "
    "ranks; stayed: tx_bytes of the loopback; link busy: what left, of what the link carries in that time (its rate "
    "also pays for the headers of every 1,500 bytes, 4%, which the kernel's counter sees once a large packet); "
    "processor s: a rank's in a step"
)


# -- the command -----------------------------------------------------------------------------------------------------


def parse_rates(text: str) -> list[Rate]:
    rates = [Rate(name) for name in dict.fromkeys(text.split(","))]
    for rate in rates:
        try:
            _ = rate.bits
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return rates


def set_by_default() -> list[str]:
    """All but those that divide the batch, which is a single sequence by default, or experts, which are none."""
    return [
        name
        for name, setting in SETTINGS.items()
        if setting.micro_steps == 1 and not setting.own.keys() & {"batch_chunks", "expert_parallel_size"}
    ]


def parse_settings(text: str) -> list[str]:
    chosen = list(dict.fromkeys(text.split(",")))
    for name in chosen:
        if name not in SETTINGS:
            raise argparse.ArgumentTypeError(f"unknown setting {name!r}; known: {', '.join(SETTINGS)}")
    return chosen


def parse_ranks(text: str) -> list[int]:
    chosen = list(dict.fromkeys(text.split(",")))
    if not all(each.isdecimal() and int(each) > 0 for each in chosen):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of ranks, as in 2,4")
    return [int(each) for each in chosen]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="25m", help="the model (default: %(default)s)")
    parser.add_argument(
        "--rate",
        type=parse_rates,
        default=f"{UNSHAPED},100mbit",
        help=f"what the cable carries each way, one or more: 200mbit, 1.5gbit, {UNSHAPED} (default: %(default)s)",
    )
    parser.add_argument(
        "--settings", type=parse_settings, default=",".join(set_by_default()), help="one or more (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=parse_ranks, default="2", help="ranks on each host, one or more (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step (default: %(default)s)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=0, help="MLPs in each block, of which a token uses two")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a run (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each; medians are shown (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="also write a dated report here, and a picture beside it")
    arguments = parser.parse_args()
    for name in ("batch", "steps", "warmup", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    chosen = [SETTINGS[name] for name in arguments.settings]
    if any("expert_parallel_size" in each.own for each in chosen) and not arguments.experts:
        parser.error("--experts must be given for settings that divide experts")
    if arguments.batch % NUM_PARTS and any(each.micro_steps > 1 or "batch_chunks" in each.own for each in chosen):
        parser.error(f"--batch must be a multiple of {NUM_PARTS} for micro-steps and chunks")
    longest = PRESETS[arguments.preset].max_sequence
    if not 1 <= arguments.sequence <= longest:
        parser.error(f"--sequence must be 1 to {longest} for {arguments.preset}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # An end by signal takes the same way out as an interrupt: through every `finally`.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    workload = Workload(
        preset=arguments.preset,
        dtype="bf16",
        batch=arguments.batch,
        sequence=arguments.sequence,
        num_steps=arguments.steps,
        num_warmup_steps=arguments.warmup,
        device="cpu",
    )
    jobs = {
        label(setting, rate, num_ranks): (setting, rate, num_ranks)
        for num_ranks in arguments.ranks
        for rate in arguments.rate
        for setting in arguments.settings
    }

    shape = PRESETS[workload.preset]
    shape = dataclasses.replace(
        shape, num_experts=arguments.experts, expert_width=4 * shape.width, experts_per_token=2, grouped=False
    )

    def run_one(setting: str, rate: Rate, num_ranks: int) -> Outcome:
        return run([setting], workload, rate, arguments.timeout, shape, num_ranks)[0]

    try:
        outcomes = run_all(
            list(jobs),
            arguments.rounds,
            lambda name: run_one(*jobs[name]),
            summary,
        )
    except NoNetwork as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; hosts and ranks are gone")
    figures = collect(outcomes, jobs)
    table = format_table(HEADER, [figure.row for figure in figures]) + failure_notes(outcomes)
    num_parameters = max(outcome.num_parameters for rounds in outcomes.values() for outcome in rounds)
    details = {
        "model": f"GPT {arguments.preset}{f' with {arguments.experts} experts' if arguments.experts else ''}, "
        f"{num_parameters / 1e6:.1f}M parameters, bf16, products computed in fp32",
        "job": f"2 network namespaces joined by a veth pair, gloo ranks in each, one thread each, "
        f"{arguments.batch} x {arguments.sequence} tokens a rank and step; {arguments.rounds} rounds of "
        f"{arguments.steps} timed steps after {arguments.warmup}",
        "stage 3": "persistence threshold, live and reuse limits 0: every unit is gathered in forward and in backward",
        "link": "a token bucket (tbf) on both ends of the pair; headers count against its rate",
        "columns": COLUMNS,
    }
    print("\n" + "\n".join(f"{name}: {value}" for name, value in details.items()) + f"\n\n{table}")
    if arguments.report:
        title = f"Between two hosts: {arguments.preset}, bf16"
        text = f"{describe_run(title, 'benchmarks.network', details)}\n{table}\n"
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        if figures:
            picture = arguments.report.with_suffix(".png")
            draw(figures, picture)
            text += f"\n![Seconds a step and bytes that leave a host, by setting]({picture.name})\n"
        arguments.report.write_text(text)
        print(f"\nwritten: {arguments.report}")


if __name__ == "__main__":
    main()
