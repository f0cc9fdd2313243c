"""What the benchmarks count: calls, bytes of an interface, functions, and whose memory it was at a peak."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batches, config, net, precision, start

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks lie beside the package, and are not installed

from benchmarks.calls import Calls, count_calls
from benchmarks.gpu import reference_of
from benchmarks.host_time import measure, parse_arguments
from benchmarks.peak import Allocation, at_peak
from benchmarks.systems import parse_systems
from benchmarks.worker import parse_sent_bytes


def calls_of_a_step(stage: int, collective: str) -> tuple[Calls, Calls]:
    """As the dispatcher sees them, and as the ledger does."""
    own = {"collective": collective}
    engine = start(net(), config(stage, **precision("bf16"), onefold=own, zero_optimization={"reduce_bucket_size": 2}))
    *before, last = batches(3)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(engine(x, y))
        engine.step()

    for x, y in before:  # the first step also agrees on the order
        step(x, y)
    engine.ledger.clear()
    counted = count_calls(lambda: step(*last), torch.device("cpu"))
    ledger = engine.ledger
    return counted, Calls(ledger.calls("reduce-scatter") + ledger.calls("gather"), ledger.calls("synchronize"))


@pytest.mark.parametrize("collective", ["exchange", "native"])
@pytest.mark.parametrize("stage", [1, 3])
def test_calls_are_those_of_the_ledger(on_ranks, stage, collective):
    for counted, by_ledger in on_ranks(2, calls_of_a_step, stage, collective):
        assert counted == by_ledger
        assert counted.collectives > 2
        assert counted.host_exchanges == (1 if stage == 1 else 2)


def calls_by_hand() -> Calls:
    def work() -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4, dtype=torch.int64))

    return count_calls(work, torch.device("cpu"))


def test_what_goes_out_together_is_one_call(on_ranks):
    assert on_ranks(2, calls_by_hand) == [Calls(4, 1)] * 2


def functions_of_a_step(blocks: int) -> dict[str, dict[str, int]]:
    """Return the calls of onefold's functions by system and phase."""
    sizes = ["--blocks", str(blocks), "--warmup", "3", "--steps", "1"]
    found = measure(parse_arguments([*sizes, "--systems", "torch,onefold-2,onefold-3-nothing-kept"]))
    return {name: {phase: calls.total() for phase, calls in each.calls.items()} for name, each in found.items()}


def test_calls_per_block_do_not_grow_with_the_model(on_ranks):
    """Check that no hook walks over all blocks, and that the benchmark counts nothing of plain torch."""
    few, twice, four_times = (on_ranks(1, functions_of_a_step, blocks)[0] for blocks in (4, 8, 16))
    assert set(few["torch"].values()) == {0}
    for system in ("onefold-2", "onefold-3-nothing-kept"):
        for phase, calls in few[system].items():
            assert calls > 0
            of_four_blocks = twice[system][phase] - calls
            of_eight_blocks = four_times[system][phase] - twice[system][phase]
            assert of_eight_blocks <= 1.05 * 2 * of_four_blocks, (system, phase)


def event(action: str, address: int, size: int, *files: str) -> dict[str, Any]:
    frames = [{"filename": file, "line": 7, "name": "f"} for file in files]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def block(state: str, address: int, size: int, *files: str) -> dict[str, Any]:
    return {**event("", 0, 0, *files), "state": state, "address": address, "requested_size": size, "size": size + 1}


def test_a_peak_is_what_was_there_then():
    torch_folder = "/home/onefold/.venv/lib/python3.12/site-packages/torch"
    trace = [
        event("alloc", 1, 10, f"{torch_folder}/nn/functional.py", "/home/onefold/onefold/runtime/unit.py"),
        event("segment_alloc", 1, 100),
        event("free_requested", 5, 8),
        event("free_completed", 5, 8),
        event(
            "alloc", 2, 20, f"{torch_folder}/distributed/fsdp/_fully_shard/a.py", "/home/onefold/benchmarks/model.py"
        ),
        event("alloc", 5, 1, f"{torch_folder}/autograd/graph.py"),  # the peak, at an address that was another's before
        event("free_requested", 1, 10),
        event("alloc", 1, 4),
    ]
    blocks = [
        block("active_allocated", 9, 100, "/home/onefold/onefold/optim/step.py"),
        block("active_allocated", 1, 4),
        block("active_allocated", 2, 20),
        block("active_allocated", 5, 1),
        block("inactive", 3, 50),
    ]
    snapshot = {"device_traces": [trace, []], "segments": [{"device": 0, "blocks": blocks}]}
    assert sorted(at_peak(snapshot, 0), key=lambda each: each.size) == [
        Allocation(1, "no such frame (autograd's own)", before=False),
        Allocation(10, "onefold/runtime/unit.py:7 f", before=False),
        Allocation(20, "torch/distributed/fsdp/_fully_shard/a.py:7 f", before=False),
        Allocation(100, "onefold/optim/step.py:7 f", before=True),
    ]


def test_bytes_of_an_interface():
    text = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 111 2 0 0 0 0 0 0 333 4 0 0 0 0 0 0
  eth0:555 6 0 0 0 0 0 0 777 8 0 0 0 0 0 0
"""
    assert parse_sent_bytes(text) == 333
    assert parse_sent_bytes(text, "eth0") == 777


def test_each_is_measured_against_the_fsdp2_of_its_kind():
    assert reference_of("onefold-2", "bf16") == reference_of("ddp", "bf16") == "fsdp2-keep"
    assert reference_of("onefold-3-ahead", "bf16") == "fsdp2-reshard"
    assert reference_of("onefold-1-native", "bf16") == "fsdp2-keep-bf16"
    assert reference_of("onefold-3-ahead-native", "bf16") == "fsdp2-reshard-bf16"
    assert reference_of("onefold-3-native", "fp32") == "fsdp2-reshard"
    assert reference_of("offload-fsdp2", "bf16") == reference_of("offload-fsdp2-onefold", "bf16") == "fsdp2-reshard"


def test_a_family_has_no_variants():
    assert parse_systems("fsdp2,onefold-3") == ["fsdp2-keep", "fsdp2-reshard", "onefold-3"]
    assert "onefold-1-native" not in parse_systems("onefold")
    assert parse_systems("onefold-1-native") == ["onefold-1-native"]


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("flags", [[], ["--fork-server"]], ids=["started", "forked"])
def test_the_time_of_a_restart_is_divided_into_phases(flags: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "benchmarks.restart", "--preset", "tiny", "--tokens", "8", "--scenarios", "rank"]
    command += ["--rounds", "1", "--disk", str(tmp_path), "--report", str(report), *flags]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)
    (row,) = re.findall(r"^\| rank +\|(.*)\|$", report.read_text(), re.MULTILINE)
    *phases, total, _ = (float(cell) for cell in row.split("|"))
    assert len(phases) == 8
    assert min(phases) >= 0.0
    assert sum(phases) == pytest.approx(total, abs=0.5)
    assert list(tmp_path.iterdir()) == [report]
