"""Run `onefold train`: check the options, then start ranks that run the built-in trainer."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from onefold.config import check_built, load_config
from onefold.tools.cli.ranks import Job, python_command, run_ranks
from onefold.tools.cli.usage import CPU_RANKS
from onefold.tools.train.options import TrainOptions, check_inputs, default_out, prepare_config
from onefold.tools.train.recipe import options_of, with_recipe
from onefold.tools.train.rows import check_first_rows


def train(arguments: argparse.Namespace) -> int:
    """Run `onefold train`."""
    arguments = with_recipe(arguments)
    options = options_of(arguments)
    if "RANK" in os.environ:  # another launcher started this process as a rank
        from onefold.tools.train.__main__ import run_rank

        return run_rank(options)
    # Report mistakes once, before ranks start: first those that can be found without torch.
    check_inputs(options)
    if options.model is not None:
        check_first_rows((*options.data, *options.eval_data))
    options = replace(options, out=options.out or default_out(options))
    print(f"onefold train: {_job(options)}; output in {options.out}", flush=True)

    import torch

    from onefold.tools.train.task import choose_task

    num_gpus = torch.cuda.device_count()
    num_ranks = getattr(arguments, "ranks", None) or num_gpus or CPU_RANKS
    check_built(load_config(prepare_config(options, on_gpus=num_gpus > 0).document))
    choose_task(options)
    print(f"starting {num_ranks} rank{'s' * (num_ranks > 1)} on {'GPUs' if num_gpus else 'the CPU'}", flush=True)
    command = python_command("onefold.tools.train", *options.to_arguments(), is_module=True)
    return run_ranks(command, Job(num_ranks, max_restarts=getattr(arguments, "max_restarts", 0)))


def _job(options: TrainOptions) -> str:
    verb = "resuming" if options.resume else "training"
    if options.model is None:
        return f"{verb} the built-in GPT, preset {options.preset}"
    return f"{verb} {options.model}{f', {options.describe_adapter()}' if options.adapter_rank else ''}"
