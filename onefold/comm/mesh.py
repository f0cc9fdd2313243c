"""Process groups: the default group, and the groups of ranks along the axes of the device mesh.

[Note: torch's NCCL switches]
Two features of torch would act before the hang detector when an NCCL collective fails or hangs. `init_distributed`
switches them off through the environment, so for every NCCL group of the process, those of the user included:

* The watchdog (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`). It ends the process without naming what the ranks wait for. The
  detector reports that on every rank and then aborts the communicators. Without the watchdog no timeout ends a hanging
  collective of the user's own on the device, which the detector does not see.
* The flight recorder (`TORCH_FR_BUFFER_SIZE=0`, and `TORCH_NCCL_TRACE_BUFFER_SIZE=0` for older releases). It reads
  Python objects after an error, also while the interpreter finalizes, which ends in a segmentation fault.

Variables that the user has set stay as they are. With the config key `onefold.nccl_error_handling` "torch", or the
argument of that name of `init_distributed`, none is set.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.comm.hang_detector import world_detector
from onefold.comm.job_environment import find_ranks
from onefold.comm.nodes import Nodes
from onefold.comm.store_server import listen_at

DATA_AXIS, SEQUENCE_AXIS, EXPERT_AXIS = "data", "sequence", "expert"
# The ledger's group for traffic between nodes.
ACROSS = "across"
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DEFAULT_TIMEOUT_MINUTES = 10.0


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    nccl_error_handling: Literal["onefold", "torch"] = "onefold",
) -> None:
    """Initialize the default process group unless there is one: NCCL on GPUs, gloo elsewhere.

    The positional arguments are DeepSpeed's. `auto_mpi_discovery`, `verbose` and `config` have no effect.
    `nccl_error_handling` "torch" leaves torch's watchdog and flight recorder on ([Note: torch's NCCL switches]).

    Ranks and addresses come from the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or from the
    variables of Slurm and MPI ([Note: ranks of Slurm and MPI]). Without any the world has one rank.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False, but torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group first, or leave the argument out."
        )
    if "WORLD_SIZE" not in os.environ and world_size <= 0:
        found = find_ranks(os.environ)
        os.environ.update({name: value for name, value in found.items() if name not in os.environ})
        rank, world_size = (-1, -1) if found else (0, 1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    timeout = timeout or timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", DEFAULT_TIMEOUT_MINUTES)))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
        if nccl_error_handling == "onefold":
            _switch_off_torch_handlers()
    store: Store | None = None
    if init_method is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        world_size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
        store = _make_store(rank, world_size, timeout)
    with _gloo_on_loopback() if world_size == 1 else nullcontext():
        dist.init_process_group(
            backend=dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"),
            init_method=init_method if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    world_detector()  # reports the end of this process from here on: others may wait for it in initialize


def _switch_off_torch_handlers() -> None:
    """Switch off torch's NCCL watchdog and flight recorder, unless the user has set them."""
    os.environ.setdefault(_WATCHDOG, "0")
    if not any(name in os.environ for name in _FLIGHT_RECORDER):
        os.environ.update(dict.fromkeys(_FLIGHT_RECORDER, "0"))


def _make_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Make the store in which ranks find each other: in memory for one rank, else a server on rank 0.

    The server listens at MASTER_ADDR alone, while torch's own listens on all interfaces. Return None if torch's own
    must be used; other ranks cannot tell the two apart.
    """
    if world_size == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = listen_at(host, port) if rank == 0 else None
    if rank == 0 and listener is None:
        return None
    store = TCPStore(
        host, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )
    return PrefixStore("default_pg", store)  # torch's prefix, because some ranks may be started by torch


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Bind gloo to the loopback interface: it opens a socket even in a world of one rank."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def num_ranks_on_node(group: Group) -> int:
    """Return the launcher's number of ranks on this node. Without a launcher all ranks count as being on one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", group.size))


def _nodes_of(host_group: dist.ProcessGroup) -> Nodes:
    """Return the nodes of a group's ranks, from what the launcher has set. All ranks call this together."""
    num_ranks = dist.get_world_size(host_group)
    if num_ranks == 1:
        return Nodes((1,))
    mine = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))])
    sizes = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(sizes, mine, group=host_group)
    return Nodes.from_launcher([int(size) for size in sizes])


def local_device() -> torch.device:
    """Return the device of this rank.

    If a node has more ranks than GPUs, ranks share them, which only the exchange staged through the host supports.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh."""

    axis: str
    process_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """The same ranks on gloo, on which the host itself waits. Used for exchanges between hosts."""

    nodes: Nodes
    replicas: int = 1
    """The number of replica groups (MiCS). Each has a whole model state, sharded over its neighbouring ranks."""

    is_fake: ClassVar[bool] = False
    """Whether this is a fake process group, in which the other ranks do not exist (`comm/fake_group.py`)."""

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def node_size(self) -> int:
        """Ranks per node, or the group's size if nodes have different sizes."""
        return self.nodes.common_size

    @property
    def num_shards(self) -> int:
        return self.size // self.replicas

    @property
    def shard(self) -> int:
        """The index of the shard that this rank stores."""
        return self.rank % self.num_shards

    @cached_property
    def uses_nccl(self) -> bool:
        return "nccl" in str(dist.get_backend(self.process_group))

    @cached_property
    def device(self) -> torch.device:
        """The device that this group's backend communicates from."""
        return torch.device("cuda", torch.cuda.current_device()) if self.uses_nccl else torch.device("cpu")

    def global_rank(self, rank: int) -> int:
        """Return a rank of this group as a rank of the default group."""
        return dist.get_global_rank(self.process_group, rank)

    @cached_property
    def global_ranks(self) -> list[int]:
        """The rank in the default group of each rank."""
        return [self.global_rank(rank) for rank in range(self.size)]

    @cached_property
    def axes(self) -> list[str]:
        """The ledger's group for traffic to each rank."""
        return [self.axis if self.is_near(rank) else ACROSS for rank in range(self.size)]

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks, from the next one upwards, so that ranks do not all send to the same one first."""
        return self.peers_within(self.size)

    def peers_within(self, span: int) -> list[int]:
        """Return the other ranks of this rank's block of `span` neighbours."""
        first, place = self.rank - self.rank % span, self.rank % span
        return [first + (place + distance) % span for distance in range(1, span)]

    def is_near(self, peer: int) -> bool:
        """Return whether a rank is on the same node."""
        return self.nodes.of(peer) == self.nodes.of(self.rank)


_mesh: tuple[dist.ProcessGroup, DeviceMesh, dist.ProcessGroup, Nodes] | None = None


def data_group(node_size: int | None = None, replicas: int = 1) -> Group:
    """Return the group over which model state is sharded. Its mesh is made once per process group.

    `node_size` is the number of ranks per node; None for the launcher's.
    """
    global _mesh
    world = dist.group.WORLD
    assert world is not None, "init_distributed comes first"
    if _mesh is None or _mesh[0] is not world:
        kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
        alone = dist.get_world_size() == 1
        with world_detector().waiting_for("the process groups"), _gloo_on_loopback() if alone else nullcontext():
            mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=(DATA_AXIS,))
            group = mesh.get_group(DATA_AXIS)
            # The mesh's group is the user's. Gloo matches calls by their kind and number alone, so a user's collective
            # there could receive the data of one of ours.
            host = group if alone else dist.new_group(backend="gloo", timeout=timeout_of(world))
            _mesh = (world, mesh, host, _nodes_of(host))
    _, mesh, host, nodes = _mesh
    if node_size is not None:
        nodes = Nodes.of_size(node_size, nodes.num_ranks)
    process_group = mesh.get_group(DATA_AXIS) if mesh.device_type == "cuda" else host
    return Group(DATA_AXIS, process_group, host, nodes, replicas)


_groups: dict[tuple[str, int], tuple[dist.ProcessGroup, Group]] = {}


def sequence_group(size: int, data: Group) -> Group:
    """Return the group of `size` neighbouring ranks of `data` that have the parts of the same sequences.

    It is made once per process group and size. All ranks call this together.
    """
    return _group_of_axis(
        SEQUENCE_AXIS, size, [range(start, start + size) for start in range(0, data.size, size)], data
    )


def expert_group(size: int, data: Group) -> Group:
    """Return the group of `size` ranks of `data` that together have all experts. Its rank i computes with part i.

    Ranks with the same experts are neighbours, so the ranks of a group are apart by their number. The group is made
    once per process group and size. All ranks call this together.
    """
    distance = data.size // size
    return _group_of_axis(EXPERT_AXIS, size, [range(place, data.size, distance) for place in range(distance)], data)


def _group_of_axis(axis: str, size: int, groups: Sequence[range], data: Group) -> Group:
    """Return the group with this rank, out of the groups along an axis of the mesh."""
    own_ranks = next(ranks for ranks in groups if data.rank in ranks)
    nodes = data.nodes.among(own_ranks)
    if data.is_fake:
        return replace(data, axis=axis, nodes=nodes, replicas=1)
    world = dist.group.WORLD
    assert world is not None, "init_distributed comes first"
    found = _groups.get((axis, size))
    if found is not None and found[0] is world:
        return replace(found[1], nodes=nodes)  # engines may count nodes differently
    kind = "nccl" if "nccl" in str(dist.get_backend()) else "gloo"
    own: dict[str, dist.ProcessGroup] = {}
    with world_detector().waiting_for("the process groups"):
        for ranks in groups:
            for backend in dict.fromkeys((kind, "gloo")):
                group = dist.new_group(list(ranks), backend=backend, timeout=timeout_of(world))
                if ranks is own_ranks:
                    own[backend] = group
    group = Group(axis, own[kind], own["gloo"], nodes)
    _groups[axis, size] = world, group
    return group


def timeout_of(world: dist.ProcessGroup) -> timedelta:
    """Return how long a wait in a process group may last."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend(world)) else "cpu")
    return world._get_backend(device).options._timeout  # type: ignore[no-any-return]
