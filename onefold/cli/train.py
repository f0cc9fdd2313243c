"""`onefold train`: the built-in job. Checks what was asked, then starts ranks that run `python -m onefold.train`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from onefold.train.options import TrainOptions, add_arguments, default_out, prepare_config

CPU_RANKS = 2

DESCRIPTION = """\
Train a small GPT on text, from a DeepSpeed config: on every GPU, or on two processes where there is none. Shows
the plan, a progress bar, a summary with traffic and memory, a plot and a sample of what the model writes. Ctrl-C
ends it after the current step, with the summary of what was done."""

EPILOG = """\
examples:
  onefold train                                  under two minutes on two CPU cores
  onefold train --stage 1 --ranks 4              another ZeRO stage, another number of ranks
  onefold train --config ds_config.json          your own DeepSpeed config
  onefold train --data ~/notes README.md --steps 500
  onefold train --preset 25m --steps 20          a larger model
  onefold train --out runs/a --save-every 50     checkpoints on the way, in runs/a/checkpoints
  onefold train --resume runs/a --ranks 4        go on from the last of them, here on four ranks

  on several hosts:  onefold launch --hostfile hosts --module onefold.train --steps 500
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a small GPT here and now",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help=f"processes (default: one a GPU, or {CPU_RANKS} where there is none)"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the ranks again after a failure, so often; with --save-every they go on from the last checkpoint",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = TrainOptions.from_arguments(arguments)
    if "RANK" in os.environ:  # some other launcher has started the ranks, and this is one of them
        from onefold.train.__main__ import run_rank

        return run_rank(options)
    import torch

    from onefold.cli.hosts import HostError
    from onefold.cli.ranks import Job, Program, run_ranks
    from onefold.config import check_built, load_config
    from onefold.train.data import load_corpus
    from onefold.train.gpt import PRESETS

    num_gpus = torch.cuda.device_count()
    num_ranks = arguments.ranks if arguments.ranks is not None else num_gpus or CPU_RANKS
    if num_ranks < 1:
        raise HostError(f"--ranks {num_ranks}: must be at least 1")
    # Mistakes show here, once, before any rank starts.
    check_built(load_config(prepare_config(options, on_gpus=num_gpus > 0).document))
    load_corpus(options.data, PRESETS[options.preset].sequence_length)
    options = replace(options, out=options.out or default_out(options))
    return run_ranks(
        Program.module("onefold.train", options.to_arguments()), Job(num_ranks, max_restarts=arguments.max_restarts)
    )
