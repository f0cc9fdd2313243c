"""Run one rank of `onefold train`: `python -m onefold.train`. Without a launcher, the world has one rank."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from onefold.redaction import redact
from onefold.tools.train.options import OptionError, TrainOptions, add_arguments, add_recipe
from onefold.tools.train.recipe import options_of, with_recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options and run this rank."""
    parser = argparse.ArgumentParser(prog="python -m onefold.train", description=__doc__)
    add_recipe(parser)
    add_arguments(parser)
    try:
        options = options_of(with_recipe(parser.parse_args(arguments)))
    except OptionError as error:
        _show(str(error))
        return 2
    return run_rank(options)


def run_rank(options: TrainOptions) -> int:
    """Train as the rank that the environment names, and return the exit code."""
    from onefold.checkpoint.format.files import CheckpointError
    from onefold.checkpoint.loading.load import MisfitError
    from onefold.config import ConfigError
    from onefold.tools.train.data import DataError
    from onefold.tools.train.loop import ResumeError, train

    try:
        finished = train(options)
    except (ConfigError, DataError, CheckpointError, MisfitError, OptionError, ResumeError) as error:
        _show(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader ended first, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0 if finished else 130


def _show(message: str) -> None:
    """Print a message, or write it for the launcher, which prints it once for all ranks."""
    message, error_file = redact(message), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        print(f"onefold: {message}", file=sys.stderr)
        return
    now = time.time()
    extra = {"py_callstack": "", "timestamp": str(int(now)), "exact_timestamp": now}
    part = Path(f"{error_file}.part")
    part.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    part.replace(error_file)


if __name__ == "__main__":
    sys.exit(main())
