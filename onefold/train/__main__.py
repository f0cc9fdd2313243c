"""`python -m onefold.train`: what each rank of `onefold train` runs; alone, a world of one rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from onefold.train.options import TrainOptions, add_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m onefold.train", description=__doc__)
    add_arguments(parser)
    return run_rank(TrainOptions.from_arguments(parser.parse_args(arguments)))


def run_rank(options: TrainOptions) -> int:
    """Train as the rank that the environment says, and return the exit code."""
    from onefold.checkpoint.format.files import CheckpointError
    from onefold.checkpoint.loading.load import MisfitError
    from onefold.config import ConfigError
    from onefold.train.data import DataError
    from onefold.train.loop import ResumeError, train

    try:
        finished = train(options)
    except (ConfigError, DataError, CheckpointError, MisfitError, ResumeError) as error:
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):  # a launcher shows it once for all ranks
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        else:
            print(f"onefold: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if finished else 130


if __name__ == "__main__":
    sys.exit(main())
