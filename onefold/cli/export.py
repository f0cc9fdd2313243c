"""`onefold export`: the weights of a checkpoint as files that any tool loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DESCRIPTION = """\
Write the weights of a checkpoint, whole, to a folder that Hugging Face and plain torch load. Needs no GPU and no more
memory than the largest tensor (the format bin: than one file); checks every byte it reads. Trained weights come from
their fp32 masters. OUT gets its files when all are written: an export that fails leaves what was there before."""

EPILOG = """\
examples:
  onefold export checkpoints weights                       what `latest` names, in fp32: weights/model.safetensors
  onefold export checkpoints weights --dtype bf16          half the size, as most models are published
  onefold export checkpoints/global_step500 weights        that one
  onefold export checkpoints weights --tag global_step500  the same
  onefold export checkpoints weights --format bin          pytorch_model.bin, for torch.load(weights_only=True)
  onefold export checkpoints adapter --exclude-frozen      what was trained, LoRA adapters say, and buffers

  python zero_to_fp32.py CKPT OUT, beside every checkpoint, does the same in fp32 with DeepSpeed's options.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights for other tools",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="the folder that save_checkpoint was given, or that of one tag")
    add("out", metavar="OUT", help="the folder to write to; made where it is not there")
    add("--tag", metavar="TAG", help="which checkpoint of CKPT (default: what `latest` names)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="of floating-point weights (default: fp32); others keep theirs")  # fmt: skip
    add("--format", choices=("safetensors", "bin"), default="safetensors",
        help="safetensors (default), or torch.save's pytorch_model.bin")  # fmt: skip
    add("--max-shard-size", metavar="SIZE", default="5GB",
        help="where to cut into several files with an index: 500MB, 5GB (default), 2GiB")  # fmt: skip
    add("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Only now: importing torch takes seconds, and `--help` should not wait for it.
    from onefold.checkpoint.format import CheckpointError
    from onefold.checkpoint.tools import export
    from onefold.train.progress import format_bytes

    try:
        with bytes_bar("export") as tell:
            exported = export(
                options.checkpoint,
                options.out,
                tag=options.tag,
                dtype=options.dtype,
                file_format=options.format,
                max_shard_size=options.max_shard_size,
                exclude_frozen=options.exclude_frozen,
                progress=tell,
            )
    except (CheckpointError, OSError) as error:
        return fail(error)
    print(
        f"{exported.num_tensors} tensors of {exported.checkpoint}, {format_bytes(exported.nbytes)} of {options.dtype}:"
    )
    for file in exported.files:
        print(f"  {file}")
    return 0


def fail(error: ValueError | OSError) -> int:
    """One line for what went wrong with files, as opposed to what was typed."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"onefold: {text}", file=sys.stderr)
    return 1


@contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal: told what is read now, the bytes done and the bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=None, now="")
    with bar:
        yield lambda now, done, total: bar.update(task, completed=done, total=total, now=now)
