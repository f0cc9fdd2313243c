"""`onefold launch`: start a script on every GPU of this host, as one node of one or of many."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from onefold.cli.hosts import HostError, Hosts, choose, find_this_host, limit, read_hostfile

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500

DESCRIPTION = """\
Start a script on every GPU of this host (one process where there is no GPU), by torch's elastic agent. The
script finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment; onefold.initialize
reads them. When a rank fails, you see its traceback, and the command ends with its exit code."""

EPILOG = """\
examples:
  onefold launch train.py --deepspeed_config ds_config.json      every GPU of this host
  onefold launch --nproc 4 train.py                              four ranks, on GPUs 0 to 3, or on the CPU
  onefold launch --include localhost:1,3 train.py                two ranks, on GPUs 1 and 3
  onefold launch --module package.train --epochs 3               as `python -m package.train --epochs 3`

  two hosts, eight GPUs each; run the same command on both, with its own --node_rank:
  onefold launch --num_nodes 2 --node_rank 0 --master_addr host1 train.py

  the same from a hostfile (lines such as `host1 slots=8`); each host finds its own place in it:
  onefold launch --hostfile hosts train.py
"""


@dataclass(frozen=True)
class Place:
    """Where this host stands in the job."""

    num_ranks: int
    num_nodes: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    visible_devices: str | None = None
    """What CUDA_VISIBLE_DEVICES is set to; None leaves it as it is."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="start your script on every GPU",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num_gpus", "--nproc", "--num_accelerators", "--nproc_per_node", "--nproc-per-node", type=int, metavar="N",
        dest="num_gpus", help="ranks on each host (default: its GPUs, or 1 where there are none)")  # fmt: skip
    add("--num_nodes", "--nnodes", type=int, metavar="N", help="hosts that take part (default: 1, or the hostfile's)")
    add("--node_rank", "--node-rank", type=int, metavar="K", help="which of the hosts this is, from 0")
    add("--master_addr", "--master-addr", metavar="HOST", help="name or address of host 0")
    add("--master_port", "--master-port", type=int, metavar="PORT",
        help=f"port on host 0 (default: a free one; {DEFAULT_PORT} with several hosts)")  # fmt: skip
    add("-H", "--hostfile", metavar="FILE", help=f"hosts, one a line: `host1 slots=8` (default: {DEFAULT_HOSTFILE})")
    add("-i", "--include", default="", metavar="CHOICE", help="use only these: host1:0,2@host2")
    add("-e", "--exclude", default="", metavar="CHOICE", help="use all but these: host1:0,2@host2")
    add("--max-restarts", "--max_restarts", type=int, default=0, metavar="N",
        help="start all ranks again after a failure, up to N times (default: 0)")  # fmt: skip
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for `python -m`")
    add("--no_python", "--no-python", action="store_true", help="SCRIPT is a program of its own, not Python")
    add("--no_local_rank", action="store_true", help=argparse.SUPPRESS)  # nothing to switch off: it is never passed
    add("script", metavar="SCRIPT", help="what every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.module and options.no_python:
        raise HostError("--module is for Python and --no_python is for everything else: give one of them")
    if not options.module and not options.no_python and not Path(options.script).is_file():
        raise HostError(f"{options.script}: there is no such script (a module needs --module)")
    if options.no_python and shutil.which(options.script) is None:
        raise HostError(f"{options.script}: there is no such program")
    place = place_of_this_host(options)
    # Only now: importing torch takes seconds, and mistakes should not wait for it.
    from onefold.cli.ranks import Job, Program, run_ranks

    if place.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.visible_devices
    arguments = tuple(options.arguments)
    if options.no_python:
        program = Program(options.script, arguments)
    elif options.module:
        program = Program.module(options.script, arguments)
    else:
        program = Program.script(options.script, arguments)
    job = Job(
        place.num_ranks, place.num_nodes, place.node_rank, place.master_addr, place.master_port, options.max_restarts
    )
    return run_ranks(program, job)


def place_of_this_host(options: argparse.Namespace) -> Place:
    """From the flags, and the hostfile where there is one."""
    for flag in ("num_gpus", "num_nodes"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise HostError(f"--{flag} {value}: must be at least 1")
    hostfile = options.hostfile or (DEFAULT_HOSTFILE if Path(DEFAULT_HOSTFILE).is_file() else None)
    if hostfile is not None:
        return _place_in_hostfile(read_hostfile(hostfile), options)
    num_nodes = options.num_nodes or 1
    if num_nodes == 1:
        return _place_alone(options)
    if options.node_rank is None or options.master_addr is None:
        raise HostError(
            f"--num_nodes {num_nodes} needs --node_rank (0 to {num_nodes - 1}, another on each host) and "
            "--master_addr (host 0), or a --hostfile to find them in"
        )
    _check_node_rank(options.node_rank, num_nodes)
    if options.include or options.exclude:
        raise HostError("--include and --exclude need a --hostfile when there are several hosts")
    port = options.master_port or DEFAULT_PORT
    return Place(options.num_gpus or _num_devices(), num_nodes, options.node_rank, options.master_addr, port)


def _place_alone(options: argparse.Namespace) -> Place:
    _check_node_rank(options.node_rank or 0, 1)
    if not options.include and not options.exclude:
        return Place(options.num_gpus or _num_devices(), 1, 0, options.master_addr, options.master_port)
    hosts = choose({"localhost": tuple(range(_num_devices()))}, options.include, options.exclude)
    slots = limit(hosts, None, options.num_gpus)["localhost"]
    return Place(len(slots), 1, 0, options.master_addr, options.master_port, ",".join(map(str, slots)))


def _place_in_hostfile(listed: Hosts, options: argparse.Namespace) -> Place:
    hosts = limit(choose(listed, options.include, options.exclude), options.num_nodes, options.num_gpus)
    names = list(hosts)
    node_rank = options.node_rank if options.node_rank is not None else find_this_host(hosts)
    master_addr = options.master_addr or (names[0] if len(names) > 1 else None)
    if len(names) > 1 and node_rank in (None, 0):
        others = "\n".join(f"  {name}: {_command_for(rank, master_addr)}" for rank, name in enumerate(names))
        print(f"onefold: {len(names)} hosts take part; run on each of them:\n{others}", file=sys.stderr, flush=True)
    if node_rank is None:
        raise HostError(f"this host is none of {', '.join(names)}; say which it is with --node_rank")
    _check_node_rank(node_rank, len(names))
    slots = hosts[names[node_rank]]
    port = options.master_port or (DEFAULT_PORT if len(names) > 1 else None)
    return Place(len(slots), len(names), node_rank, master_addr, port, ",".join(map(str, slots)))


def _command_for(node_rank: int, master_addr: str | None) -> str:
    """This command as host `node_rank` should run it."""
    given = sys.argv[sys.argv.index("launch") + 1 :] if "launch" in sys.argv else sys.argv[1:]
    added = [] if "--node_rank" in given else ["--node_rank", str(node_rank)]
    added += [] if "--master_addr" in given else ["--master_addr", str(master_addr)]
    if "--node_rank" in given:
        given[given.index("--node_rank") + 1] = str(node_rank)
    return shlex.join(["onefold", "launch", *added, *given])


def _check_node_rank(node_rank: int, num_nodes: int) -> None:
    if not 0 <= node_rank < num_nodes:
        raise HostError(f"--node_rank {node_rank}: with {num_nodes} host(s) it is from 0 to {num_nodes - 1}")


def _num_devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
