"""Arguments and help of the commands that run jobs, and of those that read a run's record."""

from __future__ import annotations

import argparse
from typing import Any

from onefold.tools.cli.usage import DEFAULT_HOSTFILE, DEFAULT_PORT, add_json, add_run, port
from onefold.tools.train.options import (
    PRESET_NAMES,
    above_zero,
    add_arguments,
    add_job_arguments,
    add_recipe,
    at_least_one,
    not_negative,
)


def train(parser: argparse.ArgumentParser) -> None:
    """Fine-tune a Hugging Face model on your data, or train a small built-in GPT.

    Runs on every GPU, or as two processes on a machine without GPUs. Shows the plan, a progress bar, a summary with
    traffic and memory, a plot and a sample of generated text. Writes the trained weights, the metrics and one page
    about the run (report.html) to a folder. Ctrl-C ends the run after the current step and writes the same files.

    Rows (.jsonl, .json, .parquet) have `text`, `prompt` and `completion`, `messages`, `conversations` (ShareGPT), or
    `instruction`, `input` and `output` (Alpaca).

    examples:
      onefold train --model llama/ --data rows.jsonl --lora      fine-tune an adapter; it is saved in OUT/adapter
      onefold train --model llama/ --data rows.jsonl --epochs 3  fine-tune all weights; they are saved in OUT/model
      onefold train --model llama/ --data rows.parquet --qlora 64 --lr 1e-4 --batch 2 --accumulation 8
      onefold train recipe.yaml --epochs 2                       flags from a file, and one of them replaced
      onefold train                                              a small GPT, in two minutes on two CPU cores
      onefold train --preset 25m --stage 1 --ranks 4             a larger GPT, another ZeRO stage, four ranks
      onefold train --data ~/notes README.md --steps 500         the GPT, on your text
      onefold train --config ds_config.json                      with your DeepSpeed config
      onefold train --out runs/a --save-every 50                 with checkpoints, in runs/a/checkpoints
      onefold train --resume runs/a --steps 600                  continue that run from its last checkpoint

      on several nodes:  onefold launch --hostfile hosts --module onefold.train --steps 500
    """
    add_recipe(parser)
    add_arguments(parser)
    add_job_arguments(parser)


def merge(parser: argparse.ArgumentParser) -> None:
    """Merge the adapter of a run into its model, and save the result for transformers.

    The model is read in the data type of its files. An adapter of --qlora is merged into these weights, too, not into
    the 4-bit ones.

    examples:
      onefold merge runs/a                  writes runs/a/merged
      onefold merge runs/a --out llama-cat  elsewhere
    """
    parser.add_argument("folder", metavar="FOLDER", help="folder of a run with --lora or --qlora, or its adapter")
    parser.add_argument("--out", metavar="FOLDER", help="where the model is written (default: FOLDER/merged)")


def chat(parser: argparse.ArgumentParser) -> None:
    """Chat with a model that `onefold train` has saved, or with another model of transformers.

    Each line of input is a turn. It is passed in the format of the training data: the chat template of the tokenizer,
    Alpaca's prompt if the run was trained on such rows, or as it is if there is no template. Runs in one process, on a
    GPU if there is one.

    examples:
      onefold chat runs/a                                 until Ctrl-D
      onefold chat runs/a --prompt "Who are you?"         one answer, for scripts
      onefold chat llama/ --temperature 0                 a model on disk, always the likeliest token
    """
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of a run, of an adapter, or of a model of transformers")
    add("--prompt", metavar="TEXT", help="print the answer to this text and exit")
    add("--max-tokens", type=at_least_one, default=256, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--temperature", type=_temperature, default=0.7, metavar="T",
        help="0: always the likeliest token (default: %(default)s)")  # fmt: skip
    add("--seed", type=not_negative, default=0, metavar="N", help="seed of the answers (default: %(default)s)")


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else above_zero(text)


def launch(parser: argparse.ArgumentParser) -> None:
    """Start a script on every GPU of this node, or as one process without a GPU, with torch's rendezvous.

    The script finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment; onefold.initialize
    reads them. If a rank fails, its traceback is shown, and the command ends with its exit code.

    examples:
      onefold launch train.py --deepspeed_config ds_config.json      every GPU of this node
      onefold launch --nproc 4 train.py                              four ranks, on GPUs 0 to 3, or on the CPU
      onefold launch --include localhost:1,3 train.py                two ranks, on GPUs 1 and 3
      onefold launch --module package.train --epochs 3               as `python -m package.train --epochs 3`

      two nodes, eight GPUs each; run the same command on both, each with its --node_rank:
      onefold launch --num_nodes 2 --node_rank 0 --master_addr node1 train.py

      the same from a hostfile (lines such as `node1 slots=8`); each node finds its entry:
      onefold launch --hostfile hosts train.py

      the same, started from one node by ssh:
      onefold launch --hostfile hosts --ssh train.py

      two to eight nodes; when one fails or joins, the ranks restart on those that are there:
      onefold launch --nnodes 2:8 --max-restarts 10 --master_addr node1 train.py
    """
    add = parser.add_argument
    add("--num_gpus", "--nproc", type=at_least_one, metavar="N", dest="num_gpus",
        help="ranks on each node (default: its GPUs, or 1 without GPUs)")  # fmt: skip
    add("--num_accelerators", "--nproc_per_node", "--nproc-per-node", type=at_least_one, dest="num_gpus",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    add("--num_nodes", "--nnodes", action=_NumNodes, metavar="N", default=None,
        help="number of nodes (default: 1, or the hostfile's); MIN:MAX: continue with MIN or more after a "
        "failure")  # fmt: skip
    add("--node_rank", "--node-rank", type=not_negative, metavar="K",
        help="rank of this node, from 0 (with MIN:MAX, node 0 is found by its address)")  # fmt: skip
    add("--master_addr", "--master-addr", metavar="NODE", help="name or address of node 0, which must not fail")
    add("--master_port", "--master-port", type=port, metavar="PORT",
        help=f"port on node 0 (default: a free one; {DEFAULT_PORT} with several nodes)")  # fmt: skip
    add("-H", "--hostfile", metavar="FILE", help=f"lines such as `node1 slots=8` (default: {DEFAULT_HOSTFILE})")
    add("-i", "--include", default="", metavar="CHOICE", help="nodes and slots to use, e.g. node1:0,2@node2")
    add("-e", "--exclude", default="", metavar="CHOICE", help="nodes and slots not to use, e.g. node1:0,2@node2")
    add("--max-restarts", "--max_restarts", type=not_negative, default=0, metavar="N",
        help="restart all ranks after a failure, at most N times (default: 0)")  # fmt: skip
    add("--ssh", action="store_true", help="start all nodes of the hostfile by ssh")
    add("--ssh_args", "--ssh-args", default="", metavar="ARGS", help="with --ssh: arguments of ssh, e.g. '-p 2222'")
    add("--export", default="", metavar="NAMES",
        help="with --ssh: further variables for all ranks, comma-separated; they are sent over stdin")  # fmt: skip
    add("--fork-server", action="store_true",
        help="fork the ranks from a process that has imported torch, so that restarts take less time")  # fmt: skip
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for `python -m`")
    add("--no_python", "--no-python", action="store_true", help="SCRIPT is a program, not a Python script")
    add("--no_local_rank", action="store_true", help=argparse.SUPPRESS)  # accepted and ignored
    parser.set_defaults(passes_local_rank=False, quiet=False, min_nodes=None)
    add("script", metavar="SCRIPT", help="the script that every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


class _NumNodes(argparse.Action):
    """Reads `N` or `MIN:MAX` to `num_nodes` and `min_nodes`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        least, colon, most = str(values).rpartition(":")
        try:
            namespace.num_nodes = at_least_one(most)
            namespace.min_nodes = at_least_one(least) if colon else None
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentError(self, f"{values}: {error}") from None
        if colon and namespace.min_nodes > namespace.num_nodes:
            raise argparse.ArgumentError(self, f"{values}: the minimum exceeds the maximum. Write MIN:MAX.")


def compare(parser: argparse.ArgumentParser) -> None:
    """Run the same short job in several stages and offload settings, and compare the measurements.

    Each setting runs in separate processes and in several rounds. The table shows seconds per step with their spread
    over the rounds, samples per second, peak memory, bytes sent, and the loss. Settings that run out of memory are
    listed, too. The recommendation at the end names differences that are within the noise. The logs, records, a plot
    and compare.json are kept.

    A setting is a stage and its offloading: 0, 1, 2, 3, 2+cpu (optimizer), 3+cpu+param (and parameters), 3+nvme.

    examples:
      onefold compare                                              the small GPT, stages 0 to 3 and 3+cpu
      onefold compare --stages 2,3,3+cpu --preset 25m --steps 20 --rounds 5
      onefold compare --model llama/config.json --stages 2,3 --batch 2 --largest-batch
      onefold compare --stages 3+nvme+param --nvme-path /mnt/nvme0 --json
    """
    add = parser.add_argument
    add("--stages", default="0,1,2,3,3+cpu", metavar="LIST", help="settings, comma-separated (default: %(default)s)")
    _add_trials(parser)
    add("--rounds", type=at_least_one, default=3, metavar="N",
        help="rounds over all settings (default: %(default)s)")  # fmt: skip
    add("--largest-batch", action="store_true", help="also double the micro-batch until it does not fit (GPUs only)")
    add("--max-batch", type=at_least_one, default=1024, metavar="N",
        help="upper limit for --largest-batch (default: %(default)s)")  # fmt: skip


def audit(parser: argparse.ArgumentParser) -> None:
    """Compare the first steps of a script with plain torch, on CPU ranks.

    Runs the script once with each of these behind `initialize`: plain torch, the ZeRO stage of its config, FSDP2, and
    DeepSpeed if it is installed. Everything is computed in fp32 and without offloading, so that results agree up to
    rounding. Names the first loss, gradient or update that differs, ranks that diverge, parameters without a gradient,
    and keys of the config without effect. The exit code is 1 if something differs.

    The script calls `onefold.initialize` or `deepspeed.initialize` with a model, and trains with `engine.backward` and
    `engine.step`. It ends after the last step. Without a script, the built-in GPT is trained with --config.

    examples:
      onefold audit train.py                                 with the config that the script passes
      onefold audit train.py --config ds_config.json         with another config
      onefold audit --layers 2 --steps 5 train.py --data a   with two of the model's layers; arguments of the script
      onefold audit --config ds_config.json --stage 3        a config alone, in another stage
    """
    add = parser.add_argument
    add("--config", metavar="FILE", help="DeepSpeed config, instead of the one that the script passes")
    add("--steps", type=at_least_one, default=3, metavar="N", help="optimizer steps (default: %(default)s)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage, instead of that of the config")
    add("--layers", type=at_least_one, metavar="N", help="keep the first N modules of the longest ModuleList")
    add("--ranks", type=at_least_one, default=2, metavar="N", help="CPU ranks (default: %(default)s)")
    add("--timeout", type=at_least_one, default=600, metavar="SECONDS", help="for each run (default: %(default)s)")
    add("script", metavar="SCRIPT", nargs="?", help="the script that every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


def tune(parser: argparse.ArgumentParser) -> None:
    """Measure this machine, then find the fastest setting of a job by short real runs.

    Each run has separate processes. The search chooses the stage and the offload setting, on GPUs the micro-batch, then
    bucket sizes, prefetching and the share of states on the host. Running out of memory counts as a result. To resume a
    search that was stopped, give the same --out again. Writes the config of the fastest setting and a table of all;
    saves the rates of the machine for `onefold plan`.

    examples:
      onefold tune --out runs/tune                                 the small GPT, in stages 2, 3 and 3+cpu
      onefold tune --out runs/tune                                 resumes a search that was stopped
      onefold tune --model llama/ --config ds_config.json --write tuned.json
      onefold tune --stages 2,3 --no-knobs --steps 20
    """
    add = parser.add_argument
    add("--stages", default="2,3,3+cpu", metavar="LIST", help="settings, comma-separated (default: %(default)s)")
    _add_trials(parser)
    add("--max-batch", type=at_least_one, default=1024, metavar="N",
        help="largest micro-batch that is tried on GPUs (default: %(default)s)")  # fmt: skip
    add("--no-knobs", action="store_true", help="do not tune bucket sizes, prefetching and offload ratio")
    add("--write", metavar="FILE", help="write the config of the fastest setting here (default: ds_config.json in OUT)")


def watch(parser: argparse.ArgumentParser) -> None:
    """Show a job while it runs: steps, loss, learning rate, gradient norm, samples per second, memory, traffic.

    Reads only the record that the job writes, so it works on another node that sees the folder, and after the run.
    Waits for a run that has not started, reports when the record stops growing, and ends with the run. Ctrl-C ends it
    without affecting the job.

    `onefold train` writes the record into its folder. Any other job writes one with "onefold": {"report": "FOLDER"} in
    its config.

    examples:
      onefold watch runs/a                 until the run has ended
      onefold watch runs/a --once          the current state; for scripts
      onefold watch runs/a > log.txt       one line at intervals, without a terminal
    """
    add_run(parser)
    add = parser.add_argument
    add("--once", action="store_true", help="print the current state and exit")
    add("--every", type=above_zero, default=1.0, metavar="SECONDS", help="interval between reads (default: 1)")


def report(parser: argparse.ArgumentParser) -> None:
    """Write one page of HTML from the record of a run.

    It shows loss, learning rate, gradient norm, memory by tier and kind, time by phase, traffic, and planned against
    measured bytes. The page is one file and needs no network. `onefold train` writes it at the end. For a job that is
    still running, the page shows the steps so far.

    examples:
      onefold report runs/a                       runs/a/report.html
      onefold report runs/a --out page.html       elsewhere
      onefold report runs/a --png                 also report-loss.png and so on, with matplotlib
      onefold report s3://bucket/a --out a.html   of a record in an object store
    """
    add_run(parser)
    add = parser.add_argument
    add("--out", metavar="FILE", help="file of the page (default: report.html next to the record)")
    add("--png", action="store_true", help="also write the charts as PNG files next to the page; needs matplotlib")


def _add_trials(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `compare` and `tune` share."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="DeepSpeed config; each setting replaces its ZeRO settings")
    add("--preset", choices=PRESET_NAMES, help="size of the built-in GPT, as for `onefold train`")
    add("--model", metavar="PATH", help="Hugging Face model instead of the GPT, as for `onefold train`")
    add("--lora", type=at_least_one, metavar="RANK", help="with --model: train a LoRA adapter")
    add("--sequence-length", type=at_least_one, metavar="N", help="with --model: tokens per sequence")
    add("--batch", type=at_least_one, metavar="N", help="sequences in a micro-batch (default: the config's)")
    add("--ranks", type=at_least_one, metavar="N", help="number of processes (default: as for `onefold train`)")
    add("--steps", type=at_least_one, default=12, metavar="N", help="steps of each run (default: %(default)s)")
    add("--nvme-path", metavar="DIR", help="folder on the NVMe drive, for settings with nvme")
    add("--out", metavar="FOLDER", help="folder for all results (default: a new one under runs/)")
    add_json(parser)
