"""Arguments and help of the commands about a machine: forecasts, benchmarks, the environment."""

from __future__ import annotations

import argparse

from onefold.tools.cli.usage import DEFAULT_BENCH_SIZE, add_json


def plan(parser: argparse.ArgumentParser) -> None:
    """Forecast memory, traffic and time of each stage, offload and ZeRO++ setting, and recommend one.

    The engine itself runs a step of each setting as one rank of the job, on tensors without memory (a dry run), so
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
          with every kind of memory, traffic, and the bottleneck of a step
      onefold plan --model mymodel:build --machine 4090 --batch 1 --recompute
      onefold plan --model llama/ --machine 8xH100 --nodes 4 --link 400Gbit/s
      onefold plan --model llama/ --lora 16 --machine "one 4090" --batch 1
      onefold plan --model 7b --gpus 4 --gpu-memory 48GB --host-memory 1TB
      onefold plan --model 1.3b --machine 8xH100 --write ds_config.json
      onefold plan --model 1.3b --machine 8xH100 --json | jq .settings
    """
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="number of parameters, e.g. 7B or 7e9; forecasts model states only")
    what.add_argument("--model", metavar="MODEL", help="model, see above")
    add("--lora", type=int, metavar="RANK", help="LoRA adapters of this rank (models of transformers)")
    add("--recompute", action="store_true", help="use activation checkpointing in every block")
    add("--batch", type=int, metavar="N", help="sequences per micro-batch (default: 1, or the config's)")
    add("--seq", type=int, metavar="N", help="tokens per sequence (default: the model's limit, at most 2048)")
    add("--machine", metavar="GPUS", help="one node, e.g. 8xH100 or 4090 (default: this machine's GPUs)")
    add("--gpus", type=int, metavar="N", help="GPUs per node (default: those of the machine)")
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpu-memory", metavar="SIZE", help="memory per GPU, e.g. 80GB, 80GiB or 80 (GB)")
    add("--host-memory", metavar="SIZE", help="host memory per node, e.g. 1TB")
    add("--nvme", metavar="SIZE", help="NVMe capacity per node, e.g. 8TB; 0: none")
    add("--bus", metavar="RATE", help="bandwidth between a GPU and its host, per direction, e.g. 50GB/s")
    add("--link", metavar="RATE", help="bandwidth between nodes, per direction, e.g. 50GB/s or 400Gbit/s")
    add("--config", metavar="FILE", help="DeepSpeed config; each setting replaces its ZeRO settings")
    add("--write", metavar="FILE", help="write the config of the recommended setting")
    add("--wide", action="store_true", help="also print memory by kind, traffic, and seconds by resource")
    add_json(parser)


def bench(parser: argparse.ArgumentParser) -> None:
    """Measure this machine, to choose a config from the results.

    examples:
      onefold bench tiers                        bus, host memory and host Adam, in seconds
      onefold bench tiers --path /mnt/nvme0      also the drive for offloaded states

    See also `onefold bench tiers --help`.
    """


def bench_tiers(parser: argparse.ArgumentParser) -> None:
    """Measure the rates that bound offloading, and estimate the cost per step of each setting.

    measured:
      host copy      host memory to host memory, on all threads
      host Adam      the offloaded step: 16-bit gradients, fp32 masters and moments
      page-locking   allocating memory that the GPU copies to and from
      bus            GPU to host, host to GPU, and both at once
      disk           reading, writing and both at once, with O_DIRECT, in each --path

    The best of three measurements counts. The results are stored by node in ~/.cache/onefold/tiers.json
    ($XDG_CACHE_HOME is respected). Without --path, the disk rates of an earlier run are used, if there are any.

    The tables are for a bf16 model with Adam, on one GPU, with one micro-step: bytes stored in each tier, bytes moved
    per step, and the seconds that bus, host Adam and disk are busy. They work at the same time as forward and backward,
    so a step takes at least as long as the slowest of them, which is named.

    examples:
      onefold bench tiers
      onefold bench tiers --path /mnt/nvme0 --path /mnt/nvme1    two drives, as "nvme_path" with two folders
      onefold bench tiers --parameters 7B                        for a model of 7 billion parameters
      onefold bench tiers --size 4GB                             slower; for machines with large caches
      onefold bench tiers --json --no-save | jq .measured.bus
    """
    add = parser.add_argument
    add("--path", metavar="DIR", action="append", default=[],
        help="measure the drive of this folder; repeat it for several drives (default: no disk)")  # fmt: skip
    add("--size", metavar="SIZE", default=DEFAULT_BENCH_SIZE,
        help=f"memory and disk space of each measurement (default: {DEFAULT_BENCH_SIZE})")  # fmt: skip
    add("--parameters", metavar="N", default="1B", help="size of the model in the tables, e.g. 7B or 7e9 (default: 1B)")
    add("--no-save", action="store_true", help="do not store the results")
    add_json(parser)


def env(parser: argparse.ArgumentParser) -> None:
    """Show the versions, devices and memory of this machine, and the backends that onefold uses.

    examples:
      onefold env            a table: versions, devices, interconnect, memory, disk
      onefold env --json     the same for programs, and for bug reports
    """
    add_json(parser)
