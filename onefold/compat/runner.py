"""The command `deepspeed`: onefold's launcher with the flags of DeepSpeed's.

On one node it is `onefold launch`. With a hostfile of several it starts itself on each of them by ssh, with the
variables of `.deepspeed_env` and of this shell that matter to a run. With `--no_ssh`, it is started on each node by
other means.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from onefold.redaction import redact
from onefold.tools.cli.launch import (
    check_script,
    choose,
    command_of_ranks,
    jobs_of_nodes,
    launch,
    limit,
    parse_choice,
    parse_hostfile,
    read_hostfile,
)
from onefold.tools.cli.ssh_launch import SshOptions, run_on_nodes
from onefold.tools.cli.usage import DEFAULT_HOSTFILE, DEFAULT_PORT, UsageError

DLTS_HOSTFILE = DEFAULT_HOSTFILE
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "OMP_NUM_THREADS", "TORCH_"]
PDSH_MAX_FAN_OUT = 1024

_SSH = ("pdsh", "ssh")
# Flags that ask for what this launcher does not do, with what to do instead.
_REFUSED = {
    "autotuning": "use `onefold tune` to search for a config",
    "elastic_training": "start `onefold launch --nnodes MIN:MAX --max-restarts N` on each node",
    "launcher_args": "options of ssh belong in ~/.ssh/config",
    "enable_each_rank_log": "redirect the output of the ranks in your script",
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on every GPU of this node, or of all nodes of a hostfile. onefold's launcher with "
        "DeepSpeed's flags; `onefold launch` is the same without ssh.",
        epilog="examples:\n  deepspeed train.py --deepspeed_config ds_config.json\n"
        "  deepspeed --num_gpus 2 train.py\n  deepspeed --include localhost:1,3 train.py\n"
        "  deepspeed --hostfile hosts train.py        lines such as `node1 slots=8`; reaches the nodes by ssh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help="list of nodes, lines such as `node1 slots=8`")
    add("-i", "--include", default="", help="nodes and slots to use, e.g. node1:0,2@node2")
    add("-e", "--exclude", default="", help="nodes and slots not to use, e.g. node1:0,2@node2")
    add("--num_nodes", type=int, default=-1, help="number of nodes, from the first of the hostfile")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each node")
    add("--master_addr", default="", help="address of the first node")
    add("--master_port", type=int, default=DEFAULT_PORT, help="port on the first node")
    add("--node_rank", type=int, default=-1, help="rank of this node, with --no_ssh")
    add("--launcher", default="pdsh", help="connection to other nodes: pdsh or ssh (both use ssh)")
    add("--no_ssh", action="store_true", help="do not start the command on the other nodes")
    add("--no_ssh_check", action="store_true", help="do not try ssh before the job")
    add("--ssh_port", type=int, help="port of the ssh servers")
    add("--venv_script", help="script to source on each node first")
    add("--force_multi", action="store_true", help="use ssh also for a single node of a hostfile")
    add("--module", action="store_true", help="the script is a module, as for `python -m`")
    add("--no_python", action="store_true", help="the script is a program, not a Python script")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--save_pid", action="store_true", help="write the process id to a file next to the script")
    add("-q", "--quiet", action="store_true", help="print errors only")
    add("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    add("--bind_cores_to_rank", action="store_true", help="ignored: each rank always gets its share of threads")
    add("--bind_core_list", help="ignored, see --bind_cores_to_rank")
    add("--min_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add("--max_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add("--elastic_training", action="store_true", help=argparse.SUPPRESS)
    add("--autotuning", default="", choices=["tune", "run"], help=argparse.SUPPRESS)
    add("--launcher_args", default="", help=argparse.SUPPRESS)
    add("--enable_each_rank_log", default="None", help=argparse.SUPPRESS)
    add("user_script", metavar="SCRIPT", help="the script that every rank runs")
    add("user_args", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(None if args is None else list(args))


def main(args: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong use, otherwise that of the rank that failed. From Python wrong use raises."""
    options = parse_args(args)
    try:
        _check(options)
        os.environ |= read_environment()
        if options.save_pid:
            Path(f"{options.user_script}.pid").write_text(f"{os.getpid()}\n")
        nodes = _nodes(options)
        if options.no_ssh or not (len(nodes) > 1 or (nodes and options.force_multi)):
            return launch(_here(options, nodes))
        return _run_everywhere(nodes, options)
    except UsageError as error:
        if args is not None:
            raise
        print(f"deepspeed: {redact(str(error))}", file=sys.stderr)
        return 2


def fetch_hostfile(hostfile_path: str) -> dict[str, int]:
    """Return the slots of each node in a hostfile; none if there is no such file."""
    if not Path(hostfile_path).is_file():
        return {}
    return {node: len(slots) for node, slots in read_hostfile(hostfile_path).items()}


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    return {node: len(slots) for node, slots in parse_hostfile(hostfile_lines).items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the slots of each node that `node1:0,2@node2` selects. A node may be named several times."""
    if include_str and exclude_str:
        raise UsageError("include_str and exclude_str exclude each other. Give one of them.")
    listed: dict[str, set[int]] = {}
    for part in (include_str or exclude_str).split("@") if include_str or exclude_str else ():
        for node, slots in parse_choice(part).items():
            if node not in host_info:
                raise UsageError(f"Hostname '{node}' not found in the hostfile")
            for slot in slots or ():
                if slot not in host_info[node]:
                    raise UsageError(f"No slot '{slot}' specified on host '{node}'")
            listed.setdefault(node, set()).update(host_info[node] if slots is None else slots)
    left = {
        node: [slot for slot in slots if (slot in listed.get(node, ())) == bool(include_str)]
        for node, slots in host_info.items()
    }
    return {node: slots for node, slots in left.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    pool = {node: list(range(num_slots)) for node, num_slots in resource_pool.items()}
    return parse_resource_filter(pool, include_str=inclusion, exclude_str=exclusion)


def encode_world_info(world_info: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def read_environment() -> dict[str, str]:
    """Return the variables of `.deepspeed_env` files in the home folder and here, or of the file in `DS_ENV_FILE`."""
    places = [Path(folder) / DEEPSPEED_ENVIRONMENT_NAME for folder in DEEPSPEED_ENVIRONMENT_PATHS]
    found: dict[str, str] = {}
    for path in (path for path in places if path.is_file()):
        for line in path.read_text().splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith("#"):
                found[name] = value
    return found


def _check(options: argparse.Namespace) -> None:
    for name, reason in _REFUSED.items():
        if getattr(options, name) not in ("", "None", False):
            raise UsageError(f"--{name} is not supported: {reason}. Leave it out.")
    if (options.include or options.exclude) and (options.num_nodes, options.num_gpus) != (-1, -1):
        raise UsageError("--include and --exclude already choose the slots. Leave --num_nodes and --num_gpus out.")
    if options.launcher.lower() not in _SSH and not options.no_ssh:
        raise UsageError(
            f"--launcher {options.launcher} is not supported, only ssh. With another launcher, start `deepspeed "
            "--no_ssh --node_rank K --master_addr NODE --num_nodes N` on every node."
        )


def _nodes(options: argparse.Namespace) -> Mapping[str, tuple[int, ...]]:
    """Return the nodes and slots of the hostfile that take part; none if there is no hostfile."""
    if not Path(options.hostfile).is_file():
        if options.hostfile != DLTS_HOSTFILE:
            raise UsageError(f"hostfile {options.hostfile}: no such file")
        return {}
    chosen = choose(read_hostfile(options.hostfile), options.include, options.exclude)
    return limit(chosen, _or_none(options.num_nodes), _or_none(options.num_gpus))


def _or_none(number: int) -> int | None:
    return None if number == -1 else number


def _here(options: argparse.Namespace, nodes: Mapping[str, tuple[int, ...]]) -> argparse.Namespace:
    """Return the flags as flags of `onefold launch`."""
    alone = not nodes and options.num_nodes in (-1, 1)
    return argparse.Namespace(
        script=options.user_script,
        arguments=options.user_args,
        module=options.module,
        no_python=options.no_python,
        passes_local_rank=not options.no_local_rank and not options.no_python,
        hostfile=options.hostfile if nodes else None,
        include=options.include,
        exclude=options.exclude,
        num_gpus=_or_none(options.num_gpus),
        quiet=options.quiet,
        num_nodes=_or_none(options.num_nodes),
        min_nodes=None,
        fork_server=False,
        node_rank=_or_none(options.node_rank),
        master_addr=options.master_addr or None,
        master_port=None if alone and options.master_port == DEFAULT_PORT else options.master_port,
        max_restarts=0,
        ssh=False,
    )


def _run_everywhere(nodes: Mapping[str, tuple[int, ...]], options: argparse.Namespace) -> int:
    """Start the launchers of all nodes by ssh; when one fails, stop the others and return its code."""
    first, ssh = next(iter(nodes)), ["ssh", *(["-p", str(options.ssh_port)] if options.ssh_port else [])]
    if not options.no_ssh_check:
        tried = subprocess.run([*ssh, "-o", "PasswordAuthentication=no", first, "hostname"], capture_output=True)
        if tried.returncode:
            raise UsageError(
                f"ssh to {first} failed: {tried.stderr.decode().strip()}. Make all nodes reachable by ssh "
                "without a password, or give --no_ssh to start this node only."
            )
    exports = {name: value for name, value in os.environ.items() if name.startswith(tuple(EXPORT_ENVS))}
    here = _here(options, nodes)
    check_script(here)
    here.master_addr = here.master_addr or next(iter(nodes))
    settings = SshOptions(
        arguments=["-p", str(options.ssh_port)] if options.ssh_port else [],
        environment=exports | read_environment(),
        setup=f"source {shlex.quote(options.venv_script)}" if options.venv_script else "",
    )
    return run_on_nodes(jobs_of_nodes(here, nodes), command_of_ranks(here), settings)


if __name__ == "__main__":
    raise SystemExit(main())
