"""Checkpoints in object stores: order of requests, byte ranges, faults and kills, on a real S3 server and in memory."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from models import config, rank, start
from object_store import BUCKET, ENVIRONMENT, MISSING, NEW_CONNECTIONS, SKIP, ObjectStore
from torch import nn

import onefold
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.folder import list_tags, remove
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.checkpoint.saving.rank_shard_writer import SaveError
from onefold.checkpoint.tools.export import export
from onefold.storage.object_path import ObjectPath, StorageError
from onefold.storage.place import local_path, open_file, place
from onefold.tools.cli.main import main as command
from onefold.tools.train.options import OptionError, TrainOptions, check_inputs
from onefold.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

OnRanks = Callable[..., list[Any]]
needs_server = pytest.mark.skipif(bool(MISSING), reason=SKIP)
MIB = 1 << 20


class Stack(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def engine_of(width: int = 12, stage: int = 3, **more: Any) -> onefold.Engine:
    torch.manual_seed(rank())
    return start(Stack(width), config(stage, **more))


def learn(engine: onefold.Engine, seed: int) -> None:
    width = engine.module.layers[0].in_features
    engine.backward(engine(torch.randn(2, width, generator=torch.Generator().manual_seed(seed))))
    engine.step()


def digest(engine: onefold.Engine) -> str:
    """Of the masters and states of this rank."""
    found = xxhash.xxh3_64()
    for parameter in engine.module.parameters():
        for part in (
            safe_get_local_fp32_param(parameter),
            safe_get_local_optimizer_state(parameter, "exp_avg"),
            safe_get_local_optimizer_state(parameter, "exp_avg_sq"),
        ):
            assert part is not None
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


def resumed(url: str, environment: dict[str, str], width: int = 12, tag: str | None = None, **more: Any) -> Any:
    """Load, and return the path, the steps, the client state and the digest of this rank."""
    os.environ.update(environment)
    engine = engine_of(width, **more)
    path, client_state = engine.load_checkpoint(url, tag)
    return path, engine.global_steps, client_state, digest(engine)


def saved(
    url: str, environment: dict[str, str], saves: int = 1, width: int = 12, background: bool = False, **more: Any
) -> list[str]:
    """Save after each of some steps, and return the digests of this rank."""
    os.environ.update(environment)
    engine = engine_of(width, **more)
    found = []
    for number in range(saves):
        learn(engine, number)
        found.append(digest(engine))
        engine.save_checkpoint(url, client_state={"number": number}, background=background)
    engine.wait_for_checkpoint()
    return found


# -- in memory, of one process -----------------------------------------------------------------------------------------


def memory_case(folder: str) -> None:
    [digested] = saved(folder, {})
    path, steps, client_state, again = resumed(folder, {})
    assert (path, steps, client_state, again) == (str(place(folder) / "global_step1"), 1, {"number": 0}, digested)
    _, *later = saved(f"{folder}/more", {}, 3, background=True, checkpoint={"keep_last": 2})
    assert {found.tag for found in list_tags(place(f"{folder}/more"))} == {"global_step2", "global_step3"}
    assert resumed(f"{folder}/more", {})[3] == later[-1]
    assert resumed(f"{folder}/more", {}, tag="global_step2")[3] == later[0]


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_url_resumes_bit_exactly(on_ranks: OnRanks, tmp_path: Path, protocol: str) -> None:
    folder = f"file://{tmp_path}" if protocol == "file" else "memory://resumed"
    on_ranks(1, memory_case, folder)
    assert (protocol == "file") == (tmp_path / "global_step1" / "manifest.json").exists()


@pytest.mark.slow
def test_ranks_must_share_the_store(on_ranks: OnRanks) -> None:
    for text in on_ranks(2, refused, "memory://private", {}):
        assert "rank 1" in text
        assert "Save to a file system that all ranks share" in text


def test_an_object_has_no_mode_for_one_user(on_ranks: OnRanks) -> None:
    [text] = on_ranks(1, refused, "memory://private", {}, checkpoint={"private": True})
    assert (
        "checkpoint.private: memory://private/global_step1 is in an object store, whose objects have no modes" in text
    )


def other_tags(folder: str) -> None:
    """The data of a killed save is neither a checkpoint nor removed; that of a replaced one is removed."""
    saved(folder, {})
    tag = place(folder) / "global_step1"
    [first] = [entry.name for entry in tag.glob("data-*")]
    other = tag / f"data-29990101T000000-{'0' * 8}"  # its job may still be writing
    (other / ".lock").write_bytes(b"")
    (other / "rank-00000.safetensors").write_bytes(b"part")
    old = tag / f"data-20200101T000000-{'0' * 8}"
    (old / ".lock").write_bytes(b"")
    (place(folder) / "global_step9" / "data-29990101T000000-00000000" / "rank-00000.safetensors").write_bytes(b"part")
    assert resumed(folder, {})[0] == f"{folder}/global_step1"
    saved(folder, {})
    left = {entry.name for entry in tag.glob("data-*")}
    assert other.name in left
    assert not {first, old.name} & left
    assert len(left) == 2
    remove(tag)
    assert {entry.name for entry in tag.iterdir()} == {other.name}


def test_only_data_that_no_job_needs_is_removed(on_ranks: OnRanks) -> None:
    on_ranks(1, other_tags, "memory://leftovers")


def damaged(folder: str) -> None:
    first, _ = saved(folder, {}, 2)
    tag = place(folder) / "global_step2"
    [data] = tag.glob("data-*")
    file = data / "rank-00000.safetensors"
    content = bytearray(file.read_ranges([(0, file.size())])[0])
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=rf"{file}: .*damaged, the checksum does not match"):
        resumed(folder, {}, tag="global_step2")
    file.write_bytes(bytes(content[:-1]))
    assert [found.tag for found in list_tags(place(folder)) if found.problems] == ["global_step2"]
    path, *_, again = resumed(folder, {})
    assert (path, again) == (f"{folder}/global_step1", first)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        resumed(folder, {}, tag="global_step2")


def test_damage_is_found_as_on_disk(on_ranks: OnRanks) -> None:
    on_ranks(1, damaged, "memory://damaged")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://key:hunter2@bucket/run", "s3://bucket/run: the URL must not contain a user, a password or options"),
        ("s3://bucket/run?sig=hunter2", "s3://bucket/run: the URL must not contain"),
        ("sftp://user:hunter2@node/run", "sftp://node/run: the URL must not contain"),
        ("sftp://node/run", "sftp:// is not supported, because its writes are not known to be atomic"),
        ("simplecache::s3://bucket/run", "is not supported"),
        ("s3://", "must name a bucket"),
        ("s3://bucket/../run", "no '.' or '..'"),
        ("file://data/run", "must be an absolute path"),
        (Path("s3://bucket/run"), "a URL that pathlib has changed. Pass s3://bucket/run as a string"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(url: Any, problem: str) -> None:
    with pytest.raises(StorageError) as caught:
        place(url)
    assert problem in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_places() -> None:
    assert place("runs/a") == Path("runs/a")
    assert place("a:/b") == Path("a:/b")
    assert place("file:///runs/a") == Path("/runs/a")
    assert str(place("S3://bucket//run/")) == "s3://bucket/run"
    assert place("s3://bucket/run").parent == place("s3://bucket")
    with pytest.raises(StorageError, match="OUT s3://bucket/run: must be a path of a file system, not a URL"):
        local_path("s3://bucket/run", "OUT")


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['gcsfs'] = None\n"
        "from onefold.storage.place import place\n"
        "print(place('gs://bucket/run').exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "gs:// needs gcsfs, which is not installed. Run pip install 'onefold[gcs]'." in done.stderr


def test_reads_are_combined_within_a_bound() -> None:
    path = place("memory://ranges/file")
    assert isinstance(path, ObjectPath)
    content = os.urandom(70 * MIB)
    path.write_bytes(content)
    requests: list[list[tuple[int, int]]] = []

    class Counted(ObjectPath):
        def read_ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
            requests.append(ranges)
            return super().read_ranges(ranges)

    with open_file(Counted(path.url)) as file:
        buffer = bytearray(MIB)
        for offset in range(0, len(content), MIB):
            assert file.read_into(memoryview(buffer), offset) == MIB
            assert buffer == content[offset : offset + MIB]
        sizes = [ranges[-1][1] - ranges[0][0] for ranges in requests]
        assert sum(sizes) == len(content)
        assert max(sizes) == 32 * MIB
        assert len(requests) < 12
        assert max(stop - start for ranges in requests for start, stop in ranges) == 4 * MIB
        requests.clear()
        for offset in (MIB, 5 * MIB, 3 * MIB):  # reads that do not follow each other request what they need
            assert file.read_into(memoryview(buffer)[:100], offset) == 100
            assert buffer[:100] == content[offset : offset + 100]
        assert [ranges[-1][1] - ranges[0][0] for ranges in requests] == [MIB // 16] * 3
        assert file.read_into(memoryview(buffer), len(content) - 10) == 10


def requests_of_loads(folder: str) -> tuple[int, int]:
    """Save a stack of layers, load it into a new and into a trained engine, and count the ranges that are requested."""

    def deep() -> onefold.Engine:
        return start(Stack(256, depth=24), config(2))

    saver, new, trained = deep(), deep(), deep()
    learn(saver, 0)
    saver.save_checkpoint(folder)
    learn(trained, 1)
    counts, requests = [], []
    read_ranges = ObjectPath.read_ranges

    def counted(path: ObjectPath, ranges: list[tuple[int, int]]) -> list[bytes]:
        requests.extend(ranges)
        return read_ranges(path, ranges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectPath, "read_ranges", counted)
        for engine in (new, trained):
            requests.clear()
            engine.load_checkpoint(folder)
            assert digest(engine) == digest(saver)
            counts.append(len(requests))
    return counts[0], counts[1]


def test_neighbouring_ranges_are_read_together(on_ranks: OnRanks) -> None:
    """The file has 19 MB: masters and two states of 24 layers, weights and biases."""
    [(new, trained)] = on_ranks(1, requests_of_loads, "memory://requests")
    assert new <= 24
    assert trained <= 2 * new  # all checksums are verified first


# -- on a server -------------------------------------------------------------------------------------------------------


def keys(requests: list[dict[str, Any]], run: str, *methods: str) -> list[str]:
    """What the requests write or read, below the folder of a run."""
    prefix = f"/{BUCKET}/{run}/"
    return [r["path"].removeprefix(prefix) for r in requests if r["path"].startswith(prefix) and r["method"] in methods]


@needs_server
def test_the_manifest_follows_all_parts_in_one_request(on_ranks: OnRanks, s3: ObjectStore) -> None:
    url = f"s3://{BUCKET}/order"
    digests = on_ranks(2, saved, url, s3.environment, width=1300)
    requests = s3.requests()
    written = keys(requests, "order", "PUT", "POST")
    manifest = written.index("global_step1/manifest.json")
    assert written.count("global_step1/manifest.json") == 1
    assert written[manifest:] == ["global_step1/manifest.json", "latest"]
    for number in range(2):
        name = f"rank-{number:05}.safetensors"
        assert sum(key.endswith(name) for key in written[:manifest]) >= 3  # a multipart upload and its completion
    multipart = {r["path"] for r in requests if "uploadId" in r["query"] and "/order/" in r["path"]}
    assert {path.rpartition("/")[2] for path in multipart} == {"rank-00000.safetensors", "rank-00001.safetensors"}

    before = len(requests)
    found = on_ranks(2, resumed, url, s3.environment, width=1300, tag="global_step1")
    assert [again for *_, again in found] == [digested for [digested] in digests]
    reads = s3.requests()[before:]
    shards = [r for r in reads if r["path"].endswith(".safetensors") and r["method"] == "GET"]
    assert all(r["range"] for r in shards)
    ranges = [[int(at) for at in re.findall(r"\d+", r["range"])] for r in shards]
    size = 2 * (1300 * 1300 + 1300) * 3 * 4
    assert size < sum(stop - start + 1 for start, stop in ranges) < 1.3 * size  # all ranks together
    assert max(stop - start + 1 for start, stop in ranges) <= 4 * MIB
    [one] = on_ranks(1, resumed, url, s3.environment, width=1300, stage=2)
    assert one[:3] == (f"{url}/global_step1", 1, {"number": 0})


@needs_server
@pytest.mark.slow
def test_background_saves_and_retention(on_ranks: OnRanks, s3: ObjectStore) -> None:
    url = f"s3://{BUCKET}/many"
    digests = on_ranks(2, saved, url, s3.environment, 4, background=True, checkpoint={"keep_last": 2})
    found = on_ranks(2, resumed, url, s3.environment)
    assert [again for *_, again in found] == [several[-1] for several in digests]
    assert sorted(entry.name for entry in place(url).glob("global_step*")) == ["global_step3", "global_step4"]
    left = [entry.name for entry in (place(url) / "global_step4").iterdir()]
    assert len(left) == 2
    assert not [key for key in keys(s3.requests(), "many", "PUT") if key.endswith("partial")]


@pytest.mark.slow
@needs_server
def test_commands_take_urls(
    on_ranks: OnRanks, s3: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{BUCKET}/commands"
    on_ranks(1, saved, url, s3.environment, 3)
    assert command(["ckpt", "ls", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["latest"] == "global_step3"
    assert {(row["tag"], row["state"]) for row in listed["checkpoints"]} == {
        (f"global_step{step}", "complete") for step in (1, 2, 3)
    }
    assert command(["ckpt", "inspect", url]) == 0
    assert f"{url}/global_step3" in capsys.readouterr().out
    assert command(["ckpt", "verify", url, "--all"]) == 0
    assert command(["ckpt", "rm", url, "global_step2", "global_step3", "--yes", "--force"]) == 0
    assert "latest: now names global_step1" in capsys.readouterr().out
    assert command(["ckpt", "rm", url, "--leftovers", "--yes"]) == 0
    assert [entry.name for entry in place(url).glob("global_step*")] == ["global_step1"]
    assert command(["export", url, str(tmp_path / "weights")]) == 0
    assert (tmp_path / "weights" / "model.safetensors").stat().st_size > 12 * 12 * 4
    capsys.readouterr()
    assert command(["plan", "--model", url, "--gpus", "1", "--gpu-memory", "80GB"]) == 0
    assert f"checkpoint {url}" in capsys.readouterr().out
    for arguments in (["export", url, f"{url}/weights"], ["import-deepspeed", url, "out"]):
        assert command(arguments) != 0
        assert "must be a path of a file system, not a URL" in capsys.readouterr().err
    assert command(["ckpt", "ls", f"s3://{BUCKET}/nothing"]) == 2
    assert f"s3://{BUCKET}/nothing: no such folder" in capsys.readouterr().err
    assert command(["ckpt", "ls", "sftp://node/run"]) == 2
    assert "sftp:// is not supported" in capsys.readouterr().err


def heard(url: str, environment: dict[str, str]) -> tuple[str, str]:
    """What is logged, from the lowest level of our logger on, and the text of the manifest."""
    words: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        saved(url, environment)
        try:
            saved("s3://no-such-bucket/run", environment)
        except Exception as error:
            words.append(str(error))
    finally:
        logger.removeHandler(handler)
    manifest = place(url) / "global_step1" / "manifest.json"
    assert isinstance(manifest, ObjectPath)
    return "\n".join(words), manifest.read_ranges([(0, manifest.size())])[0].decode()


@needs_server
@pytest.mark.slow
def test_credentials_are_in_no_log_and_no_file(on_ranks: OnRanks, s3: ObjectStore) -> None:
    [(words, manifest)] = on_ranks(1, heard, f"s3://{BUCKET}/secret", s3.environment)
    assert "cannot save to s3://no-such-bucket/run, tag global_step1" in words
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert ENVIRONMENT[name] not in words + manifest


@needs_server
@pytest.mark.slow
def test_requests_that_fail_for_a_moment_are_repeated(on_ranks: OnRanks, s3: ObjectStore) -> None:
    url = f"s3://{BUCKET}/moment"
    faults = [
        {"method": method, "path": path, "fault": fault, "times": 2}
        for method, path, fault in (
            ("PUT", "/moment/.*safetensors", "error"),
            ("POST", "/moment/.*safetensors", "drop"),
            ("PUT", "/moment/.*manifest.json", "error"),
            ("PUT", "/moment/latest", "drop"),
            ("GET", "/moment/.*safetensors", "drop"),
            ("GET", "/moment/.*manifest.json", "error"),
        )
    ]
    with s3.faults(*faults):
        [[digested]] = on_ranks(1, saved, url, s3.environment, width=700)
        [(*_, again)] = on_ranks(1, resumed, url, s3.environment, width=700)
    assert again == digested
    failed = [r["fault"] for r in s3.requests() if "/moment/" in r["path"] and r["fault"]]
    assert len(failed) >= 10


def refused(url: str, environment: dict[str, str], **more: Any) -> str:
    with pytest.raises(SaveError) as caught:
        saved(url, environment, **more)
    return str(caught.value)


@needs_server
@pytest.mark.slow
@pytest.mark.parametrize("path", ["safetensors", "manifest.json"])
def test_a_store_that_stays_away_ends_the_save(on_ranks: OnRanks, s3: ObjectStore, path: str) -> None:
    url = f"s3://{BUCKET}/away-{path}"
    [[digested]] = on_ranks(1, saved, url, s3.environment)
    with s3.faults({"method": "PUT", "path": f"/away-{path}/again/.*{path}", "fault": "error"}):
        for text in on_ranks(2, refused, f"{url}/again", s3.environment):
            assert text.startswith("checkpoint global_step1 was not saved to")
            assert f"{url}/again/global_step1" in text
    assert not list((place(url) / "again" / "global_step1").glob("*"))
    assert on_ranks(1, resumed, url, s3.environment)[0][3] == digested


SAVER = """
import sys, torch, onefold
model = torch.nn.Linear(300, 300)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "log_level": "warning"}
engine, *_ = onefold.initialize(model=model, config=config)
engine.load_checkpoint(sys.argv[1])
while engine.global_steps < int(sys.argv[2]):
    engine.backward(engine(torch.ones(1, 300)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], client_state={"largest": model.weight.max().item()})
    print(engine.global_steps, flush=True)
"""


def saver(url: str, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SAVER, url, str(steps)], stdout=subprocess.PIPE, text=True)


@needs_server
@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("held", ["safetensors", "manifest.json", "latest"])
def test_a_kill_before_the_manifest_leaves_the_previous_checkpoint(s3: ObjectStore, held: str) -> None:
    """The process is killed while the server holds the request that uploads this object of the second step."""
    run = f"kill-{held.partition('.')[0]}"
    url = f"s3://{BUCKET}/{run}"
    before = sum(request["fault"] == "hold" for request in s3.requests())
    with s3.faults({"method": "PUT", "path": f"/{run}/.*{held}", "fault": "hold", "skip": 1}):
        process = saver(url, 2)
        s3.await_held(before + 1)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    newest = 2 if held == "latest" else 1
    with CheckpointReader.open(url) as checkpoint:
        assert checkpoint.manifest.global_steps == 1  # what `latest` names
        weight = checkpoint.tensor("model/weight")
        assert weight.max().item() == checkpoint.state["client_state"]["largest"]
    complete = [found for found in list_tags(place(url)) if not found.problems]
    assert [found.manifest.global_steps for found in complete if found.manifest] == list(range(newest, 0, -1))
    process = saver(url, 3)
    assert process.communicate(timeout=120)[0].split() == ["2", "3"]
    assert command(["ckpt", "verify", url, "--all"]) == 0


AT_THE_END = """
import threading, time
from onefold.storage.object_path import ObjectUpload
finish, ended = ObjectUpload.finish, threading.Event()
def wait_and_finish(self):
    ended.wait()
    time.sleep(1)  # thread pools would be closed
    return finish(self)
ObjectUpload.finish = wait_and_finish
engine.backward(engine(torch.ones(1, 300)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], background=True)
threading._register_atexit(ended.set)
"""


@needs_server
@pytest.mark.slow
@pytest.mark.program
def test_a_background_save_goes_on_after_the_program_has_ended(s3: ObjectStore) -> None:
    url = f"s3://{BUCKET}/ended"
    environment = {**os.environ, **NEW_CONNECTIONS, "AWS_ENDPOINT_URL": f"http://localhost:{s3.port}"}
    command = [sys.executable, "-c", SAVER + AT_THE_END, url, "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("not saved")) == (0, 0), done.stderr
    with CheckpointReader.open(url) as checkpoint:
        assert checkpoint.manifest.global_steps == 1


@needs_server
@pytest.mark.slow
@pytest.mark.program
def test_kills_at_any_moment_lose_no_checkpoint(s3: ObjectStore, tmp_path: Path) -> None:
    """Eight kills, at requests that are chosen by number. Every published checkpoint stays loadable."""
    url = f"s3://{BUCKET}/kills"
    reached = 0
    for number in range(8):
        before = sum(request["fault"] == "hold" for request in s3.requests())
        with s3.faults({"method": "PUT", "path": "/kills/", "fault": "hold", "skip": 7 + 3 * number}):
            process = saver(url, 1000)
            s3.await_held(before + 1)
            process.kill()
            process.wait()
        with CheckpointReader.open(url) as checkpoint:
            steps = checkpoint.manifest.global_steps
            assert checkpoint.tensor("model/weight").max().item() == checkpoint.state["client_state"]["largest"]
        assert steps >= reached
        reached = steps
        assert not [found for found in list_tags(place(url)) if found.manifest is not None and found.problems]
    assert reached > 5


@needs_server
@pytest.mark.slow
def test_weights_are_exported_from_a_url(on_ranks: OnRanks, s3: ObjectStore, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/export"
    on_ranks(2, saved, url, s3.environment)
    exported = export(url, tmp_path / "out")
    assert str(exported.checkpoint) == f"{url}/global_step1"
    with pytest.raises(StorageError, match="the folder of an export"):
        export(url, f"{url}/out")


def test_other_outputs_and_weights_refuse_a_url() -> None:
    with pytest.raises(StorageError, match="the weights s3://bucket/run: must be a path"):
        onefold.zero.load_safetensors(nn.Linear(1, 1), "s3://bucket/run")
    with pytest.raises(OptionError, match=r"--out s3://bucket/run: must be a path.*Give a URL as --checkpoints"):
        check_inputs(TrainOptions(out="s3://bucket/run"))
    with pytest.raises(OptionError, match="must not contain a user"):
        check_inputs(TrainOptions(checkpoints="s3://a:b@bucket/run"))


@needs_server
@pytest.mark.slow
@pytest.mark.program
def test_onefold_train_resumes_from_a_url(s3: ObjectStore, tmp_path: Path) -> None:
    def train(*flags: str) -> str:
        command = [
            sys.executable,
            "-m",
            "onefold.tools.cli.main",
            "train",
            "--ranks",
            "2",
            "--sample-length",
            "0",
            *flags,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    out, url = str(tmp_path / "run"), f"s3://{BUCKET}/train"
    train("--preset", "tiny", "--steps", "2", "--save-every", "2", "--no-save", "--out", out, "--checkpoints", url)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "resuming after step 2, from s3://runs/train/global_step2" in train("--resume", out, "--steps", "3")
