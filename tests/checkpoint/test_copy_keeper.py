"""Peer copies between launchers: agreement, mirrors, and the connections over which files are sent."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import wait_until
from torch._C._distributed_c10d import HashStore

from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.peer_copy import (
    HEADER,
    PROBLEM_VARIABLE,
    RESUME_VARIABLE,
    copy_name,
    files_of,
    is_file_of_copy,
    is_whole,
    keep_parts_of_node,
    list_copies,
    make_room,
    read_complete,
    reject,
    write_complete,
    write_header,
)
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot, write_shard
from onefold.job_secret import ForgedMessageError, JobSecret
from onefold.tools.cli import copy_keeper, copy_transfer
from onefold.tools.cli.copy_keeper import CopyKeeper, publish_no_copies
from onefold.tools.cli.copy_transfer import CHUNK, CopyClient, CopyServer, TransferError

SECRET, OTHER = JobSecret("a" * 32), JobSecret("b" * 32)
NUMEL = 24
DATA = "data-20261119T120000-0123abcd"


def write_part(node: Path, name: str, rank: int, num_ranks: int, *, header: bool = True, is_done: bool = True) -> None:
    """Write what a rank writes to a copy: its range of one tensor, whose values tell the copy."""
    folder = node / name / DATA
    folder.mkdir(parents=True, exist_ok=True)
    size = NUMEL // num_ranks
    values = torch.arange(rank * size, (rank + 1) * size, dtype=torch.float32) + int(name.split("-")[2])
    slot = Slot("model/weight", (NUMEL,), rank * size, (rank + 1) * size, Slot.whole("", values).buffer)
    own = {"rng": None, "data": None, "loose": {}}
    record = write_shard(folder / f"rank-{rank:05}.safetensors", [slot], own)
    if is_done:
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(record.as_json()))
    if rank == 0 and header:
        counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 1)
        state = {"optimizer": None, "lr_scheduler": None, "loss_scale": None, "counters": counters}
        state |= {"client_state": {}, "config": {}}
        write_header(
            node / name, global_steps=1, parameters={"weight": None}, state=state, aliases={}, left_out=[], writer=""
        )  # fmt: skip


def name_of(number: int, start: int = 0, num_ranks: int = 2) -> str:
    return copy_name(start, number, 0, num_ranks)


def weights_of(node: Path, name: str) -> torch.Tensor:
    with CheckpointReader(node / name, Manifest.read(node / name)) as reader:
        reader.check_headers()
        return reader.tensor("model/weight")


class Node:
    """The launcher of one node, as far as copies are concerned."""

    def __init__(self, folder: Path, secret: JobSecret = SECRET) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.keeper = CopyKeeper(folder, secret, "127.0.0.1")

    def begin(self, store: Any, node: int, num_nodes: int, ranks: Sequence[int]) -> list[str]:
        deadline = time.monotonic() + 20

        def check_nodes() -> None:
            assert time.monotonic() < deadline

        found = self.keeper.begin(store, node, num_nodes, ranks, check_nodes).get(RESUME_VARIABLE)
        return found.split(",") if found else []


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, secret: JobSecret = SECRET) -> Node:
        made.append(Node(tmp_path / name, secret))
        return made[-1]

    yield make
    for node in made:
        node.keeper.close()


def begin(nodes: Sequence[Node], num_ranks: int = 1, store: Any = None) -> list[list[str]]:
    """Agree at a start of nodes that have `num_ranks` ranks each."""
    store = store or HashStore()
    with ThreadPoolExecutor(len(nodes)) as pool:
        ranks = [range(number * num_ranks, (number + 1) * num_ranks) for number in range(len(nodes))]
        calls = [(store, number, len(nodes), ranks[number]) for number in range(len(nodes))]
        return list(pool.map(lambda node, call: node.begin(*call), nodes, calls))


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_shard_counts_with_its_record_and_a_copy_with_all_of_them(tmp_path: Path) -> None:
    name = name_of(1)
    write_part(tmp_path, name, 0, 2)
    write_part(tmp_path, name, 1, 2, is_done=False)
    found = files_of(tmp_path / name)
    assert sorted(found) == [f"{DATA}/rank-00000.json", f"{DATA}/rank-00000.safetensors", HEADER]
    assert not is_whole(name, found)
    write_part(tmp_path, name, 1, 2)
    found = files_of(tmp_path / name)
    assert is_whole(name, found)
    for file in found:
        assert not is_whole(name, found.keys() - {file})


def test_names_are_ordered_by_start_and_number() -> None:
    times = [(0, 2), (0, 10), (1, 1), (1, 3), (12, 1), (100, 1)]
    names = [copy_name(start, number, 0, 4) for start, number in times]
    assert names == sorted(names)


def test_room_is_made_by_each_rank_and_the_first_of_the_node(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        for rank in (0, 1):
            write_part(tmp_path, name_of(number), rank, 2)
    make_room(tmp_path, {name_of(2), name_of(3)}, 1, is_first_of_node=False)
    assert sorted(files_of(tmp_path / name_of(1))) == [
        f"{DATA}/rank-00000.json", f"{DATA}/rank-00000.safetensors", HEADER,
    ]  # fmt: skip
    make_room(tmp_path, {name_of(2), name_of(3)}, 0, is_first_of_node=True)
    assert list_copies(tmp_path) == [name_of(3), name_of(2)]


# -- agreement ---------------------------------------------------------------------------------------------------------


def test_one_node_resumes_from_its_whole_copies(make_node: Callable[..., Node]) -> None:
    node = make_node("a")
    for number in (1, 2, 3, 4):
        for rank in (0, 1):
            write_part(node.folder, name_of(number), rank, 2, header=number != 4)
    assert begin([node], 2) == [[name_of(3), name_of(2)]]
    assert list_copies(node.folder) == [name_of(3), name_of(2)], "others are removed"
    assert read_complete(node.folder) == name_of(3)
    assert weights_of(node.folder, name_of(3)).tolist() == [number + 3 for number in range(NUMEL)]


def test_a_new_node_fetches_the_parts_of_a_lost_one_from_its_neighbour(make_node: Callable[..., Node]) -> None:
    """The third copy was not mirrored when the second node was lost, so the second copy is used."""
    first, new = make_node("a"), make_node("b")
    for number in (2, 3):
        write_part(first.folder, name_of(number), 0, 2)
    write_part(first.folder, name_of(2), 1, 2)
    assert begin([first, new]) == [[name_of(2)], [name_of(2)]]
    for node in (first, new):
        assert weights_of(node.folder, name_of(2)).tolist() == [number + 2 for number in range(NUMEL)]
        assert list_copies(node.folder) == [name_of(2)]
    assert begin([new], 1) == [[name_of(2)]], "the other node alone can resume as well"


def test_a_copy_that_is_damaged_on_one_node_is_used_by_none(
    make_node: Callable[..., Node], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both nodes have all parts. Only the second one finds its own damaged."""
    nodes = [make_node("a"), make_node("b")]
    for number in (1, 2):
        for node in nodes:
            for rank in (0, 1):
                write_part(node.folder, name_of(number), rank, 2)
    path = nodes[1].folder / name_of(2) / DATA / "rank-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:3] + b"\xff" + data[4:])  # the length of its header
    assert begin(nodes) == [[name_of(1)], [name_of(1)]]
    assert f"the peer copy {name_of(2)} is not used" in capsys.readouterr().err


def test_an_older_copy_is_used_if_one_of_three_nodes_cannot_prepare_the_newest(
    make_node: Callable[..., Node], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each node has its own part and that of the node before it. The third one has a part that it cannot join."""
    nodes = [make_node(name) for name in "abc"]
    for number in (1, 2):
        for rank in range(3):
            for node in (rank, (rank + 1) % 3):
                write_part(nodes[node].folder, name_of(number, num_ranks=3), rank, 3)
    (nodes[2].folder / name_of(2, num_ranks=3) / DATA / "rank-00002.json").write_text("[]")
    older = name_of(1, num_ranks=3)
    assert begin(nodes) == [[older]] * 3
    assert f"the peer copy {name_of(2, num_ranks=3)} is not used" in capsys.readouterr().err
    for node in nodes:
        assert weights_of(node.folder, older).tolist() == [number + 1 for number in range(NUMEL)]


def test_a_rejected_copy_and_earlier_ones_are_not_used(make_node: Callable[..., Node]) -> None:
    """One node has noted that the second copy is rejected. The third one is newer."""
    nodes = [make_node("a"), make_node("b")]
    for number in (1, 2, 3):
        for node in nodes:
            for rank in (0, 1):
                write_part(node.folder, name_of(number), rank, 2)
    reject(nodes[1].folder, name_of(2))
    assert begin(nodes) == [[name_of(3)]] * 2
    reject(nodes[0].folder, name_of(3))
    assert begin(nodes) == [[], []]
    assert not list_copies(nodes[0].folder)


def test_a_launcher_without_a_folder_leaves_all_without_copies(make_node: Callable[..., Node]) -> None:
    node, store = make_node("a"), HashStore()
    write_part(node.folder, name_of(1, num_ranks=1), 0, 1)
    publish_no_copies(store, 1, "Node 1 has none")
    assert node.keeper.begin(store, 0, 2, [0], lambda: None) == {PROBLEM_VARIABLE: "Node 1 has none"}
    assert not list_copies(node.folder), "a later start must not resume from them"


def test_a_node_that_does_not_answer_is_asked_once(make_node: Callable[..., Node]) -> None:
    """Two nodes have all five files of the copy. The first one closes each connection."""
    first, second, new = (make_node(name) for name in "abc")
    for node in (first, second):
        for rank in (0, 1):
            write_part(node.folder, name_of(1), rank, 2)
    asked = []
    answer = first.keeper._server._answer  # type: ignore[union-attr]

    def refuse(channel: Any, request: Any) -> None:
        if "file" not in request:  # a mirror asks for a list
            return answer(channel, request)
        asked.append(request["file"])
        raise ValueError

    first.keeper._server._answer = refuse  # type: ignore[union-attr, method-assign]
    assert begin([first, second, new]) == [[name_of(1)]] * 3
    assert len(files_of(new.folder / name_of(1))) == 5
    assert len(asked) == 1


def test_nodes_with_other_secrets_send_nothing(
    make_node: Callable[..., Node], capsys: pytest.CaptureFixture[str]
) -> None:
    first, new = make_node("a"), make_node("b", OTHER)
    for rank in (0, 1):
        write_part(first.folder, name_of(1), rank, 2)
    assert begin([first, new]) == [[], []]
    assert "is not used" in capsys.readouterr().err


# -- mirrors -----------------------------------------------------------------------------------------------------------


def test_a_copy_is_complete_when_every_part_is_on_two_nodes(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    nodes, store = [make_node(name) for name in "abc"], HashStore()
    begin(nodes, store=store)
    name = name_of(1, num_ranks=3)
    for rank in (0, 1):
        write_part(nodes[rank].folder, name, rank, 3)
    wait_until(lambda: len(files_of(nodes[1].folder / name)) == 5, 20)
    wait_until(lambda: len(files_of(nodes[2].folder / name)) == 2, 20)
    time.sleep(0.5)
    assert read_complete(nodes[0].folder) is None, "the shard of rank 2 is missing"
    write_part(nodes[2].folder, name, 2, 3)
    wait_until(lambda: read_complete(nodes[0].folder) == name, 20)
    held = [{path.rpartition("/")[2] for path in files_of(node.folder / name)} for node in nodes]
    for rank in range(3):
        assert [f"rank-{rank:05}.safetensors" in files for files in held] == [
            number in (rank, (rank + 1) % 3) for number in range(3)
        ]
    nodes[1].keeper.close()
    assert begin([nodes[0], nodes[2]], store=HashStore()) == [[name], [name]]
    for node in (nodes[0], nodes[2]):
        assert weights_of(node.folder, name).tolist() == [number + 1 for number in range(NUMEL)]
    for number, node in enumerate(nodes):
        for rank in range(3):
            write_part(node.folder, name, rank, 3)
        keep_parts_of_node(node.folder / name, number, 3)
        kept = [
            rank for rank in range(3) if any(f"rank-{rank:05}.json" in file for file in files_of(node.folder / name))
        ]
        assert kept == sorted({number, (number - 1) % 3})
    assert begin(nodes, store=HashStore()) == [[name]] * 3


def test_a_copy_is_not_complete_while_a_rank_of_a_node_still_writes(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    nodes, name = [make_node("a"), make_node("b")], name_of(1, num_ranks=4)
    begin(nodes, 2)
    for rank in (0, 1, 2):
        write_part(nodes[rank // 2].folder, name, rank, 4)
    wait_until(lambda: len(files_of(nodes[0].folder / name)) == 7, 20)
    wait_until(lambda: len(files_of(nodes[1].folder / name)) == 7, 20)
    time.sleep(0.5)
    assert read_complete(nodes[0].folder) is None, "rank 3 has not written its shard"
    write_part(nodes[1].folder, name, 3, 4)
    wait_until(lambda: read_complete(nodes[0].folder) == name, 20)


@pytest.mark.parametrize("waits", ["for a connection", "for the store"])
def test_a_mirror_of_the_last_start_records_nothing_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """The thread still waits when the next start records its own complete copy."""
    entered, go, clients = threading.Event(), threading.Event(), list[CopyClient]()

    def wait(is_waiting: bool) -> None:
        if is_waiting:
            entered.set()
            assert go.wait(20)

    def connect(*arguments: Any) -> CopyClient:
        wait(waits == "for a connection")
        clients.append(CopyClient(*arguments))
        return clients[-1]

    class SlowStore:
        """A store whose replies arrive late."""

        def __init__(self) -> None:
            self.inner = HashStore()

        def get(self, key: str) -> bytes:
            found = self.inner.get(key)
            wait(waits == "for the store")
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    own, other, store = tmp_path / "own", tmp_path / "other", SlowStore()
    own.mkdir()
    for rank in (0, 1):
        write_part(other, name_of(1), rank, 2)
    store.set("onefold/copies/mirrored/1", name_of(1))
    monkeypatch.setattr(copy_keeper, "CopyClient", connect)
    with closing(CopyServer(other, SECRET, "127.0.0.1")) as server:
        mirror = copy_keeper._Mirror(own, SECRET, store, 0, 2, server.address, [1])
        try:
            assert entered.wait(20)
            mirror.end()
            write_complete(own, name_of(7))
        finally:
            go.set()
        mirror._thread.join(20)
        assert not mirror._thread.is_alive()
        assert read_complete(own) == name_of(7)
        assert [client._connection.fileno() for client in clients] == [-1]
        assert store.check(["onefold/copies/mirrored/0"]) == (waits == "for the store")


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CopyServer]:
    write_part(tmp_path, name_of(1), 0, 2)
    with closing(CopyServer(tmp_path, SECRET, "127.0.0.1")) as made:
        yield made


def test_files_of_several_messages_arrive_unchanged(tmp_path: Path, server: CopyServer) -> None:
    file = f"{DATA}/rank-00000.safetensors"
    content = torch.randint(0, 256, (2 * CHUNK + 5,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / name_of(1) / file).write_bytes(content)
    with closing(CopyClient(server.address, SECRET)) as client:
        assert client.list_files()[name_of(1)][file] == len(content)
        client.fetch(tmp_path / "other", name_of(1), file, len(content))
        assert (tmp_path / "other" / name_of(1) / file).read_bytes() == content
        with pytest.raises(TransferError, match="has None bytes on its node"):
            client.fetch(tmp_path / "other", name_of(2), file, 1)
        client.fetch(tmp_path / "other", name_of(1), HEADER, (tmp_path / name_of(1) / HEADER).stat().st_size)
    for path in (tmp_path / "other").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_without_the_secret_nothing_is_sent_or_written(tmp_path: Path, server: CopyServer) -> None:
    for secret in (OTHER, JobSecret(None)):
        with closing(CopyClient(server.address, secret)) as client, pytest.raises((OSError, ForgedMessageError)):
            client.list_files()
    with closing(CopyServer(tmp_path, OTHER, "127.0.0.1")) as false, closing(CopyClient(server.address, SECRET)) as one:
        assert name_of(1) in one.list_files()
        with closing(CopyClient(false.address, SECRET)) as client, pytest.raises((OSError, ForgedMessageError)):
            client.fetch(tmp_path / "other", name_of(1), HEADER, 10)
    assert not list((tmp_path / "other").rglob("*.json"))


@pytest.mark.parametrize(
    "path", ["lock", "../secret", f"{name_of(1)}/../lock", f"/{name_of(1)}/{HEADER}", "", 7, "a/b"]
)
def test_no_other_file_is_served(tmp_path: Path, server: CopyServer, path: Any) -> None:
    (tmp_path / "lock").write_text("content")
    assert not is_file_of_copy(str(path))
    with closing(CopyClient(server.address, SECRET)) as client:
        client._channel.send(json.dumps({"file": path}).encode())
        with pytest.raises(OSError, match=r"closed|reset"):
            client._channel.receive(CHUNK)


def test_a_replayed_request_is_refused(server: CopyServer) -> None:
    """A request that was signed for one connection is sent on another, and a second time on its own."""
    with closing(CopyClient(server.address, SECRET)) as client, socket.create_connection(server.address) as other:
        signed = SECRET.sign(client._channel._next_key(0), b"{}")
        message = struct.pack("!I", len(signed)) + signed
        client._connection.sendall(message)
        assert name_of(1) in json.loads(client._channel.receive(CHUNK))
        other.settimeout(10)
        other.sendall(bytes(32) + message)
        assert len(other.recv(32)) == 32
        assert other.recv(1) == b""
        client._connection.sendall(message)
        with pytest.raises(OSError, match=r"closed|reset"):
            client._channel.receive(CHUNK)


def test_long_messages_and_files_that_are_not_regular_are_refused(tmp_path: Path, server: CopyServer) -> None:
    with socket.create_connection(server.address) as raw:
        raw.settimeout(10)
        raw.sendall(bytes(32) + struct.pack("!I", 1 << 30))
        assert len(raw.recv(32)) == 32
        assert raw.recv(1) == b"", "the connection is closed"
    fifo = tmp_path / name_of(1) / DATA / "rank-00001.json"
    os.mkfifo(fifo)
    with closing(CopyClient(server.address, SECRET)) as client, pytest.raises(TransferError, match="has None bytes"):
        client.fetch(tmp_path / "other", name_of(1), f"{DATA}/rank-00001.json", 0)


def test_a_client_that_never_asks_is_disconnected(server: CopyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends one byte after the other, and so is never silent."""
    monkeypatch.setattr(copy_transfer, "_GREETING_SECONDS", 1.0)
    with socket.create_connection(server.address) as slow:
        slow.settimeout(0.1)
        ended = False
        for _ in range(200):
            try:
                slow.sendall(b"0")
                ended = not slow.recv(64)
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
        assert ended
    with closing(CopyClient(server.address, SECRET)) as client:
        assert name_of(1) in client.list_files()
