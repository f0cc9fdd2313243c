"""Messages between the processes of a job: what is refused, and where the secret comes from."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from models import config, net, rank, start, train
from torch._C._distributed_c10d import HashStore

from onefold.checkpoint.format.folder import LOCK
from onefold.comm.signed_store import SignedStore
from onefold.job_secret import (
    JOB_SECRET,
    JOB_SECRET_FILE,
    ForgedMessageError,
    JobSecret,
    JobSecretError,
)

SECRET, OTHER, NONE = JobSecret("a" * 32), JobSecret("b" * 32), JobSecret(None)


@given(st.text(), st.binary(), st.integers(min_value=0))
def test_a_message_is_refused_under_another_key_and_after_any_change(key: str, content: bytes, place: int) -> None:
    for secret in (SECRET, NONE):
        assert secret.verify(key, secret.sign(key, content)) == content
    message = SECRET.sign(key, content)
    place %= len(message)
    changed = message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]
    for other, found in ((key + "x", message), (key, changed), (key, message[:-1]), (key, message + b"x"), (key, b"")):
        with pytest.raises(ForgedMessageError, match="is refused"):
            SECRET.verify(other, found)


def test_processes_refuse_messages_of_another_secret_and_of_none() -> None:
    for writer, reader, reason in (
        (OTHER, SECRET, "its signature is wrong"),
        (NONE, SECRET, "it is not signed"),
        (SECRET, NONE, f"{JOB_SECRET} is not set here"),
        (SECRET, SECRET.derive("start 1"), "its signature is wrong"),
    ):
        with pytest.raises(ForgedMessageError, match=reason):
            reader.verify("key", writer.sign("key", b"content"))


def test_the_secret_is_in_no_text_of_the_object() -> None:
    assert "aaaa" not in f"{SECRET} {SECRET!r} {[SECRET]}"


def test_the_secret_comes_from_the_variable_or_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{'c' * 40}\n")
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)  # as Kubernetes mounts secrets
    assert JobSecret.find({}) == NONE
    assert JobSecret.find({JOB_SECRET_FILE: str(file)}) == JobSecret("c" * 40)
    assert JobSecret.find({JOB_SECRET_FILE: str(tmp_path / "link")}) == JobSecret("c" * 40)
    assert JobSecret.find({JOB_SECRET_FILE: str(file), JOB_SECRET: "a" * 32}) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("c" * 40)
    file.chmod(mode)
    with pytest.raises(JobSecretError, match=rf"mode {mode:04o}\)\. .*chmod 600"):
        JobSecret.find({JOB_SECRET_FILE: str(file)})


def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 15), ("long", b"x" * 5000), ("binary", b"\xff" * 40)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("empty", "short", "long", "binary", "fifo", "missing", "."):
        with pytest.raises(JobSecretError, match=JOB_SECRET_FILE):
            JobSecret.find({JOB_SECRET_FILE: str(tmp_path / name)})
    with pytest.raises(JobSecretError, match="at least 16"):
        JobSecret.find({JOB_SECRET: "short"})


def test_a_refused_message_counts_as_none_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    connection = HashStore()
    store = SignedStore(connection, SECRET)
    connection.set("forged", b"{}")
    with caplog.at_level(logging.WARNING, "onefold"):
        assert [store.find("forged") for _ in range(3)] == [None] * 3
        assert store.set_once("forged", "mine") == b"mine"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the message 'forged' in the store is refused"
    ]
    with pytest.raises(ForgedMessageError):
        store.get("forged")
    store.set("forged", "own")
    assert store.find("forged") == store.set_once("forged", "later") == b"own"
    assert store.find("missing") is None


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def saves_of_others(folder: str, signed: bool) -> tuple[list[str], list[str], list[str]]:
    """Rank 0 posts a save request that it has not made, as another process could; then the program saves."""
    os.environ[JOB_SECRET] = "a" * 32
    words = Words()
    logging.getLogger("onefold").addHandler(words)
    try:
        engine = start(net(), config(2))
        train(engine, 1)
        board: Any = engine._saver.coordinator._board
        data = Path(folder, "evil", "tag", "data-0")
        if rank() == 0:
            data.mkdir(parents=True)
            (data / LOCK).touch()  # the sign of a folder that rank 0 has created
            request = {
                "save_dir": str(data.parents[1]), "tag": "tag", "data": data.name, "save_latest": True,
                "exclude_frozen": False, "background": False, "private": False, "number": 1, "steps": 1, "buffers": {},
            }  # fmt: skip
            post = board.post if signed else lambda name, note: _post_raw(board, name, note)
            post("request/1", request)
            post("requests", {"number": 1})
        dist.barrier()
        time.sleep(2)  # the listeners have looked several times
        dist.barrier()
        written = sorted(path.name for path in data.iterdir() if path.name != LOCK)
        if not signed:
            engine.save_checkpoint(folder, tag="own")
        found = sorted(path.name for path in Path(folder).iterdir())
        engine.destroy()
        return written, found, [text for text in words.texts if "is refused" in text]
    finally:
        logging.getLogger("onefold").removeHandler(words)
        del os.environ[JOB_SECRET]


def _post_raw(board: Any, name: str, note: dict[str, Any]) -> None:
    import json

    raw = dist.distributed_c10d._get_default_store()
    raw.set(board._prefix + name, json.dumps(note))


def test_a_forged_save_request_writes_nothing(on_ranks, tmp_path):
    for written, found, refused in on_ranks(2, saves_of_others, str(tmp_path), False):
        assert written == []
        assert {"latest", "own"} <= set(found)
        assert len(refused) == len(set(refused))
        assert all("onefold/board/" in text for text in refused)
    assert any("/requests" in text for text in refused), "the other rank has read and refused it"


def test_a_signed_save_request_of_another_thread_writes(on_ranks, tmp_path):
    """The test above can fail: the same request with a signature is served."""
    for written, _, refused in on_ranks(2, saves_of_others, str(tmp_path), True):
        assert written != []
        assert refused == []


def with_another_secret(mine: list[str | None]) -> str:
    from onefold.comm.consensus import assert_same_on_all_ranks
    from onefold.comm.hang_detector import world_detector

    connection: Any = world_detector().store
    before = connection.connection
    connection.connection = SignedStore(before._connection, JobSecret(mine[rank()]))
    try:
        assert_same_on_all_ranks("a comparison", [("it", {"a": "b"})])
        return ""
    except ForgedMessageError as error:
        return str(error)
    finally:
        connection.connection = before


def test_ranks_with_different_secrets_are_named_before_training(on_ranks):
    assert on_ranks(2, with_another_secret, ["a" * 32, "a" * 32]) == ["", ""]
    for found in on_ranks(2, with_another_secret, ["a" * 32, "b" * 32]):
        assert "its signature is wrong. Set ONEFOLD_JOB_SECRET to the same value on all nodes" in found
    signed, missing = on_ranks(2, with_another_secret, ["a" * 32, None])
    assert "it is not signed" in signed
    assert "ONEFOLD_JOB_SECRET is not set here" in missing
