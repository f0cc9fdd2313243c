"""Ranks in jobs of Slurm and MPI: from their variables, and in real jobs where their programs are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.comm.job_environment import expand_nodes, find_ranks

SLURM = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[01-03],big7", "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_ess_base_jobid": "99",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_tasks_of_slurm():
    found = find_ranks(SLURM)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu01",
    }  # fmt: skip
    others = SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    last = find_ranks(others)
    assert (last["LOCAL_WORLD_SIZE"], last["MASTER_PORT"]) == ("1", port)
    assert find_ranks(others | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != port
    assert 20000 <= int(port) < 32000


def test_ranks_of_mpi():
    found = find_ranks(OPEN_MPI)
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", "4", "1", "4"]
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert find_ranks(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"] == found["MASTER_PORT"]
    assert find_ranks(MPICH) == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }  # fmt: skip
    assert find_ranks(SLURM | OPEN_MPI)["WORLD_SIZE"] == "4", "mpirun inside a job of Slurm"
    assert find_ranks(SLURM | MPICH)["WORLD_SIZE"] == "7", "srun with PMI"


@pytest.mark.parametrize("environment", [
    {}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": "x"},
    {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"},  # a shell inside of an allocation, which srun has not started
], ids=str)  # fmt: skip
def test_processes_alone(environment):
    assert find_ranks(environment) == {}


@pytest.mark.parametrize(("environment", "words"), [
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun -x MASTER_ADDR=host1"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set, so each would train alone. Set RANK"),
    ({"PMI_SIZE": "2"}, "MPICH has started several processes, but MPI_LOCALNRANKS is not set"),
    ({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "Slurm .* SLURM_LOCALID is not set"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "do not fit SLURM_STEP_TASKS_PER_NODE = 2"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999)"}, "is no list of numbers"),
    (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "is no node list"),
    (SLURM | {"SLURM_STEP_NODELIST": "n[1-99999999]"}, "is no node list"),
    (SLURM | {"SLURM_STEP_NODELIST": "[0-999]" * 3}, "more than 65536 nodes"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_missing_is_named(environment, words):
    with pytest.raises(RuntimeError, match=words):
        find_ranks(environment)


def test_an_address_that_the_user_passes_is_kept():
    found = find_ranks(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "host1"})
    assert found["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(("text", "nodes"), [
    ("n1", ["n1"]), ("n1,n2", ["n1", "n2"]), ("n[8-10]", ["n8", "n9", "n10"]),
    ("n[08-10,3]", ["n08", "n09", "n10", "n3"]),
    ("r[1-2]n[1-2]-ib,x", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "x"]),
])  # fmt: skip
def test_node_lists(text, nodes):
    assert expand_nodes(text) == nodes


@given(st.text(alphabet="n12[]-,(x) ", max_size=40))
def test_any_text_is_a_node_list_or_an_error(text):
    found = []
    with suppress(RuntimeError):
        found = expand_nodes(text)
    assert all(found)


# -- real jobs ------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, onefold
engine, *_ = onefold.initialize(
    model=torch.nn.Linear(8, 8),
    config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2}, "log_level": "error"},
)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
engine.backward(engine(torch.full((1, 8), 1.0 + rank)).sum())
engine.step()
print(f"rank {rank} of {size}, norm {engine.get_global_grad_norm():.4f}", flush=True)
"""
EXPECTED = {"rank 0 of 2, norm 12.3288", "rank 1 of 2, norm 12.3288"}


def lines_of(command: list[str], **environment: str) -> set[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "OMPI", "PMI"))}
    own |= {"OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if line.startswith("rank")}


@pytest.mark.slow
@pytest.mark.program
def test_a_job_of_mpi(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here: apt-get install openmpi-bin")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    assert lines_of(["mpirun", *options, sys.executable, str(tmp_path / "train.py")]) == EXPECTED


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of this machine, with its own daemons. Yield the variables that its programs need."""
    programs = ("munged", "slurmctld", "slurmd", "srun")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root here")
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    ports = [free_port() for _ in range(2)]
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    own = {**os.environ, **environment}
    munge = [f"--{name}={folder}/{file}" for name, file in (
        ("key-file", "key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"), ("log-file", "munge.log"),
        ("seed-file", "munge.seed"),
    )]  # fmt: skip
    daemons = []
    try:
        for command in (["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            time.sleep(0.5)
        deadline = time.monotonic() + 40
        while "idle" not in subprocess.run(["sinfo", "-h"], env=own, capture_output=True, text=True).stdout:
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                logs = "".join(path.read_text()[-600:] for path in folder.glob("*.log"))
                pytest.skip(f"Slurm does not start on this machine: {logs}")
            time.sleep(0.3)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.communicate(timeout=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.program
def test_a_job_of_slurm(slurm, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert lines_of(["srun", "-n", "2", sys.executable, str(tmp_path / "train.py")], **slurm) == EXPECTED
