"""Jobs on Kubernetes: the variables of pods, and the manifests of examples/kubernetes run by two local "pods"."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import COMMAND, MarkedJob, marked_job

from onefold.job_secret import JobSecret
from onefold.tools.cli.launch import job_of_this_node
from onefold.tools.cli.main import build_parser
from onefold.tools.cli.pod_environment import fill_from_pod, read_pod
from onefold.tools.cli.ranks import Job
from onefold.tools.cli.usage import UsageError

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
HERE = socket.gethostname().split(".")[0]


def job(environment: Mapping[str, str], *flags: str) -> Job:
    options = build_parser().parse_args(["launch", *flags, "train.py"])
    fill_from_pod(options, environment)
    return job_of_this_node(options)


def test_the_variables_of_torchrun() -> None:
    given = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "7",
    }
    assert job(given) == Job(8, 2, 1, "a", 7)
    assert job({**given, "PET_MAX_RESTARTS": "3"}, "--nproc", "4", "--node_rank", "0") == Job(4, 2, 0, "a", 7, None, 3)


def test_the_variables_of_pytorchjob() -> None:
    given = {**POD, "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
    assert job(given, "--nproc", "8") == Job(8, 3, 2, "job-master-0", 23456)
    # Newer operators set both; the variables of ranks may count ranks then.
    newer = {
        **given,
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "auto",
        "WORLD_SIZE": "16",
        "RANK": "8",
    }
    assert read_pod(newer) == {"num_nodes": 2, "node_rank": 1, "master_addr": "job-master-0", "master_port": 23456}
    assert read_pod({name: value for name, value in given.items() if name not in POD}) == {}, "not in a pod"


def test_the_variables_of_an_elastic_pytorchjob() -> None:
    given = {
        **POD,
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:3",
        "PET_MAX_RESTARTS": "10",
        "PET_NPROC_PER_NODE": "2",
    }
    first = job({**given, "PET_RDZV_ENDPOINT": f"{HERE}:23456"})
    assert first == Job(2, 3, 0, HERE, 23456, None, 10, 1)
    assert job({**given, "PET_RDZV_ENDPOINT": "other.invalid:23456"}) == Job(
        2, 3, 1, "other.invalid", 23456, None, 10, 1
    )


def test_the_variables_of_a_jobset() -> None:
    given = {
        **POD,
        "PET_NNODES": "4",
        "JOB_COMPLETION_INDEX": "3",
        "JOBSET_NAME": "llama",
        "REPLICATED_JOB_NAME": "workers",
    }
    assert job(given, "--nproc", "8") == Job(8, 4, 3, "llama-workers-0-0.llama", 29500)
    assert job({**given, "MASTER_ADDR": "a"}, "--nproc", "8") == Job(8, 4, 3, "a", 29500)


def test_a_job_of_one_pod_needs_no_address() -> None:
    given = {**POD, "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "1", "RANK": "0", "PET_NPROC_PER_NODE": "2"}
    assert job(given) == Job(2)
    assert job({**POD, "JOB_COMPLETION_INDEX": "5"}, "--nproc", "2") == Job(2), "an indexed job of separate pods"


def test_ranks_and_hostfiles_are_not_changed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    pod = {**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}
    assert job(pod, "--hostfile", str(tmp_path / "hosts")) == Job(2, visible_devices="0,1")
    assert job({**pod, "LOCAL_RANK": "0"}, "--nproc", "2") == Job(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PET_NNODES", "two"), ("PET_NNODES", "3:2"), ("PET_NNODES", "0"), ("PET_NNODES", ":2"), ("PET_NODE_RANK", "-1"),
     ("PET_NPROC_PER_NODE", "tpu"), ("PET_MASTER_PORT", "9" * 5000)],
)  # fmt: skip
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} = "):
        read_pod({"PET_NNODES": "2", name: value})


# -- the manifests ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import torch, onefold
engine = onefold.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"}, "log_level": "error", "zero_optimization": {"stage": 2}})[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ONEFOLD_JOB_SECRET")
with open(os.path.join(os.path.dirname(__file__), f"row.{os.environ['RANK']}.json"), "w") as out:
    json.dump({name: os.environ[name] for name in names}, out)
"""


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the container of each pod, in the order of their ranks."""
    if manifest["kind"] == "PyTorchJob":
        specs = manifest["spec"]["pytorchReplicaSpecs"]
        return [
            specs[kind]["template"]["spec"]["containers"][0]
            for kind in ("Master", "Worker")
            for _ in range(specs[kind]["replicas"])
        ]
    (jobs,) = manifest["spec"]["replicatedJobs"]
    spec = jobs["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]
    return [spec["template"]["spec"]["containers"][0]] * spec["completions"]


def environment_of(manifest: dict[str, Any], container: dict[str, Any], rank: int, count: int) -> dict[str, str]:
    """Return the variables of a pod: those of the manifest, and those that the controller sets."""
    name = manifest["metadata"]["name"]
    fields = {
        "metadata.annotations['jobset.sigs.k8s.io/jobset-name']": name,
        "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']": "workers",
    }
    found = dict(POD)
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = "the-secret-of-the-cluster"
    if manifest["kind"] == "PyTorchJob":
        port = str(container["ports"][0]["containerPort"])
        nodes = {
            "PET_NNODES": str(count),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": manifest["spec"]["nprocPerNode"],
        }
        address = {f"{prefix}MASTER_ADDR": f"{name}-master-0" for prefix in ("", "PET_")}
        ports = {f"{prefix}MASTER_PORT": port for prefix in ("", "PET_")}
        return {**found, **nodes, **address, **ports, "WORLD_SIZE": str(count), "RANK": str(rank)}
    return {**found, "JOB_COMPLETION_INDEX": str(rank)}


@pytest.fixture
def local_job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_the_manifests_describe_two_nodes(name: str) -> None:
    manifest = yaml.safe_load((MANIFESTS / name).read_text())
    pods = containers(manifest)
    first = {"PyTorchJob": ("onefold-master-0", 23456), "JobSet": ("onefold-workers-0-0.onefold", 29500)}[
        manifest["kind"]
    ]
    for rank, container in enumerate(pods):
        assert container["command"][:2] == ["onefold", "launch"]
        found = job(environment_of(manifest, container, rank, len(pods)), *container["command"][2:-1])
        assert (found.num_nodes, found.node_rank, (found.master_addr, found.master_port)) == (2, rank, first)


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_the_commands_of_the_manifests_train_on_two_pods(local_job: MarkedJob, name: str) -> None:
    """Only the address and the port of the first pod are replaced, and the script."""
    manifest = yaml.safe_load((MANIFESTS / name).read_text())
    pods = containers(manifest)
    (local_job.folder / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started: list[subprocess.Popen[str]] = []
    for rank, container in enumerate(pods):
        environment = environment_of(manifest, container, rank, len(pods))
        environment |= dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "127.0.0.1")
        environment |= dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), port)
        _, *arguments = container["command"]
        arguments = [text.replace("/workspace", str(local_job.folder)) for text in arguments]
        started.append(local_job.start([*COMMAND, *arguments], **environment, PYTHONPATH=os.pathsep.join(sys.path)))
    said = [process.communicate(timeout=180)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    rows = [json.loads((local_job.folder / f"row.{rank}.json").read_text()) for rank in range(2)]
    secret = JobSecret("the-secret-of-the-cluster").derive("start 0").text
    alike = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ONEFOLD_JOB_SECRET": secret}
    assert rows == [{"RANK": str(rank), **alike} for rank in range(2)]
