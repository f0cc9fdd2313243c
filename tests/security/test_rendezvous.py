"""The rendezvous of launchers: no pickle of another process is read, messages are signed, one address listens."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import MarkedJob, marked_job
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from onefold.comm.store_server import is_own_address, listen_at
from onefold.job_secret import JOB_SECRET, JOB_SECRET_FILE, JobSecret
from onefold.tools.cli.rendezvous import (
    JsonRendezvousBackend,
    SignedLauncherStore,
    from_json,
    make_rendezvous,
    open_store,
    own_address,
    to_json,
)

SECRET, OTHER, NONE = JobSecret("a" * 32), JobSecret("b" * 32), JobSecret(None)
KEY = "onefold/rendezvous/run"
NODES = st.builds(_NodeDesc, st.text(), st.integers(), st.integers())
TIMES = st.datetimes(timezones=st.just(UTC))


@st.composite
def states(draw: st.DrawFn) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = draw(st.integers()), draw(st.booleans()), draw(st.booleans())
    state.deadline = draw(st.none() | TIMES)
    state.participants = draw(st.dictionaries(NODES, st.integers()))
    state.wait_list, state.redundancy_list = draw(st.sets(NODES)), draw(st.sets(NODES))
    state.last_heartbeats = draw(st.dictionaries(NODES, TIMES))
    return state


@given(states())
def test_a_state_is_the_same_after_json(state: _RendezvousState) -> None:
    assert vars(from_json(to_json(state))) == vars(state)


@given(st.binary() | st.text().map(str.encode) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps({"round": value, "participants": value}).encode()
))  # fmt: skip
def test_other_texts_are_an_error_of_the_rendezvous(text: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="not one of onefold"):
        from_json(text)


class Bomb:
    """A pickle that creates a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


@pytest.mark.parametrize("secret", [SECRET, NONE])
def test_a_pickle_in_the_store_is_not_read(tmp_path: Path, secret: JobSecret) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    for content in (bomb, base64.b64encode(bomb), NONE.sign(KEY, bomb), OTHER.sign(KEY, bomb)):
        raw = HashStore()
        backend = JsonRendezvousBackend(SignedLauncherStore(raw, secret), "run")
        raw.set(KEY, content)
        with pytest.raises(RendezvousStateError):
            backend.get_state()
        with pytest.raises(RendezvousStateError):
            backend.set_state(pickle.dumps(_RendezvousState()), b"token")
        assert not (tmp_path / "executed").exists()
    pickle.loads(bomb)
    assert (tmp_path / "executed").exists(), "the pickle executes code where it is read"


def test_the_stored_state_is_replaced_only_with_its_token() -> None:
    raw = HashStore()
    first, second = (JsonRendezvousBackend(SignedLauncherStore(raw, SECRET), "run") for _ in range(2))
    assert first.get_state() is None
    state = _RendezvousState()
    written = first.set_state(pickle.dumps(state))
    assert written is not None
    assert written[2]
    state.round = 7
    lost = second.set_state(pickle.dumps(state))
    assert lost is not None
    assert not lost[2]
    won = second.set_state(pickle.dumps(state), lost[1])
    assert won is not None
    assert won[2]
    found = first.get_state()
    assert found is not None
    assert pickle.loads(found[0]).round == 7
    assert json.loads(SECRET.verify(KEY, raw.get(KEY)))["round"] == 7


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_nodes_meet_and_share_signed_values(pool: ThreadPoolExecutor, backend: str) -> None:
    port, handlers = free_port(), []

    def join(node: int) -> tuple[int, int, bytes]:
        given = {"rank": node} if backend == "static" else {}
        parameters = RendezvousParameters(backend, f"127.0.0.1:{port}", "run", 2, 2, **given)
        handler = make_rendezvous(parameters, SECRET)
        handlers.append(handler)  # the first one has the server
        found = handler.next_rendezvous()
        found.store.set(f"value/{found.rank}", "text")
        return found.rank, found.world_size, found.store.get(f"value/{1 - found.rank}")

    found = list(pool.map(join, range(2)))
    assert sorted(found) == [(0, 2, b"text"), (1, 2, b"text")]


def test_a_node_with_another_secret_is_named(pool: ThreadPoolExecutor) -> None:
    port = free_port()

    def join(secret: JobSecret) -> str:
        parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "run", 2, 2, join_timeout="10")
        try:
            make_rendezvous(parameters, secret).next_rendezvous()
        except RendezvousError as error:
            return str(error)
        return ""

    joining = [pool.submit(join, secret) for secret in (SECRET, OTHER)]
    assert any(f"Set {JOB_SECRET} to the same value" in one.result() for one in joining)


def test_the_store_listens_at_the_address_of_the_job_only() -> None:
    port = free_port()
    store = open_store("127.0.0.1", port, timedelta(seconds=10))
    assert open_store("127.0.0.1", port, timedelta(seconds=10)).check(["none"]) is False
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == 0
    for other in ("127.0.0.2", own_address("203.0.113.1", 1) or "127.0.0.3"):
        with socket.socket() as probe:
            assert probe.connect_ex((other, port)) != 0
    del store


def test_names_and_addresses_of_other_nodes_are_not_bound() -> None:
    for host in ("node1", "203.0.113.7", "example.org"):
        assert listen_at(host, free_port()) is None
        assert not is_own_address(host)
    assert is_own_address("127.0.0.1")
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


# -- the launcher ----------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, pathlib, sys
commands = [path.read_bytes().decode() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
secret = os.environ.get("ONEFOLD_JOB_SECRET", "")
row = {"secret": secret, "file": os.environ.get("ONEFOLD_JOB_SECRET_FILE"), "gloo": os.environ["GLOO_SOCKET_IFNAME"],
       "shown": any(secret in text for text in commands)}
start = os.environ["ONEFOLD_RESTARTS"]
pathlib.Path(sys.argv[1], f"{start}.{os.environ['RANK']}.json").write_text(json.dumps(row))
sys.exit(int(start) == 0 and len(sys.argv) > 2)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MarkedJob]:
    with marked_job(tmp_path) as made:
        yield made


@pytest.mark.program
def test_ranks_have_a_secret_of_their_start_in_no_command_line(job: MarkedJob) -> None:
    (job.folder / "script.py").write_text(SCRIPT)
    file = job.folder / "secret"
    file.write_text("c" * 40)
    file.chmod(0o600)
    command = ["--nproc", "2", "--max-restarts", "1", str(job.folder / "script.py"), str(job.folder), "restart"]
    launcher = job.launch(*command, ONEFOLD_JOB_SECRET_FILE=str(file))
    assert launcher.wait(120) == 0
    rows = [json.loads((job.folder / f"{start}.{rank}.json").read_text()) for start in (0, 1) for rank in (0, 1)]
    expected = [JobSecret("c" * 40).derive(f"start {start}").text for start in (0, 0, 1, 1)]
    assert [row["secret"] for row in rows] == expected
    assert [(row["file"], row["gloo"], row["shown"]) for row in rows] == [(None, "lo", False)] * 4


@pytest.mark.program
def test_a_launcher_with_a_readable_secret_does_not_start(job: MarkedJob) -> None:
    (job.folder / "script.py").write_text(SCRIPT)
    file = job.folder / "secret"
    file.write_text("c" * 40)
    file.chmod(0o644)
    launcher = job.launch(str(job.folder / "script.py"), str(job.folder), ONEFOLD_JOB_SECRET_FILE=str(file))
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 2, stderr
    assert f"{JOB_SECRET_FILE} = {file}: other users can read or write it (mode 0644)" in stderr
    assert "Traceback" not in stderr
