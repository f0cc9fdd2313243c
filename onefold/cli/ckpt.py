"""`onefold ckpt`: checkpoints on disk listed, looked into, checked to the last byte, removed."""

from __future__ import annotations

import argparse

from onefold.cli.export import fail

EPILOG = """\
examples:
  onefold ckpt ls checkpoints                    what is there, how large, whether it is complete
  onefold ckpt inspect checkpoints               what `latest` holds: parameters, optimizer, steps, config
  onefold ckpt verify checkpoints --all          every byte against its checksum; exit code 1 if any is wrong
  onefold ckpt rm checkpoints global_step100     remove one

`onefold ckpt ls --help` and so on tell more.
"""

LS = """\
List the checkpoints in DIR, newest first. Sizes and headers of all files are looked at; `verify` reads the rest."""
LS_EXAMPLES = """\
examples:
  onefold ckpt ls checkpoints
  onefold ckpt ls checkpoints --json | jq -r '.checkpoints[] | select(.complete) | .tag'
"""

INSPECT = """\
Show what a checkpoint holds, from its manifest: no weights are read."""
INSPECT_EXAMPLES = """\
examples:
  onefold ckpt inspect checkpoints                       what `latest` names
  onefold ckpt inspect checkpoints --tag global_step100
  onefold ckpt inspect checkpoints --tensors             every tensor by name, with dtype and shape
  onefold ckpt inspect checkpoints --json | jq .config   the config it was trained with
"""

VERIFY = """\
Read every byte of a checkpoint against its checksum, and say which files, tensors and byte ranges are damaged. Goes on
after the first. Exit code: 0 if all is as it was saved, 1 if anything is not."""
VERIFY_EXAMPLES = """\
examples:
  onefold ckpt verify checkpoints                        what `latest` names
  onefold ckpt verify checkpoints --tag global_step100
  onefold ckpt verify checkpoints --all --json
"""

RM = """\
Remove checkpoints. Only onefold's own files go: the manifest, then the data; a folder that holds anything else stays.
Asks first. What `latest` names is removed by --force only; `latest` then names the newest complete one that stays."""
RM_EXAMPLES = """\
examples:
  onefold ckpt rm checkpoints global_step100 global_step200
  onefold ckpt rm checkpoints global_step100 --yes       without asking, for scripts
  onefold ckpt rm checkpoints --leftovers                data of saves that were killed; what is being written stays
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ckpt",
        help="list, inspect, verify and remove checkpoints",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, line: str, text: str, examples: str) -> argparse.ArgumentParser:
        added = actions.add_parser(
            name,
            help=line,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        or_one = "" if name == "rm" else ", or that of one tag"
        added.add_argument("dir", metavar="DIR", help=f"the folder that save_checkpoint was given{or_one}")
        added.set_defaults(run=run, action=name)
        return added

    ls = action("ls", "list the checkpoints of a folder", LS, LS_EXAMPLES)
    inspect = action("inspect", "show what a checkpoint holds", INSPECT, INSPECT_EXAMPLES)
    verify = action("verify", "read every byte against its checksum", VERIFY, VERIFY_EXAMPLES)
    rm = action("rm", "remove checkpoints, or what killed saves left", RM, RM_EXAMPLES)
    inspect.add_argument("--tag", metavar="TAG", help="which (default: what `latest` names)")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--tag", metavar="TAG", help="which (default: what `latest` names)")
    which.add_argument("--all", action="store_true", help="all that DIR holds")
    for printer in (ls, inspect, verify):
        printer.add_argument("--json", action="store_true", help="print JSON")
    rm.add_argument("tags", metavar="TAG", nargs="*", help="what to remove")
    rm.add_argument("-y", "--yes", action="store_true", help="do not ask")
    rm.add_argument("--force", action="store_true", help="also what `latest` names")
    rm.add_argument(
        "--leftovers", action="store_true", help="data that no manifest names and nobody writes, of all tags"
    )


def run(options: argparse.Namespace) -> int:
    # Only now: importing torch takes seconds, and `--help` should not wait for it.
    from onefold.checkpoint.format import CheckpointError
    from onefold.cli import checkpoints

    work = {
        "ls": checkpoints.show_list,
        "inspect": checkpoints.show_one,
        "verify": checkpoints.show_damage,
        "rm": checkpoints.remove,
    }
    try:
        return work[options.action](options)
    except (CheckpointError, OSError) as error:
        return fail(error)
