"""The table of the commands of `onefold`. No torch is imported here, so `--help` is instant.

A command has a function that adds its arguments to a parser, whose docstring is printed by `--help`, and a function
that runs it, which is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from onefold.tools.cli import checkpoint_arguments as checkpoint
from onefold.tools.cli import job_arguments as job
from onefold.tools.cli import machine_arguments as machine

AddArguments = Callable[[argparse.ArgumentParser], None]


class Command(NamedTuple):
    """One command, or a group of commands: `ckpt` is the group of `ckpt ls`."""

    help: str
    add_arguments: AddArguments
    run: str | None = None
    """`module:function`, called with the arguments; it returns the exit code. None: a group."""
    loads_torch: bool = False
    """Whether importing the function loads torch, so that a notice has to be printed first."""


_CLI = "onefold.tools.cli"
_CKPT = "onefold.tools.cli.checkpoint_commands"
COMMANDS = {
    "train": Command("fine-tune a Hugging Face model, or train a small GPT", job.train, f"{_CLI}.train:train"),
    "merge": Command("merge a trained adapter into its model", job.merge, f"{_CLI}.trained_models:merge"),
    "chat": Command("chat with a trained model", job.chat, f"{_CLI}.trained_models:chat"),
    "launch": Command("start your script on every GPU", job.launch, f"{_CLI}.launch:launch"),
    "plan": Command(
        "forecast memory, traffic and time, and recommend a setting", machine.plan, f"{_CLI}.plan_command:plan"
    ),
    "compare": Command("run a job in several settings and recommend one", job.compare, f"{_CLI}.compare:compare"),
    "audit": Command("compare a script's steps with plain torch", job.audit, f"{_CLI}.audit_command:audit"),
    "tune": Command("find the fastest setting by short real runs", job.tune, f"{_CLI}.tune:tune"),
    "watch": Command("show a running job from its record", job.watch, f"{_CLI}.watch_run:watch_run"),
    "report": Command("write one page about a run: curves, memory, time", job.report, f"{_CLI}.reports:report"),
    "export": Command("write a checkpoint's weights for other tools", checkpoint.export, f"{_CKPT}:export", True),
    "ckpt": Command("list, inspect, verify and remove checkpoints", checkpoint.ckpt),
    "ckpt ls": Command("list the checkpoints of a folder", checkpoint.ckpt_ls, f"{_CKPT}:list_checkpoints", True),
    "ckpt inspect": Command(
        "show the contents of a checkpoint", checkpoint.ckpt_inspect, f"{_CKPT}:inspect_checkpoint", True
    ),
    "ckpt verify": Command(
        "check every byte against its checksum", checkpoint.ckpt_verify, f"{_CKPT}:verify_checkpoints", True
    ),
    "ckpt rm": Command(
        "remove checkpoints, or the leftovers of killed saves", checkpoint.ckpt_rm, f"{_CKPT}:remove_checkpoints", True
    ),
    "import-deepspeed": Command(
        "convert a DeepSpeed checkpoint", checkpoint.import_deepspeed, f"{_CKPT}:import_checkpoint", True
    ),
    "import-dcp": Command(
        "convert a checkpoint of FSDP2, torchtitan or Accelerate",
        checkpoint.import_dcp,
        f"{_CKPT}:import_of_torch",
        True,
    ),
    "bench": Command("measure this machine, and estimate the cost of offloading", machine.bench),
    "bench tiers": Command("measure bus, host Adam and disk", machine.bench_tiers, f"{_CLI}.bench:bench_tiers"),
    "env": Command("show versions and devices", machine.env, "onefold.tools.env_report:report_environment", True),
}
