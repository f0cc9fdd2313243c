"""The nodes of a job on Kubernetes, from the variables of its pods. Flags of `onefold launch` take precedence.

[Note: pods]
One pod runs one launcher, which starts a rank on each GPU of the pod. The operator of PyTorchJob and Kubeflow's
Trainer set the variables that torchrun reads (`PET_*`), and PyTorchJob those of a rank as well (`RANK`, `WORLD_SIZE`),
which count pods there. A JobSet sets only the index of a pod in its job; its manifest sets the number of pods,
`PET_NNODES`.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from onefold.tools.cli.usage import UsageError

# Set in every pod.
_IN_POD = "KUBERNETES_SERVICE_HOST"
# Set in a rank, whose script may start a launcher of its own.
_IN_RANK = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def fill_from_pod(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Set the options that were not given to those of this pod."""
    if options.hostfile is not None or any(name in environment for name in _IN_RANK):
        return
    for name, value in read_pod(environment).items():
        if getattr(options, name) is None or (name == "max_restarts" and options.max_restarts == 0):
            setattr(options, name, value)


def read_pod(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `onefold launch` that the variables of a pod give."""
    found = {
        **_nodes(environment),
        "num_gpus": _ranks(environment),
        "node_rank": _number(environment, "PET_NODE_RANK"),
        "master_addr": environment.get("PET_MASTER_ADDR") or None,
        "master_port": _number(environment, "PET_MASTER_PORT"),
        "max_restarts": _number(environment, "PET_MAX_RESTARTS"),
    }
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        _add_endpoint(found, endpoint)
    if _IN_POD in environment:
        _add_variables_of_ranks(found, environment)
        _add_index_of_pod(found, environment)
    if (found.get("num_nodes") or 1) == 1:  # a job of one pod needs no address
        found = {name: found[name] for name in ("num_gpus", "max_restarts")}
    return {name: value for name, value in found.items() if value is not None}


def _nodes(environment: Mapping[str, str]) -> dict[str, int | None]:
    """Return the number of nodes: `2`, or `1:2` for a job that runs with fewer."""
    least, colon, most = environment.get("PET_NNODES", "").rpartition(":")
    if not most:
        return {"num_nodes": None, "min_nodes": None}
    parts = {"PET_NNODES": most, "PET_NNODES (minimum)": least if colon else most}
    last, first = (_number(parts, name) for name in parts)
    if not first or not last or first > last:
        raise UsageError(f"PET_NNODES = {environment['PET_NNODES']}: not a number of nodes such as 2 or 1:2")
    return {"num_nodes": last, "min_nodes": first if colon else None}


def _ranks(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks in a pod, or None for one on each GPU."""
    name = "PET_NPROC_PER_NODE" if "PET_NPROC_PER_NODE" in environment else "PET_N_PROC_PER_NODE"
    value = environment.get(name, "")
    if value in ("auto", "gpu"):
        return None
    return len(os.sched_getaffinity(0)) if value == "cpu" else _number(environment, name)


def _add_endpoint(found: dict[str, Any], endpoint: str) -> None:
    """Add the address of a rendezvous, in which pods have no ranks beforehand. The pod at that address hosts it."""
    host, colon, port = endpoint.rpartition(":")
    host, port = (host, port) if colon else (endpoint, "")
    found["master_addr"] = found["master_addr"] or host
    found["master_port"] = found["master_port"] or _number({"PET_RDZV_ENDPOINT": port}, "PET_RDZV_ENDPOINT")
    if found["node_rank"] is None:
        found["node_rank"] = 0 if host.split(".")[0] == socket.gethostname().split(".")[0] else None
        found["min_nodes"] = found["min_nodes"] or found["num_nodes"]


def _add_variables_of_ranks(found: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Add what PyTorchJob says in the variables of ranks. Its pods are the nodes."""
    found["master_addr"] = found["master_addr"] or environment.get("MASTER_ADDR") or None
    found["master_port"] = found["master_port"] or _number(environment, "MASTER_PORT")
    if found["num_nodes"] is None and "RANK" in environment:
        found["num_nodes"] = _number(environment, "WORLD_SIZE")
        found["node_rank"] = _number(environment, "RANK")


def _add_index_of_pod(found: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Add the index of a pod in its job, and for a JobSet the name of the first pod."""
    if found["node_rank"] is None and not found["min_nodes"]:
        found["node_rank"] = _number(environment, "JOB_COMPLETION_INDEX")
    names = [environment.get(name, "") for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME")]
    if found["master_addr"] is None and all(names):
        found["master_addr"] = f"{names[0]}-{names[1]}-{environment.get('JOB_INDEX') or 0}-0.{names[0]}"


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    if not value:
        return None
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UsageError(f"{name} = {value[:80]}: not a number. Correct the manifest, or unset the variable.")
    return int(value)
