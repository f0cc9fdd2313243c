"""What `onefold train` does: check what was asked, then start ranks that run `python -m onefold.train`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch

from onefold.cli.commands import CPU_RANKS, UsageError
from onefold.cli.ranks import Job, python_command, run_ranks
from onefold.config import check_built, load_config
from onefold.train.__main__ import run_rank
from onefold.train.options import TrainOptions, default_out, prepare_config
from onefold.train.task import choose_task


def train(arguments: argparse.Namespace) -> int:
    options = TrainOptions.from_arguments(arguments)
    if "RANK" in os.environ:  # some other launcher has started the ranks, and this is one of them
        return run_rank(options)
    num_gpus = torch.cuda.device_count()
    num_ranks = arguments.ranks if arguments.ranks is not None else num_gpus or CPU_RANKS
    if num_ranks < 1:
        raise UsageError(f"--ranks {num_ranks}: must be at least 1")
    # Mistakes show here, once, before any rank starts.
    check_built(load_config(prepare_config(options, on_gpus=num_gpus > 0).document))
    choose_task(options)
    options = replace(options, out=options.out or default_out(options))
    command = python_command("onefold.train", *options.to_arguments(), is_module=True)
    return run_ranks(command, Job(num_ranks, max_restarts=arguments.max_restarts))
