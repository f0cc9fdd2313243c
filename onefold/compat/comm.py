"""The functions of `deepspeed.comm` that torch.distributed does not have."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from onefold import comm
from onefold.compat.not_offered import NotOffered
from onefold.log import logger

MPI_WORLD_SIZE_ENV_VARS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Variables with the number of processes, of launchers that set neither RANK nor WORLD_SIZE."""

_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    *rest: Any,
    **given: Any,
) -> None:
    """Start torch.distributed if it does not run; under an MPI launcher ranks and addresses come from mpi4py."""
    wanted = not dist.is_initialized() and given.get("dist_init_required") is not False
    if wanted and auto_mpi_discovery and not all(name in os.environ for name in _OF_LAUNCHER):
        if in_multi_rank_mpi_job():
            mpi_discovery(distributed_port=distributed_port, verbose=verbose)
        elif given.get("world_size", -1) <= 0 and "WORLD_SIZE" not in os.environ:
            single_process_discovery(distributed_port=distributed_port, verbose=verbose)
    comm.init_distributed(dist_backend, auto_mpi_discovery, distributed_port, verbose, *rest, **given)


def in_multi_rank_mpi_job() -> bool:
    return any(os.environ.get(name, "").isdigit() and int(os.environ[name]) > 1 for name in MPI_WORLD_SIZE_ENV_VARS)


def single_process_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set the environment variables that a launcher sets for a single rank, unless they are set."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**one, "MASTER_PORT": str(distributed_port)}.items():
        os.environ.setdefault(name, value)


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set the environment variables of a launcher from MPI. Ranks of one node have the same processor name."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            f"this process is one of several of an MPI or SLURM job, but not all of {', '.join(_OF_LAUNCHER)} are set. "
            "Install mpi4py, or start with a launcher that sets them."
        ) from error
    world = MPI.COMM_WORLD
    rank, node = world.Get_rank(), MPI.Get_processor_name()
    address = world.bcast(socket.gethostbyname(socket.gethostname()) if rank == 0 else None, root=0)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world.Get_size()),
        "LOCAL_RANK": str(world.allgather(node)[:rank].count(node)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(distributed_port),
    }
    if verbose:
        logger.info("MPI: rank %s of %s at %s:%s", rank, world.Get_size(), address, distributed_port)


def get_local_rank() -> int:
    return comm.local_rank()


def get_world_rank_from_launcher() -> int:
    return int(os.environ.get("RANK", 0))


def get_world_size_from_launcher() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """Return a device mesh of torch for the script."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(comm.local_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def configure(*args: Any, **kwargs: Any) -> None:
    logger.info("deepspeed.comm.configure: every call and byte is always counted; read engine.ledger")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    logger.info("deepspeed.comm.log_summary: read engine.ledger")


class TorchBackend(NotOffered):
    what = "a backend around torch.distributed (its functions are called directly)"


def known_world_size(world_size: int | None) -> int | None:
    """Return the world size that was given or that the launcher set, or None if only `init_method` determines it."""
    if world_size is not None and world_size > 0:
        return world_size
    launched = os.environ.get("WORLD_SIZE", "")
    return int(launched) if launched.isdigit() and int(launched) > 0 else None
