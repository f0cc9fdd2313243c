"""The table of the commands of `onefold`. No torch is imported here, so `--help` is instant.

A command has a function that adds its arguments to a parser, whose docstring is printed by `--help`, and a function
that runs it, which is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from onefold.tools.cli import checkpoint_arguments, job_arguments, machine_arguments

AddArguments = Callable[[argparse.ArgumentParser], None]


class Command(NamedTuple):
    """One command, or a group of commands: `ckpt` is the group of `ckpt ls`."""

    help: str
    add_arguments: AddArguments
    run: str | None = None
    """`module:function`, called with the arguments; it returns the exit code. None: a group."""
    loads_torch: bool = False
    """Whether importing the function loads torch, so that a notice has to be printed first."""


COMMANDS = {
    "train": Command(
        "fine-tune a Hugging Face model, or train a small GPT", job_arguments.train, "onefold.tools.cli.train:train"
    ),
    "launch": Command("start your script on every GPU", job_arguments.launch, "onefold.tools.cli.launch:launch"),
    "plan": Command(
        "forecast memory, traffic and time, and recommend a setting",
        machine_arguments.plan,
        "onefold.tools.cli.plan:plan",
    ),
    "compare": Command(
        "run a job in several settings and recommend one", job_arguments.compare, "onefold.tools.cli.compare:compare"
    ),
    "tune": Command("find the fastest setting by short real runs", job_arguments.tune, "onefold.tools.cli.tune:tune"),
    "watch": Command(
        "show a running job from its record", job_arguments.watch, "onefold.tools.cli.watch_run:watch_run"
    ),
    "report": Command(
        "write one page about a run: curves, memory, time, traffic",
        job_arguments.report,
        "onefold.tools.cli.reports:report",
    ),
    "export": Command(
        "write a checkpoint's weights for other tools",
        checkpoint_arguments.export,
        "onefold.tools.cli.checkpoint_commands:export",
        loads_torch=True,
    ),
    "ckpt": Command("list, inspect, verify and remove checkpoints", checkpoint_arguments.ckpt),
    "ckpt ls": Command(
        "list the checkpoints of a folder",
        checkpoint_arguments.ckpt_ls,
        "onefold.tools.cli.checkpoint_commands:list_checkpoints",
        loads_torch=True,
    ),
    "ckpt inspect": Command(
        "show what a checkpoint holds",
        checkpoint_arguments.ckpt_inspect,
        "onefold.tools.cli.checkpoint_commands:inspect_checkpoint",
        loads_torch=True,
    ),
    "ckpt verify": Command(
        "check every byte against its checksum",
        checkpoint_arguments.ckpt_verify,
        "onefold.tools.cli.checkpoint_commands:verify_checkpoints",
        loads_torch=True,
    ),
    "ckpt rm": Command(
        "remove checkpoints, or the leftovers of killed saves",
        checkpoint_arguments.ckpt_rm,
        "onefold.tools.cli.checkpoint_commands:remove_checkpoints",
        loads_torch=True,
    ),
    "import-deepspeed": Command(
        "convert a DeepSpeed checkpoint to onefold's format",
        checkpoint_arguments.import_deepspeed,
        "onefold.tools.cli.checkpoint_commands:import_checkpoint",
        loads_torch=True,
    ),
    "bench": Command("measure this machine, and estimate the cost of offloading", machine_arguments.bench),
    "bench tiers": Command(
        "measure bus, host Adam and disk, and estimate each offload setting",
        machine_arguments.bench_tiers,
        "onefold.tools.cli.bench:bench_tiers",
    ),
    "env": Command(
        "show what this machine has",
        machine_arguments.env,
        "onefold.tools.env_report:report_environment",
        loads_torch=True,
    ),
}
