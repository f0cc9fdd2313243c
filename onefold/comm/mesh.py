"""Process groups: started once, named once. Everything above asks for a group by its axis."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.comm.nodes import Nodes
from onefold.comm.watch import watch_world

DATA_AXIS = "data"
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
) -> None:
    """Start the default process group if none runs: NCCL where there are GPUs, gloo elsewhere.

    The arguments are DeepSpeed's. `auto_mpi_discovery`, `verbose` and `config` have nothing to do: under an MPI
    launcher this raises, and nothing is printed.

    Ranks and addresses come from the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Without any
    of it this is a world of one rank.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError("dist_init_required is False, but torch.distributed is not initialized")
    if "WORLD_SIZE" not in os.environ and world_size <= 0:
        _check_alone()
        rank, world_size = 0, 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    timeout = timeout or timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", DEFAULT_TIMEOUT_MINUTES)))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
        # The hang guard says what is wrong on every rank and ends their waits; torch would end the process first.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # Its record of what NCCL did is written out from Python's objects after an error, also while the process ends,
        # which is then a segmentation fault. Who wants the record sets one of these.
        if not any(name in os.environ for name in _FLIGHT_RECORDER):
            os.environ.update(dict.fromkeys(_FLIGHT_RECORDER, "0"))
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
    watch_world()  # from here on a rank that ends says so: others may wait for it in initialize


def _check_alone() -> None:
    """Refuse to take one of several processes of an MPI or SLURM launcher, which sets no RANK, for a world alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if (size := os.environ.get(name, "")).isdecimal() and int(size) > 1:
            raise RuntimeError(
                f"{name} = {size}: this process is one of several, and RANK and WORLD_SIZE are not set, so each would "
                "train alone. Start them with torchrun, onefold launch or deepspeed; or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the launcher's variables"
            )


def _make_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Where ranks find each other: nowhere for one rank; else a server on rank 0 that listens at MASTER_ADDR alone,
    where torch's own listens on all interfaces. None: torch's own has to do, which other ranks cannot tell from ours.
    """
    if world_size == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listen(host, port) if rank == 0 else None
    if rank == 0 and listener is None:
        return None
    store = TCPStore(
        host, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )
    return PrefixStore("default_pg", store)  # as torch has it, whose ranks may be among the clients


def _listen(host: str, port: int) -> int | None:
    """A listening socket at this address; None where it is none of this node's, or a name, which nodes may resolve
    differently.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((str(address), port))
        found.listen(2048)
        return found.detach()
    except OSError:
        found.close()
        return None


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """A world of one rank talks to nobody, but gloo opens a socket all the same."""
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
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def num_ranks_on_node(group: Group) -> int:
    """By the launcher; without its word all ranks are held to be on one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", group.size))


def _nodes_of(host_group: dist.ProcessGroup) -> Nodes:
    """The nodes of a group's ranks, by the launcher. All ranks call this together."""
    num_ranks = dist.get_world_size(host_group)
    if num_ranks == 1:
        return Nodes((1,))
    mine = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))])
    told = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(told, mine, group=host_group)
    return Nodes.from_launcher([int(size) for size in told])


def local_device() -> torch.device:
    """The device of this rank. Ranks beyond the GPUs of a node share them, which only a host-staged wire can serve."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh."""

    axis: str
    process_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """The same ranks on a backend whose waits the host makes itself: where ranks tell each other what comes next."""

    nodes: Nodes
    replicas: int = 1
    """How many groups of neighbouring ranks hold a model state each, sharded over the ranks of the group (MiCS)."""

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
        """Ranks of each node; nodes of different sizes are held to be one."""
        return self.nodes.common_size

    @property
    def num_shards(self) -> int:
        return self.size // self.replicas

    @property
    def shard(self) -> int:
        """Which shard this rank holds."""
        return self.rank % self.num_shards

    @cached_property
    def uses_nccl(self) -> bool:
        return "nccl" in str(dist.get_backend(self.process_group))

    @cached_property
    def device(self) -> torch.device:
        """Where tensors must lie to travel in this group."""
        return torch.device("cuda", torch.cuda.current_device()) if self.uses_nccl else torch.device("cpu")

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest above first, so that no rank is everybody's first target."""
        return self.peers_within(self.size)

    def peers_within(self, span: int) -> list[int]:
        """The other ranks of the `span` neighbours that this rank is one of."""
        first, place = self.rank - self.rank % span, self.rank % span
        return [first + (place + distance) % span for distance in range(1, span)]

    def is_near(self, peer: int) -> bool:
        """Whether a rank is on the same node."""
        return self.nodes.of(peer) == self.nodes.of(self.rank)


_mesh: tuple[dist.ProcessGroup, DeviceMesh, dist.ProcessGroup, Nodes] | None = None


def data_group(node_size: int | None = None, replicas: int = 1) -> Group:
    """The group over which model state is sharded, out of a mesh that is made once per process group. `node_size`:
    ranks of a node, where the launcher's word is not to be taken.
    """
    global _mesh
    world = dist.group.WORLD
    assert world is not None, "init_distributed comes first"
    if _mesh is None or _mesh[0] is not world:
        kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
        alone = dist.get_world_size() == 1
        with watch_world().waiting("the process groups"), _gloo_on_loopback() if alone else nullcontext():
            mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=(DATA_AXIS,))
            group = mesh.get_group(DATA_AXIS)
            # The mesh's is the program's own. Gloo pairs calls by their kind and number alone: a rank that gathers a
            # metric there must not be given what another rank sends in a meeting.
            host = group if alone else dist.new_group(backend="gloo", timeout=timeout_of(world))
            _mesh = (world, mesh, host, _nodes_of(host))
    _, mesh, host, nodes = _mesh
    if node_size is not None:
        nodes = Nodes.of_size(node_size, nodes.num_ranks)
    process_group = mesh.get_group(DATA_AXIS) if mesh.device_type == "cuda" else host
    return Group(DATA_AXIS, process_group, host, nodes, replicas)


def timeout_of(world: dist.ProcessGroup) -> timedelta:
    """How long a wait in a process group may last."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend(world)) else "cpu")
    return world._get_backend(device).options._timeout  # type: ignore[no-any-return]
