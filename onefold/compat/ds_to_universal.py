"""DeepSpeed's converter to universal checkpoints. onefold's are: any of them loads on any number of ranks.

A folder of onefold's is put under the second name as it is, by hard links where the file system has them. One of
DeepSpeed's is converted by `onefold import-deepspeed`.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.manifest import NAME
from onefold.log import logger


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Provide a checkpoint under a second name, for other ranks.")
    add = parser.add_argument
    add("--input_folder", required=True, help="folder of one checkpoint")
    add("--output_folder", required=True, help="folder to create")
    for name in ("num_extract_workers", "num_merge_workers"):
        add(f"--{name}", type=int, default=1, help="ignored: nothing is extracted or merged")
    for name in ("keep_temp_folder", "inject_missing_state"):
        add(f"--{name}", action="store_true", help="ignored: nothing is kept or injected")
    add("--no_strict", dest="strict", action="store_false", help="ignored: checkpoints have every tensor")
    return parser.parse_args(argv)


def main(args: Any = None) -> None:
    """Run the command. `args` is the parsed command line, or an object with the same attributes."""
    args = parse_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not (source / NAME).exists():
        raise ValueError(
            f"input_folder {source} is not a checkpoint of onefold. Give the folder of a tag, or convert a "
            "checkpoint of DeepSpeed with `onefold import-deepspeed`."
        )
    shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns(".lock"))
    logger.info("%s: every checkpoint of onefold is universal; %s is the same one", source, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    main()
