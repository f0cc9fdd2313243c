"""Run `onefold launch`: find this node's rank in the job, then start its ranks.

Hostfiles, `--include` and `--exclude` are in DeepSpeed's formats. A node is a machine, and a slot one of its GPUs.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from onefold.redaction import redact_command
from onefold.tools.cli.pod_environment import fill_from_pod
from onefold.tools.cli.ranks import Job, program_command, python_command, run_ranks
from onefold.tools.cli.ssh_launch import SshOptions, exported, run_on_nodes
from onefold.tools.cli.usage import DEFAULT_HOSTFILE, DEFAULT_PORT, UsageError

Slots = tuple[int, ...]
Nodes = dict[str, Slots]

LINE = re.compile(r"^(?P<node>\S+)\s+slots=(?P<slots>\d+)$")


def launch(options: argparse.Namespace) -> int:
    """Run `onefold launch`."""
    check_script(options)
    fill_from_pod(options, os.environ)
    if options.ssh:
        return _launch_by_ssh(options)
    job = replace(job_of_this_node(options), forks_ranks=options.fork_server)
    check_port(job)
    if not options.quiet:
        ranks = f"{job.num_ranks} rank{'s' * (job.num_ranks > 1)}"
        print(f"onefold: starting {ranks} of {options.script}", file=sys.stderr, flush=True)
    return run_ranks(command_of_ranks(options), job)


def check_script(options: argparse.Namespace) -> None:
    """Raise UsageError if the script, the module or the program of the ranks does not exist."""
    if options.module and options.no_python:
        raise UsageError("--module and --no_python exclude each other. Give one of them.")
    if options.fork_server and options.no_python:
        raise UsageError("--fork-server starts Python scripts only. Leave it out, or leave --no_python out.")
    if not options.module and not options.no_python and not Path(options.script).is_file():
        raise UsageError(f"{options.script}: no such script. Give --module if it is a module.")
    if options.module and not _is_importable(options.script.partition(".")[0]):
        raise UsageError(f"--module {options.script}: no such module")
    if options.no_python and shutil.which(options.script) is None:
        raise UsageError(f"{options.script}: no such program")


def command_of_ranks(options: argparse.Namespace) -> list[str]:
    """Return the command that every rank runs."""
    if options.no_python:
        return program_command(options.script, *options.arguments)
    local_rank = options.passes_local_rank
    return python_command(options.script, *options.arguments, is_module=options.module, local_rank=local_rank)


def _launch_by_ssh(options: argparse.Namespace) -> int:
    """Start the launchers of all nodes of the hostfile. This node, if it is one of them, needs no ssh."""
    if options.hostfile is None and not Path(DEFAULT_HOSTFILE).is_file():
        raise UsageError("--ssh needs a --hostfile with the nodes")
    if options.node_rank is not None:
        raise UsageError("--ssh starts all nodes, so --node_rank has no effect. Leave it out.")
    listed = read_hostfile(options.hostfile or DEFAULT_HOSTFILE)
    nodes = limit(choose(listed, options.include, options.exclude), options.num_nodes, options.num_gpus)
    jobs = jobs_of_nodes(options, nodes)
    settings = SshOptions(
        arguments=shlex.split(options.ssh_args),
        environment=exported([name for name in options.export.split(",") if name]),
        local=frozenset(name for name in nodes if find_this_node({name: ()}) is not None),
    )
    if not options.quiet:
        print(f"onefold: starting {options.script} on {', '.join(nodes)}", file=sys.stderr, flush=True)
    return run_on_nodes(jobs, command_of_ranks(options), settings)


def jobs_of_nodes(options: argparse.Namespace, nodes: Mapping[str, Slots]) -> dict[str, Job]:
    """Return the job of each node of a hostfile."""
    jobs = {
        name: job_of_this_node(argparse.Namespace(**{**vars(options), "node_rank": rank, "ssh": True}))
        for rank, name in enumerate(nodes)
    }
    return {name: replace(job, forks_ranks=options.fork_server) for name, job in jobs.items()}


def _is_importable(package: str) -> bool:
    """Return whether the ranks can import this package. Editable installs have finders of their own."""
    if package in (*sys.builtin_module_names, *sys.stdlib_module_names, "__main__"):
        return True
    return PathFinder.find_spec(package, [str(Path.cwd())]) is not None or find_spec(package) is not None


def check_port(job: Job) -> None:
    """Raise UsageError if the given port cannot be opened on this node."""
    if job.master_port is None or job.node_rank != 0:
        return
    if not 0 < job.master_port < 65536:
        raise UsageError(f"--master_port {job.master_port} is not a port. Give a number from 1 to 65535.")
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", job.master_port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = "Leave --master_port out to use a free one." if job.num_nodes == 1 else "Give another one."
                raise UsageError(f"--master_port {job.master_port} is in use on this node. {other}") from error
            if error.errno == errno.EACCES:
                raise UsageError(f"--master_port {job.master_port}: permission denied. Give one above 1023.") from error


def job_of_this_node(options: argparse.Namespace) -> Job:
    """Return the ranks that this node starts, from the flags and the hostfile."""
    for flag in ("num_gpus", "num_nodes"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be at least 1")
    hostfile = options.hostfile or (DEFAULT_HOSTFILE if Path(DEFAULT_HOSTFILE).is_file() else None)
    if hostfile is not None:
        return _in_hostfile(read_hostfile(hostfile), options)
    num_nodes = options.num_nodes or 1
    if num_nodes == 1:
        return _alone(options)
    if options.min_nodes is not None:
        return _elastic(options)
    if options.node_rank is None or options.master_addr is None:
        raise UsageError(
            f"--num_nodes {num_nodes} needs --node_rank (0 to {num_nodes - 1}, different on each node) and "
            "--master_addr (node 0), or a --hostfile"
        )
    _check_node_rank(options.node_rank, num_nodes)
    if options.include or options.exclude:
        raise UsageError("--include and --exclude need a --hostfile when there are several nodes")
    port = options.master_port or DEFAULT_PORT
    num_ranks = options.num_gpus or _num_devices()
    return Job(num_ranks, num_nodes, options.node_rank, options.master_addr, port, None, options.max_restarts)


def _alone(options: argparse.Namespace) -> Job:
    _check_node_rank(options.node_rank or 0, 1)
    num_ranks, visible = options.num_gpus or _num_devices(), None
    if options.include or options.exclude:
        nodes = choose({"localhost": tuple(range(_num_devices()))}, options.include, options.exclude)
        slots = limit(nodes, None, options.num_gpus)["localhost"]
        num_ranks, visible = len(slots), ",".join(map(str, slots))
    return Job(num_ranks, 1, 0, options.master_addr, options.master_port, visible, options.max_restarts)


def _elastic(options: argparse.Namespace) -> Job:
    """Return the ranks of a node of a job without a list of nodes, which needs at least `min_nodes` of them."""
    limits = f"--nnodes {options.min_nodes}:{options.num_nodes}"
    if options.master_addr is None:
        raise UsageError(f"{limits} needs --master_addr: the node that hosts the store of the job, or a --hostfile")
    if options.include or options.exclude:
        raise UsageError("--include and --exclude need a --hostfile when there are several nodes")
    node_rank = options.node_rank
    if node_rank is None:
        node_rank = 0 if _is_own_address(options.master_addr) else 1
    _check_node_rank(node_rank, options.num_nodes)
    return Job(
        options.num_gpus or _num_devices(),
        options.num_nodes,
        node_rank,
        options.master_addr,
        options.master_port or DEFAULT_PORT,
        max_restarts=options.max_restarts,
        min_nodes=options.min_nodes,
    )


def _in_hostfile(listed: Nodes, options: argparse.Namespace) -> Job:
    nodes = limit(choose(listed, options.include, options.exclude), options.num_nodes, options.num_gpus)
    names = list(nodes)
    node_rank = options.node_rank if options.node_rank is not None else find_this_node(nodes)
    master_addr = options.master_addr or (names[0] if len(names) > 1 else None)
    if len(names) > 1 and node_rank in (None, 0) and not options.ssh:
        others = "\n".join(f"  {name}: {_command_for(rank, master_addr)}" for rank, name in enumerate(names))
        print(f"onefold: the job has {len(names)} nodes. Run on each:\n{others}", file=sys.stderr, flush=True)
    if node_rank is None:
        raise UsageError(f"this node is not one of {', '.join(names)}. Give its --node_rank.")
    _check_node_rank(node_rank, len(names))
    slots = nodes[names[node_rank]]
    port = options.master_port or (DEFAULT_PORT if len(names) > 1 else None)
    visible = ",".join(map(str, slots))
    least = options.min_nodes
    return Job(len(slots), len(names), node_rank, master_addr, port, visible, options.max_restarts, least)


def _command_for(node_rank: int, master_addr: str | None) -> str:
    """Return the command line for node `node_rank`."""
    given = sys.argv[sys.argv.index("launch") + 1 :] if "launch" in sys.argv else sys.argv[1:]
    added = [] if "--master_addr" in given else ["--master_addr", str(master_addr)]
    if "--node_rank" in given:
        given[given.index("--node_rank") + 1] = str(node_rank)
    else:
        added = ["--node_rank", str(node_rank), *added]
    return shlex.join(redact_command(["onefold", "launch", *added, *given]))


def _check_node_rank(node_rank: int, num_nodes: int) -> None:
    if not 0 <= node_rank < num_nodes:
        raise UsageError(f"--node_rank {node_rank} does not exist. Give a rank from 0 to {num_nodes - 1}.")


def _num_devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def read_hostfile(path: str | Path) -> Nodes:
    """Read the nodes of a hostfile with their slots. A line is `node1 slots=8`; `#` starts a comment."""
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f"hostfile {path}: not a file")
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"hostfile {path}: not a text file") from error
    return parse_hostfile(lines, f"hostfile {path}")


def parse_hostfile(lines: Iterable[str], name: str = "hostfile") -> Nodes:
    """Return the nodes of a hostfile in order, each with slots 0 to n-1."""
    nodes: Nodes = {}
    for number, line in enumerate(lines, start=1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        match = LINE.match(line)
        if match is None:
            raise UsageError(f"{name}, line {number}: `{line}` is not of the form `node1 slots=8`")
        if match["node"] in nodes:
            raise UsageError(f"{name}, line {number}: {match['node']} is listed twice")
        if len(match["slots"]) > 4:
            raise UsageError(f"{name}, line {number}: {match['slots'][:20]} slots exceed the limit for a node")
        nodes[match["node"]] = tuple(range(int(match["slots"])))
    if not nodes:
        raise UsageError(f"{name} lists no node")
    return nodes


def parse_choice(text: str) -> dict[str, Slots | None]:
    """Parse `node1:0,2@node2` to {node1: (0, 2), node2: None}; None means every slot."""
    choice: dict[str, Slots | None] = {}
    for part in text.split("@"):
        node, colon, slots = part.strip().partition(":")
        try:
            chosen = tuple(sorted({int(slot) for slot in slots.split(",")})) if colon else None
        except ValueError:
            raise UsageError(f"`{part}` is not of the form `node1` or `node1:0,2` (join several by @)") from None
        if not node or node in choice:
            raise UsageError(f"`{text}` names a node twice or not at all. Name each node once, joined by @.")
        choice[node] = chosen
    return choice


def choose(nodes: Mapping[str, Slots], include: str = "", exclude: str = "") -> Nodes:
    """Return the chosen nodes and slots, in the order of the hostfile."""
    if include and exclude:
        raise UsageError("--include and --exclude exclude each other. Give one of them.")
    choice = parse_choice(include or exclude) if include or exclude else {}
    for node, slots in choice.items():
        if node not in nodes:
            raise UsageError(f"{node} is not among the nodes: {', '.join(nodes)}")
        unknown = sorted(set(slots or ()) - set(nodes[node]))
        if unknown:
            raise UsageError(f"{node} has no slot {unknown[0]}, only {', '.join(map(str, nodes[node]))}")
    kept: Nodes = {}
    for node, slots in nodes.items():
        listed = (choice[node] or slots) if node in choice else ()
        if left := tuple(slot for slot in slots if (slot in listed) == bool(include)):
            kept[node] = left
    if not kept:
        raise UsageError("--include and --exclude leave no slot. Name at least one slot to use.")
    return kept


def limit(nodes: Mapping[str, Slots], num_nodes: int | None, num_slots: int | None) -> Nodes:
    """Return the first `num_nodes` nodes, each with its first `num_slots` slots."""
    if num_nodes is not None and num_nodes > len(nodes):
        raise UsageError(f"--num_nodes {num_nodes}, but there are only {len(nodes)} nodes: {', '.join(nodes)}")
    kept = dict(list(nodes.items())[:num_nodes])
    for node, slots in kept.items():
        if num_slots is not None and num_slots > len(slots):
            raise UsageError(f"--num_gpus {num_slots}, but {node} has only {len(slots)} slots")
    return {node: slots[:num_slots] for node, slots in kept.items()}


def find_this_node(nodes: Mapping[str, Slots]) -> int | None:
    """Return the index of this node by its name or one of its addresses, or None if it is not listed."""
    own_names = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    tests = (own_names.__contains__, _is_own_address)
    return next((place for is_this_node in tests for place, node in enumerate(nodes) if is_this_node(node)), None)


def _is_own_address(node: str) -> bool:
    """Return whether an address of `node` belongs to this machine: only then can a socket be bound to it."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(node, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
