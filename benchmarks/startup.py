"""How long until there is an engine: a model built under zero.Init and initialized, beside FSDP2's `fully_shard`.

`python -m benchmarks.startup --preset 6.7b` on one rank; under a launcher on several. The process group stands before.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

import onefold
from benchmarks.model import GPT, PRESETS
from benchmarks.systems import Workload, adamw, zero_config
from onefold.comm import init_distributed, local_device


def with_onefold(preset: str) -> object:
    config = zero_config(3, Workload(preset, "bf16", 1, 1, 1, 1, local_device().type))
    with onefold.zero.Init(config_dict_or_path=config):
        model = GPT(PRESETS[preset])
    return onefold.initialize(model=model, model_parameters=model.parameters(), config=config)


def with_fsdp2(preset: str) -> object:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with local_device():
        model = GPT(PRESETS[preset])
    mesh = dist.init_device_mesh(local_device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adamw(model)


SYSTEMS = {"onefold": with_onefold, "fsdp2": with_fsdp2}


def measure(system: str, preset: str) -> float:
    """Seconds."""
    dist.barrier()
    torch.manual_seed(1)
    start = time.perf_counter()
    held = SYSTEMS[system](preset)
    if local_device().type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del held
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="1.3b")
    parser.add_argument("--system", choices=list(SYSTEMS), default="onefold")
    arguments = parser.parse_args()
    init_distributed()
    dist.all_reduce(torch.zeros(1, device=local_device()))  # communicators are made when they are used first
    seconds = measure(arguments.system, arguments.preset)
    if dist.get_rank() == 0:
        where = f"{dist.get_world_size()} ranks on {local_device().type}"
        print(f"{arguments.system}, {arguments.preset}, {where}: {seconds:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
