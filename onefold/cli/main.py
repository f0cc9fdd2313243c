"""The `onefold` command: parses the arguments, then imports and runs the command that was asked for."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence

import onefold
from onefold.cli.commands import COMMANDS

EPILOG = """\
examples:
  onefold train                             a small GPT learns the Python standard library, in under two minutes
  onefold plan --model llama/ --machine 8xH100 --batch 2 --seq 4096
                                            what fits there, what it costs, and which setting to take
  onefold launch train.py --deepspeed_config ds_config.json
                                            your own script, on every GPU of this node
  onefold watch runs/a                      a job while it runs: loss, memory, traffic
  onefold report runs/a                     one page about a run
  onefold export checkpoints weights        a checkpoint's weights, whole, for other tools
  onefold import-deepspeed checkpoints out  DeepSpeed's checkpoint, turned into onefold's
  onefold ckpt ls checkpoints               which checkpoints there are, and whether they are complete
  onefold bench tiers                       how fast bus, host and disk are here, and what offloading would cost
  onefold env                               versions, devices, memory, and what onefold will use here

`onefold COMMAND --help` tells more.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onefold",
        description="Train with every byte of model state held once, from the DeepSpeed configs you already have.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onefold {onefold.__version__}")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", required=True)}
    for path, command in COMMANDS.items():
        group, _, name = path.rpartition(" ")
        text, _, examples = inspect.cleandoc(command.add_arguments.__doc__ or "").partition("\n\nexamples:\n")
        epilog = f"examples:\n{examples}"
        added = groups[group].add_parser(
            name, help=command.help, description=text, epilog=epilog, formatter_class=parser.formatter_class
        )
        added.set_defaults(run=command.run, parser=added)
        command.add_arguments(added)
        if command.run is None:
            groups[path] = added.add_subparsers(title="commands", metavar="COMMAND")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C, otherwise that of the rank that failed."""
    options = build_parser().parse_args(arguments)
    if options.run is None:  # a group without its command
        options.parser.print_help(sys.stderr)
        return 2
    module, _, function = options.run.partition(":")
    try:
        exit_code: int = getattr(importlib.import_module(module), function)(options)
    except ValueError as error:
        # UsageError, ConfigError, DataError: onefold's own, with a message for the person who typed the command.
        if not type(error).__module__.startswith("onefold."):
            raise
        print(f"onefold: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
