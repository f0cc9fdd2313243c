"""Arguments and help of the commands that read and write checkpoints."""

from __future__ import annotations

import argparse

from onefold.tools.cli.usage import add_folder, add_json, size


def export(parser: argparse.ArgumentParser) -> None:
    """Write the unsharded weights of a checkpoint to a folder that Hugging Face and plain torch can load.

    Needs no GPU, and no more memory than the largest tensor (with --format bin: than one file). Every byte read is
    checked. Trained weights are taken from their fp32 masters. Files appear in OUT when all are written, so an export
    that fails leaves OUT unchanged.

    examples:
      onefold export checkpoints weights                       the latest one, in fp32, as weights/model.safetensors
      onefold export checkpoints weights --dtype bf16          half the size, as most models are published
      onefold export checkpoints/global_step500 weights        the checkpoint of step 500
      onefold export checkpoints weights --tag global_step500  the checkpoint of step 500
      onefold export checkpoints weights --format bin          pytorch_model.bin, for torch.load(weights_only=True)
      onefold export checkpoints fsdp --format dcp             weights and optimizer states, for dcp.load and FSDP2
      onefold export checkpoints adapter --exclude-frozen      only trained parameters (e.g. LoRA adapters), and buffers

      python zero_to_fp32.py CKPT OUT, in every checkpoint folder, does the same in fp32 with DeepSpeed's options.
    """
    add = parser.add_argument
    add_folder(parser, "checkpoint", "CKPT")
    add("out", metavar="OUT", help="the folder to write to; created if missing")
    add("--tag", metavar="TAG", help="tag of the checkpoint in CKPT (default: the tag in the file `latest`)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="dtype of floating-point weights (default: fp32)")  # fmt: skip
    add("--format", choices=("safetensors", "bin", "dcp"), default="safetensors",
        help="safetensors (default), torch.save's pytorch_model.bin, or a folder of torch.distributed.checkpoint "
        "with optimizer states")  # fmt: skip
    add("--max-shard-size", type=size, metavar="SIZE",
        help="maximum size of a file, e.g. 500MB or 2GiB; several files get an index (default: 5GB)")  # fmt: skip
    add("--exclude-frozen", action="store_true", help="write trained parameters and buffers only")


def ckpt(parser: argparse.ArgumentParser) -> None:
    """List, inspect, verify and remove checkpoints on disk.

    examples:
      onefold ckpt ls checkpoints                    tags, sizes, and whether each is complete
      onefold ckpt inspect checkpoints               parameters, optimizer, steps and config of `latest`
      onefold ckpt verify checkpoints --all          check every byte; exit code 1 if any is wrong
      onefold ckpt rm checkpoints global_step100     remove one

    See also `onefold ckpt ls --help` and so on.
    """


def ckpt_ls(parser: argparse.ArgumentParser) -> None:
    """List the checkpoints in DIR, newest first.

    Checks the sizes and headers of all files; `verify` reads them whole.

    examples:
      onefold ckpt ls checkpoints
      onefold ckpt ls checkpoints --json | jq -r '.checkpoints[] | select(.complete) | .tag'
    """
    add_folder(parser)
    add_json(parser)


def ckpt_inspect(parser: argparse.ArgumentParser) -> None:
    """Show the contents of a checkpoint from its manifest, without reading weights.

    examples:
      onefold ckpt inspect checkpoints                       the latest one
      onefold ckpt inspect checkpoints --tag global_step100
      onefold ckpt inspect checkpoints --tensors             every tensor by name, with dtype and shape
      onefold ckpt inspect checkpoints --json | jq .config   the config it was trained with
    """
    add_folder(parser)
    parser.add_argument("--tag", metavar="TAG", help="tag of the checkpoint (default: the tag in the file `latest`)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    add_json(parser)


def ckpt_verify(parser: argparse.ArgumentParser) -> None:
    """Check every byte of a checkpoint, and report all damaged files, tensors and byte ranges.

    Exit code: 0 if everything is as it was saved, 1 otherwise.

    examples:
      onefold ckpt verify checkpoints                        the latest one
      onefold ckpt verify checkpoints --tag global_step100
      onefold ckpt verify checkpoints --all --json
    """
    add_folder(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", metavar="TAG", help="tag of the checkpoint (default: the tag in the file `latest`)")
    which.add_argument("--all", action="store_true", help="verify all checkpoints in DIR")
    add_json(parser)


def ckpt_rm(parser: argparse.ArgumentParser) -> None:
    """Remove checkpoints, after a confirmation.

    Only files of onefold are removed, first the manifest, then the data. A folder with other files is kept. The
    checkpoint named in `latest` is removed with --force only; `latest` then names the newest complete one left.

    examples:
      onefold ckpt rm checkpoints global_step100 global_step200
      onefold ckpt rm checkpoints global_step100 --yes       without asking, for scripts
      onefold ckpt rm checkpoints --leftovers                data of killed saves; saves in progress are kept
    """
    add = parser.add_argument
    add_folder(parser, help="the folder passed to save_checkpoint")
    add("tags", metavar="TAG", nargs="*", help="checkpoints to remove")
    add("-y", "--yes", action="store_true", help="do not ask for confirmation")
    add("--force", action="store_true", help="also remove the checkpoint named in the file `latest`")
    add("--leftovers", action="store_true", help="remove the data of interrupted saves; saves in progress are kept")


def import_deepspeed(parser: argparse.ArgumentParser) -> None:
    """Convert a checkpoint of DeepSpeed (ZeRO stages 1, 2, 3, any number of ranks) to onefold's format.

    Converts weights, fp32 masters, optimizer states, step counts, scheduler, loss scale and client state.
    engine.load_checkpoint(OUT) resumes from it, in any stage and on any number of ranks. The pickles are read by an
    unpickler for tensors and plain data only, which executes nothing. The source is not changed.

    examples:
      onefold import-deepspeed checkpoints checkpoints-onefold                 the latest one
      onefold import-deepspeed checkpoints out --tag global_step500            the checkpoint of step 500
      onefold ckpt inspect out                                                 show the result
      onefold export out weights                                               write its unsharded weights
    """
    add_folder(parser, "source", help="the folder that DeepSpeed saved to, or the folder of one tag")
    parser.add_argument("out", metavar="OUT", help="the folder to write to; created if missing")
    parser.add_argument("--tag", metavar="TAG", help="tag of the checkpoint (default: the tag in the file `latest`)")


def import_dcp(parser: argparse.ArgumentParser) -> None:
    """Convert a folder of torch.distributed.checkpoint (DCP) to onefold's format.

    Reads what FSDP2 users, torchtitan and Accelerate (also through transformers' Trainer) save on any number of ranks:
    weights, optimizer states of Adam, AdamW, SGD, Adagrad and Lion, hyperparameters, the schedule, and plain data.
    engine.load_checkpoint(OUT) resumes from it, in any stage and on any number of ranks. The pickles are read by an
    unpickler for tensors and plain data only, which executes nothing. Unknown files and keys are refused by name. The
    source is not changed.

    examples:
      onefold import-dcp outputs/checkpoint out                    the latest step of torchtitan
      onefold import-dcp outputs/checkpoint out --tag step-1000    step 1000
      onefold import-dcp trainer/checkpoint-500 out                a checkpoint of Trainer with FSDP
      onefold import-dcp checkpoint out --leave-out ema            all keys but `ema`
    """
    add_folder(parser, "source", help="the folder with .metadata, or a folder of such folders")
    add = parser.add_argument
    add("out", metavar="OUT", help="the folder to write to; created if missing")
    add("--tag", metavar="FOLDER",
        help="the folder in SOURCE to convert (default: the only one, or the last step-N or checkpoint-N)")  # fmt: skip
    add("--leave-out", metavar="KEY", action="append", default=[],
        help="a top-level key of the saved state dict that is not converted; may be given several times")  # fmt: skip
