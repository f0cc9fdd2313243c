"""The timeline where a device computes, timed by events; and device memory that really runs out."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net, batches, config, first_difference, net, precision, start, train
from test_timeline import end, of_unit, pieces, read, traced
from torch import nn

import onefold
from onefold.engine.memory_errors import device_account
from onefold.recorder import Recorder, Track

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU = {"device": "cpu"}


# -- the timeline ------------------------------------------------------------------------------------------------------


def settings_of(kind: str, folder: str) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "stage 0": config(0, **precision("bf16")),
        "stage 2": config(2, zero_optimization={"overlap_comm": True}, **precision("bf16")),
        "stage 3": config(3, **precision("bf16")),
        "native": config(3, onefold={"collective": "native"}, **precision("bf16")),
        "quantized": config(3, zero_optimization={"zero_quantized_weights": True, "zero_quantized_gradients": True}),
        "offload": config(3, zero_optimization={"offload_optimizer": CPU, "offload_param": CPU}, **precision("bf16")),
        "nvme": config(3, zero_optimization={"offload_optimizer": disk, "offload_param": disk}, **precision("bf16")),
    }[kind]


def with_and_without(kind: str, folder: str, path: str) -> tuple[str | None, dict[str, int]]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings = settings_of(kind, folder)
    plain, _ = traced(settings, None)
    recorded, counted = traced(settings, path)
    return first_difference(recorded, plain), counted


def check(results: list[tuple[str | None, dict[str, int]]], path: Path) -> list[dict[str, Any]]:
    """Traced as untraced, and every byte of the ledger has its span."""
    events = read(path)
    for number, (difference, counted) in enumerate(results):
        assert difference is None
        found: dict[str, int] = {}
        for event in pieces(events, number):
            assert event["dur"] >= 0
            found[event["cat"]] = found.get(event["cat"], 0) + event["args"].get("bytes", 0)
        assert {track: num_bytes for track, num_bytes in found.items() if num_bytes} == counted
    return events


@pytest.mark.parametrize("kind", ["stage 0", "stage 2", "native", "quantized", "offload", "nvme", "stage 3"])
def test_a_traced_run_is_the_same_and_has_every_byte_of_the_ledger(on_nccl_ranks, tmp_path, kind):
    path = tmp_path / "trace.json"
    check(on_nccl_ranks(2, with_and_without, kind, str(tmp_path), str(path)), path)


def test_a_staged_run_is_the_same_and_has_every_byte_of_the_ledger(staged, tmp_path):
    """Gloo between ranks on one GPU: part of a collective is on a thread of the host."""
    path = tmp_path / "trace.json"
    check(staged.run(with_and_without, "stage 3", str(tmp_path), str(path)), path)


def stage_three(path: str) -> None:
    traced(settings_of("stage 3", ""), path)


def test_units_are_in_order_on_the_devices_clock(on_nccl_ranks, tmp_path):
    path = tmp_path / "trace.json"
    on_nccl_ranks(2, stage_three, str(path))
    events = read(path)
    for number in range(2):
        for unit in ("(root)", "blocks.0", "blocks.1", "blocks.2"):
            unshards = of_unit(pieces(events, number, name="unshard"), unit)
            forwards = pieces(events, number, name=f"forward {unit}")
            backwards = pieces(events, number, name=f"backward {unit}")
            reductions = of_unit(pieces(events, number, name="reduce"), unit)
            assert len(forwards) == len(backwards) == len(reductions) == 4
            for forward, backward, reduction in zip(forwards, backwards, reductions, strict=True):
                # Events have a resolution of about half a microsecond.
                assert any(end(unshard) <= forward["ts"] + 1 for unshard in unshards)
                assert end(forward) <= backward["ts"] + 1
                assert backward["ts"] <= reduction["ts"] + 1
                assert forward["dur"] > 0
                assert reduction["dur"] > 0


def phases_of(path: str) -> float:
    engine = start(net(), config(2, **precision("bf16")))
    train(engine, 2)
    with onefold.Profiling(trace=path) as profile:
        train(engine, 3)
    engine.destroy()
    return profile.seconds


def test_what_a_device_does_lies_in_the_window_and_in_its_phase(on_nccl_ranks, tmp_path):
    path = tmp_path / "trace.json"
    seconds = on_nccl_ranks(2, phases_of, str(path))
    events = read(path)
    for number in range(2):
        found = pieces(events, number)
        assert max(map(end, found)) - found[0]["ts"] <= seconds[number] * 1e6 + 1000
        forwards = pieces(events, number, cat="phases", name="forward")
        inner = [event for event in pieces(events, number, cat="compute") if event["name"].startswith("forward")]
        assert len(forwards) == 3
        assert inner
        for event in inner:
            assert any(phase["ts"] - 5 <= event["ts"] and end(event) <= end(phase) + 5 for phase in forwards)


def traced_syncs(stage: int, path: str) -> int:
    """How often a traced step makes the host wait for the device."""
    engine = start(net(), config(stage, **precision("bf16")))
    train(engine, 4)
    (x, y), *_ = batches(1)
    with onefold.Profiling(trace=path), warnings.catch_warnings(record=True) as found:
        engine.backward(engine(x, y))  # the hooks are there from here on
        engine.step()
        engine.module  # noqa: B018 - waits for what is in flight
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.backward(engine(x, y))
        engine.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_traced_step_does_not_wait_for_the_device(on_nccl_ranks, tmp_path, stage):
    assert on_nccl_ranks(2, traced_syncs, stage, str(tmp_path / "trace.json")) == [0, 0]


STEPS = ("host step", "device step")


def copies(path: str) -> None:
    settings = config(2, zero_optimization={"offload_optimizer": CPU, "overlap_comm": True}, **precision("bf16"))
    traced(settings, path)


def test_copies_over_the_bus_have_the_name_of_their_unit(nccl, tmp_path):
    path = tmp_path / "trace.json"
    nccl.run(copies, str(path))
    events = read(path)
    for track in (Track.DOWN, Track.UP):
        found = pieces(events, 0, cat=track.value)
        assert {event["args"].get("unit") for event in found} >= {"blocks.0", "blocks.1", "blocks.2"}
        assert sum(event["dur"] for event in found) > 0
    # Host and device share the step: each takes whole units, and every unit has one of them.
    by_host, by_device = ({event["args"]["unit"] for event in pieces(events, 0, name=name)} for name in STEPS)
    assert by_host
    assert by_device
    assert not by_host & by_device
    assert by_host | by_device >= {"blocks.0", "blocks.1", "blocks.2"}


def by_config(path: str) -> list[str]:
    trace = {"steps": [2, 3], "path": path, "torch_profiler": True, "memory_snapshot": True}
    engine = start(net(), config(3, onefold={"trace": trace}, **precision("bf16")))
    train(engine, 5)
    assert Recorder.active is None
    engine.close()
    return sorted(file.name for file in Path(path).parent.iterdir())


def test_the_config_writes_all_that_it_names(nccl, tmp_path):
    (names,) = nccl.run(by_config, str(tmp_path / "trace.json"))
    assert names == ["trace.json", "trace.memory.rank0.pickle", "trace.torch.rank0.json"]


# -- out of memory -----------------------------------------------------------------------------------------------------

MB = 1 << 20


class Activation(torch.autograd.Function):
    """Takes so many bytes in forward, keeps them for the backward, and takes as many again there as it is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: int, later: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(kept, dtype=torch.uint8, device=x.device))
        ctx.later = later
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.empty(ctx.later, dtype=torch.uint8, device=gradient.device)
        return gradient.clone(), None, None


class Wide(nn.Module):
    """A block with activations of any size."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept = self.later = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Activation.apply(self.block(x), self.kept, self.later)


def wide() -> Net:
    model = net()
    for index in (0, 1):
        model.blocks[index] = Wide(model.blocks[index])
    return model


def allow(num_more: int | None) -> None:
    """So many bytes more than are held now, and no more, may this process have of the device; None: all of it."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = 1.0 if num_more is None else (torch.cuda.memory_reserved() + num_more) / total
    torch.cuda.set_per_process_memory_fraction(allowed)


def run_out(phase: str, stage: int, path: str) -> tuple[str, bool, str | None]:
    """The error's words, whether it is torch's own class, and where training parts from one that met no error."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    trace = {"path": path, "memory_snapshot": True}
    settings = config(stage, onefold={"units": ["Wide", "Block"], "trace": trace}, **precision("bf16"))
    plain = train(start(wide(), settings), 3)
    model = wide()
    engine = start(model, settings)
    first, second = model.blocks[0], model.blocks[1]
    first.kept = 512 * MB
    if phase == "forward":
        second.kept = 2048 * MB
    else:
        second.later = 2048 * MB
    (x, y), *_ = batches(1)
    allow(1024 * MB)
    try:
        with pytest.raises(torch.OutOfMemoryError) as found:
            engine.backward(engine(x, y))
        text, kind = str(found.value), type(found.value)
        del found
    finally:
        allow(None)
    first.kept = second.kept = second.later = 0
    return text, kind is torch.OutOfMemoryError, first_difference(train(engine, 3), plain)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_memory_that_runs_out_is_explained_and_training_goes_on(nccl, tmp_path, phase, stage):
    path = tmp_path / "trace.json"
    ((text, is_torchs, difference),) = nccl.run(run_out, phase, stage, str(path))
    assert is_torchs
    assert "Tried to allocate 2.00 GiB" in text
    assert f"onefold: rank 0, in the {phase}" in text
    assert "2.15 GB were requested" in text
    if phase == "forward":
        assert "of unit blocks.1" in text
    assert text.count("Memory in use on cuda:0") == 1
    for words in ("optimizer states", "activations and temporaries", "limit of this process"):
        assert words in text
    # Half a gigabyte of activations, four samples a micro-batch.
    assert "train_micro_batch_size_per_gpu 2 with gradient_accumulation_steps 2" in text
    snapshot = tmp_path / "trace.out-of-memory.rank0.pickle"
    assert str(snapshot) in text
    assert snapshot.stat().st_size > 0
    assert difference is None


def run_out_in_step() -> str:
    """No memory for the fp32 gradient of a tile."""
    engine = start(net(width=2048, depth=2), config(0, **precision("bf16")))
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y))
    allow(4 * MB)
    try:
        with pytest.raises(torch.OutOfMemoryError) as found:
            engine.step()
        text = str(found.value)
        del found
    finally:
        allow(None)
    return text


def test_a_step_that_runs_out_of_memory_says_so(nccl):
    (text,) = nccl.run(run_out_in_step)
    assert "onefold: rank 0, in the step" in text
    assert "masters" in text


def accounted(stage: int) -> tuple[int, int, int, int]:
    engine = start(net(width=512), config(stage, **precision("bf16")))
    train(engine, 2)
    (x, y), *_ = batches(1)
    loss = engine(x, y)
    account = device_account(engine.state)
    held = account.held.total + account.unsharded + account.slots
    total = account.allocated + account.unused + account.others + account.free
    del loss
    return held, engine.model_memory.held_bytes().total, account.allocated - account.activations, account.total - total


@pytest.mark.parametrize("stage", [2, 3])
def test_an_account_counts_what_is_held_once(nccl, stage):
    ((held, expected, known, apart),) = nccl.run(accounted, stage)
    assert held == expected == known > 0
    assert apart == 0
