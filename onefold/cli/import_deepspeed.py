"""`onefold import-deepspeed`: go on from a checkpoint that DeepSpeed wrote."""

from __future__ import annotations

import argparse

from onefold.cli.export import bytes_bar, fail

DESCRIPTION = """\
Turn a checkpoint that DeepSpeed wrote (ZeRO stages 1, 2, 3, any number of ranks) into one of onefold's: weights, fp32
masters, optimizer states, step counts, scheduler, loss scale, client state. engine.load_checkpoint(OUT) then goes on
from it, in any stage and on any number of ranks. Its pickles are read by torch's weights-only unpickler, which
knows tensors and plain data only: nothing in them is executed, and the source is never changed."""

EPILOG = """\
examples:
  onefold import-deepspeed checkpoints checkpoints-onefold                 what `latest` names
  onefold import-deepspeed checkpoints out --tag global_step500            that one
  onefold ckpt inspect out                                                 what came of it
  onefold export out weights                                               its weights, whole
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "import-deepspeed",
        help="turn DeepSpeed's checkpoint into onefold's",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="DIR", help="the folder that DeepSpeed saved to, or that of one tag")
    parser.add_argument("out", metavar="OUT", help="the folder to write to; made where it is not there")
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint of DIR (default: what `latest` names)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from onefold.checkpoint.deepspeed import import_deepspeed
    from onefold.train.progress import format_bytes

    try:
        with bytes_bar("import") as tell:
            found = import_deepspeed(options.source, options.out, options.tag, tell)
    except (ValueError, OSError) as error:
        return fail(error)
    counters = found.source.state["counters"]
    print(
        f"{found.folder}: step {counters['global_steps']}, {len(found.source.parameters)} parameters, "
        f"{format_bytes(found.nbytes)}, from stage {found.source.stage} on {found.source.world_size} ranks"
    )
    for key in found.left_out:
        print(f"left out: client state {key!r} is not plain data")
    return 0
