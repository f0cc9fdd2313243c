"""The rank of this process in a job of Slurm or MPI, whose launchers set other variables than torchrun.

[Note: ranks of Slurm and MPI]
`srun python train.py` and `mpirun python train.py` start one process per rank, without RANK and MASTER_ADDR. All that
torch needs is in the variables of Slurm. MPI tells ranks and sizes; the address of the first node is known only if all
ranks are on one node, so on several nodes the user passes MASTER_ADDR. The port is computed from the job's name, so
that two jobs on one node have different ones, and all ranks of a job the same.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Ports that neither services nor clients of the system use.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_MAX_NODES = 1 << 16
_DIGITS = "[0-9]{1,9}"
_SET_THEM = "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


class _Variables(NamedTuple):
    """The variables of a launcher: rank and size, in the job and on the node."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_NAMES = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
_OPEN_MPI = _Variables("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in _NAMES))
_MVAPICH = _Variables("MVAPICH2", *(f"MV2_COMM_WORLD_{name}" for name in _NAMES))
_MPICH = _Variables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def find_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for a process of Slurm or MPI, or {} for a process alone.

    Raise if the launcher has started several processes and does not say enough about them.
    """
    is_of_slurm = _number(environment, "SLURM_STEP_NUM_TASKS") > 1
    # mpirun inside a job of Slurm sets its own variables as well. srun may set PMI_SIZE.
    for names in (_OPEN_MPI, _MVAPICH) if is_of_slurm else (_OPEN_MPI, _MVAPICH, _MPICH):
        if _number(environment, names.size) > 1:
            return _of_mpi(environment, names)
    return _of_slurm(environment) if is_of_slurm else {}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task that srun has started."""
    tasks = list(_repeated(_required(environment, "Slurm", "SLURM_STEP_TASKS_PER_NODE")))
    nodes = expand_nodes(_required(environment, "Slurm", "SLURM_STEP_NODELIST"))
    _required(environment, "Slurm", "SLURM_NODEID")
    node = _number(environment, "SLURM_NODEID", -1)
    if not 0 <= node < len(tasks) == len(nodes):
        number, per_node = (environment[f"SLURM_{name}"][:80] for name in ("NODEID", "STEP_TASKS_PER_NODE"))
        raise RuntimeError(
            f"Slurm: SLURM_NODEID = {number} and the {len(nodes)} nodes of SLURM_STEP_NODELIST do not fit "
            f"SLURM_STEP_TASKS_PER_NODE = {per_node}. {_SET_THEM}."
        )
    job = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return {
        "RANK": _required(environment, "Slurm", "SLURM_PROCID"),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": _required(environment, "Slurm", "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": _port(job),
    }


def _of_mpi(environment: Mapping[str, str], names: _Variables) -> dict[str, str]:
    """Return the variables of a process that mpirun or mpiexec has started."""
    size, local_size = (_required(environment, names.name, name) for name in (names.size, names.local_size))
    if size != local_size and "MASTER_ADDR" not in environment:
        raise RuntimeError(
            f"{names.name} has started {size} ranks, {local_size} of them on this node, and does not tell the address "
            "of the first node. Pass it to all ranks, for example with mpirun -x MASTER_ADDR=host1."
        )
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    return {
        "RANK": _required(environment, names.name, names.rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": _required(environment, names.name, names.local_rank),
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _port(job) if job and size == local_size else "29500",
    }


def _number(environment: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    value = environment.get(name, "")
    return int(value) if re.fullmatch(_DIGITS, value) else otherwise


def _required(environment: Mapping[str, str], launcher: str, name: str) -> str:
    if not environment.get(name):
        raise RuntimeError(
            f"{launcher} has started several processes, but {name} is not set, so each would train alone. {_SET_THEM}, "
            "or start with torchrun or onefold launch."
        )
    return environment[name]


def _port(job: str) -> str:
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)


def _repeated(text: str) -> Iterator[int]:
    """Yield the numbers of tasks of all nodes: "2(x3),1" is 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(rf"({_DIGITS})(?:\(x({_DIGITS})\))?", part)
        if match is None or int(match[2] or 1) > _MAX_NODES:
            shown = repr(text[:80])
            raise RuntimeError(f"Slurm: SLURM_STEP_TASKS_PER_NODE = {shown} is no list of numbers such as 2(x3),1.")
        yield from [int(match[1])] * int(match[2] or 1)


def expand_nodes(text: str) -> list[str]:
    """Return the names in a node list of Slurm: "n[01-03,7]-ib,gpu5" is n01-ib, n02-ib, n03-ib, n7-ib, gpu5."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            pieces = [plain] if plain else list(_range_members(ranges, text))
            if len(names) * len(pieces) + len(found) > _MAX_NODES:
                raise RuntimeError(f"Slurm: the node list {text[:80]!r} has more than {_MAX_NODES} nodes.")
            names = [name + piece for name in names for piece in pieces]
        found += names
    if not found or text.count("[") != text.count("]") or not all(found):
        raise RuntimeError(f"Slurm: {text[:80]!r} is no node list such as n[01-03,7],gpu5.")
    return found


def _range_members(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = re.fullmatch(rf"({_DIGITS})(?:-({_DIGITS}))?", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) > _MAX_NODES:
            raise RuntimeError(f"Slurm: {text[:80]!r} is no node list such as n[01-03,7],gpu5.")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))
