"""Hostfiles, choices of nodes and the variables of schedulers: any text is read or is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from generated import EFFORTS, WORDS, corpus, damaged, fuzz
from hypothesis import strategies as st

from onefold.comm.job_environment import find_ranks
from onefold.tools.cli.launch import choose, parse_choice, parse_hostfile, read_hostfile
from onefold.tools.cli.usage import UsageError

HOSTS = b"# the cluster\nnode1 slots=8\nnode2   slots=4 # small\n\n10.0.0.3 slots=2\n"
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip
MPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")}


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_hostfile_is_read_or_is_a_usage_error(effort: int, tmp_path: Path) -> None:
    def read(data: bytes) -> None:
        (tmp_path / "hosts").write_bytes(data)
        try:
            nodes = read_hostfile(tmp_path / "hosts")
        except UsageError as error:
            named = str(error)
        else:
            named = "hosts"
            assert sum(len(slots) for slots in nodes.values()) < 10_000 * len(nodes)
        assert "hosts" in named

    examples = (
        b"\xff",
        b"a slots=" + b"9" * 5000,
        "a slots=\u0663".encode(),
        b"a slots=0",
        b"\0 slots=1",
        b"a" * 10**6,
    )
    fuzz(read, damaged(HOSTS) | st.binary() | st.text().map(str.encode), effort, (*examples, *corpus("hostfile")))


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_choice_of_nodes_is_read_or_is_a_usage_error(effort: int) -> None:
    nodes = parse_hostfile(HOSTS.decode().splitlines())

    def read(texts: tuple[str, str]) -> None:
        try:
            parse_choice(texts[0])
            assert choose(nodes, *texts)
        except UsageError:
            pass

    text = damaged(b"node1:0,2@node2").map(lambda data: data.decode("latin-1")) | WORDS | st.just("")
    fuzz(read, st.tuples(text, text), effort, (("node1:" + "9" * 5000, ""), ("node1:\u0660", "")))


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_variables_of_slurm_are_read_or_are_an_error(effort: int) -> None:
    def read(environment: dict[str, str]) -> None:
        try:
            found = find_ranks(environment)
        except RuntimeError as error:
            text = str(error)
            assert any(name in text for name in ("Slurm", "MPI", "MVAPICH", "MPICH"))
        else:
            assert found == {} or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= found.keys()

    values = WORDS | st.integers().map(str) | damaged(b"n[01-03,7]-ib,gpu5").map(lambda data: data.decode("latin-1"))
    values |= damaged(b"2(x3),1").map(lambda data: data.decode("latin-1"))
    some = st.dictionaries(st.sampled_from(sorted(SLURM | MPI)), values, max_size=4)
    bombs = (
        {**SLURM, "SLURM_STEP_NODELIST": "n[0-99999999999]"},
        {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]" * 40},
        {**SLURM, "SLURM_STEP_NODELIST": "n[" + "0" * 10**6 + "-1]"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9" * 5000},
        {**SLURM, "SLURM_NODEID": "x"},
        {**SLURM, "SLURM_NODEID": "-1"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "9" * 5000},
        {**MPI, "OMPI_COMM_WORLD_SIZE": "9" * 5000},
    )
    fuzz(
        read,
        st.one_of(some.map(lambda more: {**SLURM, **more}), some.map(lambda more: {**MPI, **more}), some),
        effort,
        bombs,
    )
