"""Every command of `onefold`: its arguments and its help. No torch here: `--help` is instant.

A command is a function that adds arguments to a parser, under `@command`. Its docstring is what `--help` prints. What
the command does is another function, which is imported when the command is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from onefold.log import parse_size
from onefold.tools.train.options import PRESET_NAMES, above_zero, add_arguments, at_least_one, not_negative

AddArguments = Callable[[argparse.ArgumentParser], None]

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500
CPU_RANKS = 2
# Seconds on a laptop, and far more than caches hold.
DEFAULT_BENCH_SIZE = "0.5GB"


class UsageError(ValueError):
    """What was typed cannot be done; the message says why, and the command ends with exit code 2."""


@contextmanager
def loading_torch() -> Iterator[None]:
    """Say that torch is being loaded, which takes seconds. On a terminal the line disappears when it is done."""
    if "torch" in sys.modules:
        yield
        return
    erase = "\r\033[K" if sys.stderr.isatty() else ""
    print("onefold: loading torch", end="" if erase else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(erase, end="", file=sys.stderr, flush=True)


def read_number(
    options: argparse.Namespace, name: str, parse: Callable[[str], int], example: str, most: float, least: int = 1
) -> int | None:
    """Return an option as a number of at least `least` and at most `most`, or raise UsageError; None: not given."""
    text = getattr(options, name)
    if text is None:
        return None
    option, text = f"--{name.replace('_', '-')}", str(text)
    try:
        value = parse(text)
    except ValueError as error:
        is_number = text.strip(" +-").lower() in ("nan", "inf", "infinity")
        raise UsageError(
            f"{option} {text}: {f'must be above 0 and finite, as in {example}' if is_number else error}"
        ) from None
    if value < least:
        raise UsageError(f"{option} {text}: must be {'above 0' if least else '0 or more'}, as in {example}")
    if value > most:
        raise UsageError(f"{option} {text}: this is more than can be planned; write a number as in {example}")
    return value


class Command(NamedTuple):
    """One command, or a group of commands: `ckpt` is the group of `ckpt ls`."""

    help: str
    run: str | None
    """`module:function` that is given the arguments and returns the exit code; None: a group."""
    add_arguments: AddArguments
    loads_torch: bool
    """Whether importing it takes seconds, so that the command has to say so first."""


COMMANDS: dict[str, Command] = {}


def command(
    name: str, help: str, run: str | None = None, *, loads_torch: bool = True
) -> Callable[[AddArguments], AddArguments]:
    def declare(add_arguments: AddArguments) -> AddArguments:
        COMMANDS[name] = Command(help, run, add_arguments, loads_torch)
        return add_arguments

    return declare


@command(
    "train", "fine-tune a Hugging Face model, or train a small GPT", "onefold.tools.cli.train:train", loads_torch=False
)
def _train(parser: argparse.ArgumentParser) -> None:
    """
    Fine-tune a Hugging Face model on your data, or train a small built-in GPT, on every GPU or on two processes where
    there is none. Shows the plan, a progress bar, a summary with traffic and memory, a plot and a sample of what the
    model writes. The trained weights, the metrics and one page about the run (report.html) are written to a folder.
    Ctrl-C ends the run after the current step and writes the same.

    Rows of .jsonl files have `text`, `prompt` and `completion`, `messages`, or `instruction`, `input` and `output`.

    examples:
      onefold train --model llama/ --data rows.jsonl --lora      fine-tune an adapter; it is saved in OUT/adapter
      onefold train --model llama/ --data rows.jsonl --epochs 3  fine-tune all weights; they are saved in OUT/model
      onefold train --model llama/ --data rows.jsonl --lora 64 --lr 1e-4 --batch 2 --accumulation 8
      onefold train                                              a small GPT, in two minutes on two CPU cores
      onefold train --preset 25m --stage 1 --ranks 4             a larger GPT, another ZeRO stage, four ranks
      onefold train --data ~/notes README.md --steps 500         the GPT on your own text
      onefold train --config ds_config.json                      your own DeepSpeed config
      onefold train --out runs/a --save-every 50                 with checkpoints, in runs/a/checkpoints
      onefold train --resume runs/a --steps 600                  continue that run from its last checkpoint

      on several nodes:  onefold launch --hostfile hosts --module onefold.train --steps 500
    """
    add_arguments(parser)
    add = parser.add_argument
    add("--ranks", type=at_least_one, metavar="N",
        help=f"processes (default: one per GPU, or {CPU_RANKS} where there is none)")  # fmt: skip
    add("--max-restarts", type=not_negative, default=0, metavar="N",
        help="restart all ranks after a failure, at most N times; with --save-every they continue from the last "
        "checkpoint")  # fmt: skip


@command("launch", "start your script on every GPU", "onefold.tools.cli.launch:launch", loads_torch=False)
def _launch(parser: argparse.ArgumentParser) -> None:
    """
    Start a script on every GPU of this node (one process where there is no GPU), by torch's elastic agent. The
    script finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment; onefold.initialize
    reads them. When a rank fails, you see its traceback, and the command ends with its exit code.

    examples:
      onefold launch train.py --deepspeed_config ds_config.json      every GPU of this node
      onefold launch --nproc 4 train.py                              four ranks, on GPUs 0 to 3, or on the CPU
      onefold launch --include localhost:1,3 train.py                two ranks, on GPUs 1 and 3
      onefold launch --module package.train --epochs 3               as `python -m package.train --epochs 3`

      two nodes, eight GPUs each; run the same command on both, with its own --node_rank:
      onefold launch --num_nodes 2 --node_rank 0 --master_addr node1 train.py

      the same from a hostfile (lines such as `node1 slots=8`); each node finds its own place in it:
      onefold launch --hostfile hosts train.py
    """
    add = parser.add_argument
    add("--num_gpus", "--nproc", type=at_least_one, metavar="N", dest="num_gpus",
        help="ranks on each node (default: its GPUs, or 1 where there are none)")  # fmt: skip
    add("--num_accelerators", "--nproc_per_node", "--nproc-per-node", type=at_least_one, dest="num_gpus",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    add(
        "--num_nodes",
        "--nnodes",
        type=at_least_one,
        metavar="N",
        help="nodes that take part (default: 1, or the hostfile's)",
    )
    add("--node_rank", "--node-rank", type=not_negative, metavar="K", help="which of the nodes this is, from 0")
    add("--master_addr", "--master-addr", metavar="NODE", help="name or address of node 0")
    add("--master_port", "--master-port", type=port, metavar="PORT",
        help=f"port on node 0 (default: a free one; {DEFAULT_PORT} with several nodes)")  # fmt: skip
    add("-H", "--hostfile", metavar="FILE", help=f"nodes, one per line: `node1 slots=8` (default: {DEFAULT_HOSTFILE})")
    add("-i", "--include", default="", metavar="CHOICE", help="use only these: node1:0,2@node2")
    add("-e", "--exclude", default="", metavar="CHOICE", help="use all but these: node1:0,2@node2")
    add("--max-restarts", "--max_restarts", type=not_negative, default=0, metavar="N",
        help="restart all ranks after a failure, at most N times (default: 0)")  # fmt: skip
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for `python -m`")
    add("--no_python", "--no-python", action="store_true", help="SCRIPT is a program of its own, not Python")
    add("--no_local_rank", action="store_true", help=argparse.SUPPRESS)  # nothing to switch off: it is never passed
    parser.set_defaults(passes_local_rank=False, quiet=False)
    add("script", metavar="SCRIPT", help="what every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


@command(
    "plan", "what fits, what it costs, and which setting to take", "onefold.tools.cli.plan:plan", loads_torch=False
)
def _plan(parser: argparse.ArgumentParser) -> None:
    """
    Say before a run what fits: memory, traffic and time of each stage, offload and ZeRO++ setting, and which one to
    take. The engine itself runs a step of each as one rank of the job, on tensors without memory (a dry run), so
    parameters, gradients, states, activations and traffic are those of the run. Times are estimates from the
    machine's nominal rates. No GPU is needed.

    The model is a folder or config.json of transformers (nothing is downloaded), module:function that returns an
    nn.Module, a checkpoint of onefold, a preset of `onefold train` (25m, 1.3b, ...), a well-known shape (7b, llama-7b,
    llama-3-8b, 13b, 70b, ...), or just a number of parameters.

    Exit code: 0 if at least one setting fits, 1 if none does, 2 for wrong use.

    examples:
      onefold plan --params 7B --machine 8xA100
          model states of every stage
      onefold plan --model llama-7b --machine 8xA100 --batch 4 --seq 2048
      onefold plan --model llama/config.json --machine 8xH100 --batch 4 --wide
          with every kind of memory, traffic, and what bounds a step
      onefold plan --model mymodel:build --machine 4090 --batch 1 --recompute
      onefold plan --model llama/ --machine 8xH100 --nodes 4 --link 400Gbit/s
      onefold plan --model llama/ --lora 16 --machine "one 4090" --batch 1
      onefold plan --model 7b --gpus 4 --gpu-memory 48GB --host-memory 1TB
      onefold plan --model 1.3b --machine 8xH100 --write ds_config.json
      onefold plan --model 1.3b --machine 8xH100 --json | jq .settings
    """
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="number of parameters, e.g. 7B or 7e9: model states alone")
    what.add_argument("--model", metavar="MODEL", help="what to plan for, see above")
    add("--lora", type=int, metavar="RANK", help="LoRA adapters of this rank (models of transformers)")
    add("--recompute", action="store_true", help="with activation checkpointing of every block")
    add("--batch", type=int, metavar="N", help="sequences per micro-batch (default: 1, or the config's)")
    add("--seq", type=int, metavar="N", help="tokens per sequence (default: the model's limit, at most 2048)")
    add("--machine", metavar="GPUS", help="one node, e.g. 8xH100 or 4090 (default: this machine's GPUs)")
    add("--gpus", type=int, metavar="N", help="GPUs per node, in place of the machine's")
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpu-memory", metavar="SIZE", help="memory per GPU, e.g. 80GB, 80GiB or 80 (GB)")
    add("--host-memory", metavar="SIZE", help="host memory per node, e.g. 1TB")
    add("--nvme", metavar="SIZE", help="fast disk per node, e.g. 8TB; 0: none")
    add("--bus", metavar="RATE", help="between a GPU and its host, each way, e.g. 50GB/s")
    add("--link", metavar="RATE", help="between nodes, each way, e.g. 50GB/s or 400Gbit/s")
    add("--config", metavar="FILE", help="a DeepSpeed config: the settings are put in place of its own")
    add("--write", metavar="FILE", help="write the config of the recommended setting")
    add("--wide", action="store_true", help="all columns: every kind of memory, traffic, seconds by resource")
    _add_json(parser)


@command(
    "compare",
    "run a job in several settings and say which to take",
    "onefold.tools.cli.compare:compare",
    loads_torch=False,
)
def _compare(parser: argparse.ArgumentParser) -> None:
    """
    Run the same short job in several stages and offload settings, each in separate processes and in several rounds,
    and compare what was measured: seconds per step with their spread over the rounds, samples per second, peak memory,
    bytes sent, the loss. A setting that runs out of memory is a row like any other. Ends with a recommendation, which
    says where a difference is within the noise. The logs, records, a plot and compare.json are kept.

    A setting is a stage and what is offloaded: 0, 1, 2, 3, 2+cpu (optimizer), 3+cpu+param (and parameters), 3+nvme.

    examples:
      onefold compare                                              the small GPT, stages 0 to 3 and 3+cpu
      onefold compare --stages 2,3,3+cpu --preset 25m --steps 20 --rounds 5
      onefold compare --model llama/config.json --stages 2,3 --batch 2 --largest-batch
      onefold compare --stages 3+nvme+param --nvme-path /mnt/nvme0 --json
    """
    add = parser.add_argument
    add("--stages", default="0,1,2,3,3+cpu", metavar="LIST", help="settings, with commas (default: %(default)s)")
    _add_trials(parser)
    add("--rounds", type=at_least_one, default=3, metavar="N",
        help="runs of each setting, one of all settings after the other (default: %(default)s)")  # fmt: skip
    add("--largest-batch", action="store_true", help="also double the micro-batch until one fails (on GPUs)")
    add("--max-batch", type=at_least_one, default=1024, metavar="N",
        help="upper limit for --largest-batch (default: %(default)s)")  # fmt: skip


@command("tune", "find the fastest setting by short real runs", "onefold.tools.cli.tune:tune", loads_torch=False)
def _tune(parser: argparse.ArgumentParser) -> None:
    """
    Measure this machine, then find the fastest setting of a job by short real runs, each in processes of its own: the
    stage and what is offloaded, on GPUs the micro-batch, then buckets, prefetch and the share of states on the host.
    Out of memory is an answer. A search that was stopped goes on where it was: give the same --out again. Writes the
    config of the best and a table of all; the rates of the machine are kept for `onefold plan`.

    examples:
      onefold tune --out runs/tune                                 the small GPT, in stages 2, 3 and 3+cpu
      onefold tune --out runs/tune                                 goes on, if it was stopped
      onefold tune --model llama/ --config ds_config.json --write tuned.json
      onefold tune --stages 2,3 --no-knobs --steps 20
    """
    add = parser.add_argument
    add("--stages", default="2,3,3+cpu", metavar="LIST", help="settings, with commas (default: %(default)s)")
    _add_trials(parser)
    add("--max-batch", type=at_least_one, default=1024, metavar="N",
        help="largest micro-batch that is tried on GPUs (default: %(default)s)")  # fmt: skip
    add("--no-knobs", action="store_true", help="leave buckets, prefetch and ratio as they are")
    add("--write", metavar="FILE", help="where the config of the best goes (default: ds_config.json in the folder)")


@command("watch", "show a running job from its record", "onefold.tools.cli.watch_run:watch_run", loads_torch=False)
def _watch(parser: argparse.ArgumentParser) -> None:
    """
    Show a job while it runs, from the record that it writes: steps, loss, learning rate, gradient norm, samples per
    second, memory by tier, traffic of a step. Reads a file and nothing else, so it works beside the job, on another
    node that sees the folder, and after the end. Waits for a run that has not begun; says when no line comes any more;
    ends when the run has ended. Ctrl-C ends it, and does nothing to the job.

    `onefold train` writes the record into its folder. Any other job writes one with "onefold": {"report": "FOLDER"} in
    its config.

    examples:
      onefold watch runs/a                 until the run has ended
      onefold watch runs/a --once          what stands there now; for scripts
      onefold watch runs/a > log.txt       a line now and then, where there is no terminal
    """
    _add_run(parser)
    add = parser.add_argument
    add("--once", action="store_true", help="print once and end")
    add("--every", type=above_zero, default=1.0, metavar="SECONDS", help="between two looks at the file (default: 1)")


@command(
    "report",
    "one page about a run: curves, memory, time, traffic",
    "onefold.tools.cli.reports:report",
    loads_torch=False,
)
def _report(parser: argparse.ArgumentParser) -> None:
    """
    Write one page of HTML from the record of a run: loss, learning rate, gradient norm, memory by tier and kind, time
    by phase, traffic, and the plan against what was measured. The page is one file, which needs no network: send it to
    anybody. `onefold train` writes it at its end; of a run that goes on, it shows what there is.

    examples:
      onefold report runs/a                       runs/a/report.html
      onefold report runs/a --out page.html       elsewhere
      onefold report runs/a --png                 and report-loss.png and so on beside it, by matplotlib
    """
    _add_run(parser)
    add = parser.add_argument
    add("--out", metavar="FILE", help="the page (default: report.html beside the record)")
    add("--png", action="store_true", help="write the charts as PNG files too, beside the page; needs matplotlib")


@command("export", "write a checkpoint's weights for other tools", "onefold.tools.cli.checkpoint_commands:export")
def _export(parser: argparse.ArgumentParser) -> None:
    """
    Write the weights of a checkpoint, whole, to a folder that Hugging Face and plain torch load. Needs no GPU and no
    more memory than the largest tensor (the format bin: than one file); checks every byte it reads. Trained weights
    come from their fp32 masters. OUT gets its files when all are written: an export that fails leaves what was there
    before.

    examples:
      onefold export checkpoints weights                       what `latest` names, in fp32: weights/model.safetensors
      onefold export checkpoints weights --dtype bf16          half the size, as most models are published
      onefold export checkpoints/global_step500 weights        that one
      onefold export checkpoints weights --tag global_step500  the same
      onefold export checkpoints weights --format bin          pytorch_model.bin, for torch.load(weights_only=True)
      onefold export checkpoints adapter --exclude-frozen      what was trained, LoRA adapters say, and buffers

      python zero_to_fp32.py CKPT OUT, beside every checkpoint, does the same in fp32 with DeepSpeed's options.
    """
    add = parser.add_argument
    _add_folder(parser, "checkpoint", "CKPT")
    add("out", metavar="OUT", help="the folder to write to; made where it is not there")
    add("--tag", metavar="TAG", help="which checkpoint of CKPT (default: what `latest` names)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="of floating-point weights (default: fp32); others keep theirs")  # fmt: skip
    add("--format", choices=("safetensors", "bin"), default="safetensors",
        help="safetensors (default), or torch.save's pytorch_model.bin")  # fmt: skip
    add("--max-shard-size", type=size, metavar="SIZE", default="5GB",
        help="where to cut into several files with an index: 500MB, 5GB (default), 2GiB")  # fmt: skip
    add("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")


@command("ckpt", "list, inspect, verify and remove checkpoints")
def _ckpt(parser: argparse.ArgumentParser) -> None:
    """
    List checkpoints on disk, look into them, check them to the last byte, remove them.

    examples:
      onefold ckpt ls checkpoints                    what is there, how large, whether it is complete
      onefold ckpt inspect checkpoints               what `latest` holds: parameters, optimizer, steps, config
      onefold ckpt verify checkpoints --all          every byte against its checksum; exit code 1 if any is wrong
      onefold ckpt rm checkpoints global_step100     remove one

    `onefold ckpt ls --help` and so on tell more.
    """


@command("ckpt ls", "list the checkpoints of a folder", "onefold.tools.cli.checkpoint_commands:list_checkpoints")
def _ckpt_ls(parser: argparse.ArgumentParser) -> None:
    """
    List the checkpoints in DIR, newest first. Sizes and headers of all files are looked at; `verify` reads the rest.

    examples:
      onefold ckpt ls checkpoints
      onefold ckpt ls checkpoints --json | jq -r '.checkpoints[] | select(.complete) | .tag'
    """
    _add_folder(parser)
    _add_json(parser)


@command("ckpt inspect", "show what a checkpoint holds", "onefold.tools.cli.checkpoint_commands:inspect_checkpoint")
def _ckpt_inspect(parser: argparse.ArgumentParser) -> None:
    """
    Show what a checkpoint holds, from its manifest: no weights are read.

    examples:
      onefold ckpt inspect checkpoints                       what `latest` names
      onefold ckpt inspect checkpoints --tag global_step100
      onefold ckpt inspect checkpoints --tensors             every tensor by name, with dtype and shape
      onefold ckpt inspect checkpoints --json | jq .config   the config it was trained with
    """
    _add_folder(parser)
    parser.add_argument("--tag", metavar="TAG", help="which (default: what `latest` names)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    _add_json(parser)


@command(
    "ckpt verify", "read every byte against its checksum", "onefold.tools.cli.checkpoint_commands:verify_checkpoints"
)
def _ckpt_verify(parser: argparse.ArgumentParser) -> None:
    """
    Read every byte of a checkpoint against its checksum, and say which files, tensors and byte ranges are damaged. Goes
    on after the first. Exit code: 0 if all is as it was saved, 1 if anything is not.

    examples:
      onefold ckpt verify checkpoints                        what `latest` names
      onefold ckpt verify checkpoints --tag global_step100
      onefold ckpt verify checkpoints --all --json
    """
    _add_folder(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", metavar="TAG", help="which (default: what `latest` names)")
    which.add_argument("--all", action="store_true", help="all that DIR holds")
    _add_json(parser)


@command(
    "ckpt rm",
    "remove checkpoints, or what killed saves left",
    "onefold.tools.cli.checkpoint_commands:remove_checkpoints",
)
def _ckpt_rm(parser: argparse.ArgumentParser) -> None:
    """
    Remove checkpoints. Only onefold's own files go: the manifest, then the data; a folder that holds anything else
    stays. Asks first. What `latest` names is removed by --force only; `latest` then names the newest complete one that
    stays.

    examples:
      onefold ckpt rm checkpoints global_step100 global_step200
      onefold ckpt rm checkpoints global_step100 --yes       without asking, for scripts
      onefold ckpt rm checkpoints --leftovers                data of saves that were killed; what is being written stays
    """
    add = parser.add_argument
    _add_folder(parser, help="the folder that save_checkpoint was given")
    add("tags", metavar="TAG", nargs="*", help="what to remove")
    add("-y", "--yes", action="store_true", help="do not ask")
    add("--force", action="store_true", help="also what `latest` names")
    add("--leftovers", action="store_true", help="data that no manifest names and nobody writes, of all tags")


@command(
    "import-deepspeed",
    "turn DeepSpeed's checkpoint into onefold's",
    "onefold.tools.cli.checkpoint_commands:import_checkpoint",
)
def _import_deepspeed(parser: argparse.ArgumentParser) -> None:
    """
    Turn a checkpoint that DeepSpeed wrote (ZeRO stages 1, 2, 3, any number of ranks) into one of onefold's: weights,
    fp32 masters, optimizer states, step counts, scheduler, loss scale, client state. engine.load_checkpoint(OUT) then
    goes on from it, in any stage and on any number of ranks. Its pickles are read by an unpickler that knows tensors
    and plain data only: nothing in them is executed, and the source is never changed.

    examples:
      onefold import-deepspeed checkpoints checkpoints-onefold                 what `latest` names
      onefold import-deepspeed checkpoints out --tag global_step500            that one
      onefold ckpt inspect out                                                 what came of it
      onefold export out weights                                               its weights, whole
    """
    _add_folder(parser, "source", help="the folder that DeepSpeed saved to, or that of one tag")
    parser.add_argument("out", metavar="OUT", help="the folder to write to; made where it is not there")
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint of DIR (default: what `latest` names)")


@command("bench", "measure this machine: what would offloading cost?")
def _bench(parser: argparse.ArgumentParser) -> None:
    """
    Measure this machine, to choose a config by its numbers.

    examples:
      onefold bench tiers                        bus, host memory and host Adam, in seconds
      onefold bench tiers --path /mnt/nvme0      and the drive that states would rest on

    `onefold bench tiers --help` tells more.
    """


@command(
    "bench tiers",
    "bus, host Adam and disk, and what each offload setting would cost",
    "onefold.tools.cli.bench:bench_tiers",
    loads_torch=False,
)
def _bench_tiers(parser: argparse.ArgumentParser) -> None:
    """
    Measure what offloading depends on, and say what each setting would cost a step.

    measured:
      host copy      host memory to host memory, on all threads
      host Adam      the step of what is offloaded: 16-bit gradients, fp32 masters and moments
      page-locking   making the memory that the GPU copies to and from
      bus            GPU to host, host to GPU, and both at once
      disk           reading, writing and both at once, with O_DIRECT, in each --path

    The best of three counts. The numbers are kept by node in ~/.cache/onefold/tiers.json ($XDG_CACHE_HOME is
    respected). Without --path the disk's numbers of an earlier run are used, if there are any.

    The tables are for a model in bf16 with Adam, on one GPU, with one micro-step: bytes that rest in each tier, bytes
    that move in a step, and the seconds that bus, host Adam and disk are busy. They work at the same time, beside the
    forward and backward: a step takes at least as long as the slowest, which is named.

    examples:
      onefold bench tiers
      onefold bench tiers --path /mnt/nvme0 --path /mnt/nvme1    two drives, as "nvme_path" with two folders
      onefold bench tiers --parameters 7B                        what a model of 7 billion parameters would cost
      onefold bench tiers --size 4GB                             larger and slower: for machines with large caches
      onefold bench tiers --json --no-save | jq .measured.bus
    """
    add = parser.add_argument
    add("--path", metavar="DIR", action="append", default=[],
        help="measure the drive of this folder; repeat it for several drives (default: no disk)")  # fmt: skip
    add("--size", metavar="SIZE", default=DEFAULT_BENCH_SIZE,
        help=f"memory, and disk space, that each part works on (default: {DEFAULT_BENCH_SIZE})")  # fmt: skip
    add("--parameters", metavar="N", default="1B", help="of the model in the tables, e.g. 7B or 7e9 (default: 1B)")
    add("--no-save", action="store_true", help="do not keep the numbers")
    _add_json(parser)


@command("env", "show what this machine has", "onefold.tools.env_report:report_environment")
def _env(parser: argparse.ArgumentParser) -> None:
    """
    Show what this machine has and what onefold will use of it.

    examples:
      onefold env            a table: versions, devices, interconnect, memory, disk
      onefold env --json     the same for programs, and for bug reports
    """
    _add_json(parser)


def _add_trials(parser: argparse.ArgumentParser) -> None:
    """What `compare` and `tune` share."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="a DeepSpeed config: each setting takes the place of its own")
    add("--preset", choices=PRESET_NAMES, help="size of the built-in GPT, as for `onefold train`")
    add("--model", metavar="PATH", help="a Hugging Face model instead, as for `onefold train`")
    add("--lora", type=at_least_one, metavar="RANK", help="with --model: train a LoRA adapter")
    add("--sequence-length", type=at_least_one, metavar="N", help="with --model: tokens per sequence")
    add("--batch", type=at_least_one, metavar="N", help="sequences in a micro-batch (default: the config's)")
    add("--ranks", type=at_least_one, metavar="N", help="processes (default: as for `onefold train`)")
    add("--steps", type=at_least_one, default=12, metavar="N", help="steps of each run (default: %(default)s)")
    add("--nvme-path", metavar="DIR", help="a folder on the drive, for settings with nvme")
    add("--out", metavar="FOLDER", help="where everything goes (default: a new folder under runs/)")
    _add_json(parser)


def check_folder(options: argparse.Namespace) -> None:
    """Raise where the folder that a command reads is not there. Parsing does not look at files; this needs no torch."""
    if options.reads_folder is None:
        return
    path = Path(getattr(options, options.reads_folder))
    if not path.is_dir():
        raise UsageError(f"{path}: {'is not a folder' if path.exists() else 'there is no such folder'}")


def size(text: str) -> str:
    """Require a number of bytes, with or without a unit."""
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def port(text: str) -> int:
    """Require the number of a TCP port."""
    number = at_least_one(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port, which is from 1 to 65535")
    return number


def _add_folder(
    parser: argparse.ArgumentParser,
    name: str = "dir",
    metavar: str = "DIR",
    help: str = "the folder that save_checkpoint was given, or that of one tag",
) -> None:
    """Add the folder that a command reads, see `check_folder`."""
    parser.add_argument(name, metavar=metavar, help=help)
    parser.set_defaults(reads_folder=name)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="the folder of a run (OUT of onefold train, or onefold.report)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
