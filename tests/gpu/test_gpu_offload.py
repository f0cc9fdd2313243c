"""Offload on a CUDA device: streams, page-locked memory, the host's step beside the device."""

from __future__ import annotations

import re
import tempfile
import time
from typing import Any

import pytest
import torch
from models import batches, config, net, precision, start, weights_of
from test_accumulation import KINDS
from test_accumulation import run as run_accumulation
from test_offload_cases import VARIANTS, measure

from onefold.config import Aio
from onefold.offload.buffer import Buffer
from onefold.offload.bus import Bus
from onefold.offload.disk_shard import DiskShard, StagingBuffers
from onefold.offload.host_shard import HostShard
from onefold.offload.nvme import SwapFiles
from onefold.offload.param_shard import Publisher
from onefold.optim.gpu_stream import GpuStream, StreamedShard
from onefold.optim.pipeline import ElementwiseUpdate, StateWindow, StepValues
from onefold.optim.rules import AdamRule
from onefold.plan import Tier
from onefold.tools.bench.offload_bench import OneGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU = {"device": "cpu"}


def run_tiers(dtype: str, accumulation: int, collective: str, who: str = "both") -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_size": 4096}
        for name, stage, keys in [
            ("device", 2, {}),
            ("1 cpu", 1, {"offload_optimizer": CPU}),
            ("2 cpu", 2, {"offload_optimizer": CPU}),
            ("2 unpinned", 2, {"offload_optimizer": {**CPU, "pin_memory": False}}),
            ("3 cpu", 3, {"offload_optimizer": CPU}),
            ("3 cpu cpu", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
            ("3 disk disk", 3, {"offload_optimizer": disk, "offload_param": disk}),
            ("2 disk", 2, {"offload_optimizer": disk}),
            ("2 host and disk", 2, {"offload_optimizer": {**disk, "max_in_cpu": 50_000}}),
            ("2 half", 2, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
            ("2 cpu, cached", 2, {"offload_optimizer": CPU}),
            ("3 cpu cpu, cached", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
            ("3 cpu cpu, partly cached", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
            ("3 disk disk, cached", 3, {"offload_optimizer": disk, "offload_param": disk}),
        ]:
            cache = {"device_cache": 3e-4 if "partly" in name else 1.0 if "cached" in name else 0}
            settings = config(
                stage,
                gradient_accumulation_steps=accumulation,
                gradient_clipping=0.3,
                zero_optimization={**keys, "overlap_comm": True},
                onefold={"collective": collective, **({"offloaded_step": who, **cache} if keys else {})},
                **precision(dtype),
            )
            engine = start(net(width=64, depth=6), settings)
            losses = []
            for number, (x, y) in enumerate(batches(4 * accumulation)):
                if number == 2 * accumulation:
                    engine.module.blocks[1].up.weight.requires_grad_(False)
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.wait_for_step()
            planned = {tier: engine.model_memory.planned_bytes(tier) for tier in Tier}
            held = {tier: engine.model_memory.held_bytes(tier) for tier in Tier}
            weights = {key: weight.cpu() for key, weight in weights_of(engine.module).items()}
            found[name] = losses, weights, planned, held
            model = engine.module
            engine.destroy()
            # What rests below the device is still the model's when the engine has gone.
            left = {key: weight.cpu() for key, weight in weights_of(model).items()}
            assert all(torch.equal(weights[key], left[key]) for key in weights), name
    return found


def check_tiers(results: list[dict[str, Any]], who: str = "both") -> None:
    for found in results:
        device, _half = found.pop("device"), found.pop("2 half")
        losses, weights, *_ = found["2 cpu"]
        if who == "device":
            found["device"] = device
        # A GPU's fused kernel rounds differently from a CPU's: close, not equal.
        assert losses == pytest.approx(device[0], rel=2e-3)
        for name, (theirs, other, planned, held) in found.items():
            assert theirs == losses, name
            assert all(torch.equal(weights[key], other[key]) for key in weights), name
            for tier in (Tier.HOST, Tier.NVME):
                assert held[tier].masters == planned[tier].masters, (name, tier)
                assert held[tier].states == planned[tier].states, (name, tier)
        assert found["3 disk disk"][3][Tier.NVME].states > 0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world", [1, 2])
def test_tiers_below_the_device_are_bit_equal(request, world, dtype, accumulation):
    pool = request.getfixturevalue("nccl" if world == 1 else "staged")
    check_tiers(pool.run(run_tiers, dtype, accumulation, "exchange"))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("who", ["host", "device"])
def test_whoever_steps_them(nccl, who, accumulation):
    """If the device steps all offloaded states, results are bit-equal to states on the device, also with clipping."""
    check_tiers(nccl.run(run_tiers, "bf16", accumulation, "exchange", who), who)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "muon" not in kind])
def test_accumulation_has_the_bits_of_no_offload_and_the_bytes_of_the_plan(nccl, tmp_path, kind):
    """The GPU steps all states: with clipping, fp16 overflow, 16-bit sums and quantized states."""
    for told in nccl.run(run_accumulation, kind, str(tmp_path), "device"):
        assert told == []


def who_steps(who: str, pinned: bool) -> dict[str, tuple[int, int]]:
    """Elements that the device and the host step, by stage."""
    found = {}
    for stage in (1, 3):
        zero = {"offload_optimizer": {**CPU, "pin_memory": pinned}}
        engine = start(
            net(width=64, depth=6),
            config(stage, bf16={"enabled": True}, onefold={"offloaded_step": who}, zero_optimization=zero),
        )
        host, numel = engine.state.step._host, [0, 0]
        for number, elementwise in enumerate((host._stream._elementwise, host._elementwise)):

            def count(
                *given: Any, number: int = number, step: Any = elementwise.update, numel: list[int] = numel
            ) -> None:
                numel[number] += given[5] - given[4]
                step(*given)

            elementwise.update = count
        for x, y in batches(1):
            engine.backward(engine(x, y))
            engine.step()
        engine.wait_for_step()
        # Without the padding, which is stepped too.
        words = re.search(r"by the host ([\d,]+) parameters, by the GPU ([\d,]+)", engine.describe())
        assert words is not None
        for told, stepped in zip(words.groups(), reversed(numel), strict=True):
            assert 0.8 * stepped <= int(told.replace(",", "")) <= stepped
        engine.destroy()
        found[str(stage)] = numel[0], numel[1]
    return found


@pytest.mark.parametrize(
    ("who", "pinned"), [("auto", True), ("auto", False), ("host", True), ("device", True), ("both", True)]
)
def test_host_and_device_step_what_they_are_given(nccl, who, pinned):
    (found,) = nccl.run(who_steps, who, pinned)
    who = who if pinned else "host"
    for device, host in found.values():
        assert (device > 0) == (who != "host")
        assert (host > 0) == (who != "device")
        if who in ("auto", "both"):
            assert 0.4 < device / (device + host) < 0.75


@pytest.mark.parametrize("extra", [
    {"onefold": {"offloaded_step": "both"}},
    {"onefold": {"offloaded_step": "host"}},
    {"onefold": {"offloaded_step": "device"}},
    {"onefold": {"offloaded_step": "device", "master_dtype": "bf16_int16"}},
    {"onefold": {"delayed_host_step": True}},
    {"onefold": {"delayed_host_step": True, "master_dtype": "bf16_int16"}},
    {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}},
])  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_that_cross_in_a_step_equal_the_plan(nccl, tmp_path, extra, accumulation):
    (found,) = nccl.run(measure, str(tmp_path), VARIANTS, "bf16", accumulation, extra)
    for name, seen in found.items():
        assert seen["traffic"] == seen["crossing"], name


def later_accumulation() -> tuple[int, int]:
    """What goes up in a step, and what is planned, where micro-steps became two after the start."""
    zero = {"offload_optimizer": CPU}
    engine = start(net(), config(2, onefold={"offloaded_step": "device"}, zero_optimization=zero, **precision("bf16")))
    engine.set_gradient_accumulation_steps(2)
    for number in range(2):
        before = engine.ledger.copy()
        for x, y in batches(2, seed=number):
            engine.backward(engine(x, y))
            engine.step()
        engine.wait_for_step()
    moved, planned = engine.ledger.since(before).bytes("up"), engine.model_memory.planned_offload_traffic().up
    engine.destroy()
    return moved, planned


def test_bytes_that_cross_follow_the_number_of_micro_steps(nccl):
    ((moved, planned),) = nccl.run(later_accumulation)
    assert moved == planned


def late_readers() -> list[bool]:
    """Gathers of a shard in host memory, the device being late, and writes to it right after them."""
    bus, size = Bus(torch.device("cuda"), lambda way, num_bytes: None), 1 << 20
    shard, read = HostShard(torch.ones(size).pin_memory(), bus), torch.zeros(size, device="cuda")
    torch.cuda._sleep(100_000_000)
    shard.copy_to(read, is_overwritten=False)
    shard.write(torch.full((size,), 2.0))
    # The device's cast of the master comes down late, and the shard is gathered once more meanwhile.
    shard16, master = (
        HostShard(torch.zeros(size, dtype=torch.bfloat16).pin_memory(), bus),
        torch.ones(size).pin_memory(),
    )
    shard16.stale_behind(master)
    casts = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    with torch.cuda.stream(bus._streams["down"]):
        torch.cuda._sleep(100_000_000)
    for cast in casts:
        shard16.copy_to(cast, is_overwritten=False)
    shard16.wait()
    master.fill_(3)
    torch.cuda.synchronize()
    return [bool((values == 1).all()) for values in (read, *casts, shard16.values)]


def test_what_a_gather_reads_is_not_written_before(nccl):
    assert nccl.run(late_readers) == [[True] * 4]


def late_reader_of_memory(folder: str) -> list[bool]:
    """A gather of a shard on NVMe from the memory of its gradient, on a late stream, and the next gradient."""
    bus, size, found = Bus(torch.device("cuda"), lambda way, num_bytes: None), 1 << 20, []
    swap = SwapFiles([folder], aio=Aio(), rank=0, count=lambda way, num_bytes: None)
    disk = swap.reserve(size, torch.bfloat16)
    swap.open()
    shard = DiskShard(disk, StagingBuffers(2, 1 << 20, pinned=True), bus)
    memory, late = torch.ones(size, dtype=torch.bfloat16).pin_memory(), torch.cuda.Stream()
    for waits_on in ("stream", "host"):
        read, gradient = torch.zeros(size, dtype=torch.bfloat16, device="cuda"), torch.full((size,), 2.0, device="cuda")
        torch.cuda.synchronize()
        shard.set_in_memory(memory.fill_(1))
        with torch.cuda.stream(late):
            torch.cuda._sleep(100_000_000)
            shard.copy_to(read)
        if waits_on == "stream":
            shard.forget_memory()
            bus.down(gradient.bfloat16(), memory)
        else:
            shard.wait()
            memory.fill_(2)
        torch.cuda.synchronize()
        found += [bool((read == 1).all()), bool((memory == 2).all())]
    shard.forget_memory()
    shard.copy_to(read)
    torch.cuda.synchronize()
    swap.close()
    return [*found, not read.any()]


def test_a_gather_from_the_memory_of_a_gradient_is_not_overwritten(nccl, tmp_path):
    assert nccl.run(late_reader_of_memory, str(tmp_path)) == [[True] * 5]


def failing_pass() -> list[str]:
    """What is told, from then on, when the device's step of one unit fails."""
    engine = start(
        net(width=64, depth=6),
        config(
            2,
            bf16={"enabled": True},
            onefold={"offloaded_step": "device"},
            zero_optimization={"offload_optimizer": CPU},
        ),
    )
    elementwise, calls = engine.state.step._host._stream._elementwise, []
    step = elementwise.update

    def fail(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the fourth chunk")
        step(*given)

    elementwise.update = fail
    told = []
    (x, y), *_ = batches(1)
    engine.backward(engine(x, y))
    for call in (engine.step, engine.wait_for_step, lambda: engine.backward(engine(x, y)), engine.step):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    engine.destroy()
    return [*told, str(len(calls))]


def test_a_step_of_the_device_that_fails_is_told(nccl):
    (told,) = nccl.run(failing_pass)
    *words, num_calls = told
    assert all("the fourth chunk" in line for line in words[:3])
    assert any(text in words[3] for text in ("the fourth chunk", "without a backward"))
    assert num_calls == "4", "nothing was stepped after it"


def longer_shard() -> bool:
    """A shard that needs more memory than the last, whose step the device has not begun."""
    bus, sizes = Bus(torch.device("cuda"), lambda way, num_bytes: None), (1 << 20, (1 << 23) + 2048, 0, 1 << 12)
    hyper = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    step, passing, windows, told = StepValues(1, 0.5, [hyper]), GpuStream([AdamRule()], bus), [], []
    for size in sizes:
        master, gradient = torch.randn(size).pin_memory(), torch.randn(size).pin_memory()
        states = {name: Buffer.of(torch.zeros(size).pin_memory()) for name in ("exp_avg", "exp_avg_sq")}
        windows.append((StateWindow(0, size, Buffer.of(master), states), gradient, master.clone()))
    torch.cuda.synchronize()
    for window, gradient, _ in windows:
        for slot in passing._slots:
            with torch.cuda.stream(slot.stream):
                torch.cuda._sleep(100_000_000)
        shard = StreamedShard(OneGroup(), gradient, Publisher(), step, bus.now())
        passing.start(shard, window, lambda window=window: told.append(window))
    passing.finish()
    for window, gradient, before in windows:
        states = {name: Buffer.of(torch.zeros(window.stop, device="cuda")) for name in window.states}
        there = StateWindow(0, window.stop, Buffer.of(before.cuda()), states)
        ElementwiseUpdate([AdamRule()]).update(OneGroup(), gradient.cuda(), step, there, 0, window.stop, None)
        assert torch.equal(window.master.tensor, there.master.tensor.cpu())
        assert all(torch.equal(state.tensor, states[name].tensor.cpu()) for name, state in window.states.items())
    return told == [window for window, *_ in windows]


def test_a_longer_shard_gets_memory_of_its_own(nccl):
    assert nccl.run(longer_shard) == [True]


def slow_host() -> tuple[list[float], list[float]]:
    """The device must not run ahead of a host that is slow, nor free what is still being copied."""
    losses = []
    for slow in (False, True):
        engine = start(
            net(width=256, depth=6), config(2, bf16={"enabled": True}, zero_optimization={"offload_optimizer": CPU})
        )
        if slow:
            host = engine.state.step._host
            for elementwise in (host._elementwise, host._stream._elementwise):

                def wait_first(*args: Any, before: Any = elementwise.update, **kwargs: Any) -> None:
                    time.sleep(0.02)
                    torch.cuda._sleep(10_000_000)  # on the stream of whoever calls
                    before(*args, **kwargs)

                elementwise.update = wait_first
        found = []
        for x, y in batches(6):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            found.append(loss)
        losses.append([loss.item() for loss in found])
        engine.destroy()
    return losses[0], losses[1]


def test_a_slow_host_changes_nothing(nccl):
    fast, slow = nccl.run(slow_host)[0]
    assert fast == slow


def parked() -> tuple[int, int, list[float], list[float]]:
    """Bytes that were freed, bytes that the engine holds, and losses with and without it."""
    traces = []
    for leaves in (False, True):
        engine = start(net(width=512, depth=4), config(2, bf16={"enabled": True}))
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            if leaves and number == 2:
                before = torch.cuda.memory_allocated()
                engine.offload_states()
                freed, held = before - torch.cuda.memory_allocated(), engine.model_memory.planned_bytes()
                engine.reload_states()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        traces.append(losses)
        engine.destroy()
    return freed, held.total - held.gradients, traces[0], traces[1]


def test_states_leave_the_device_and_come_back(nccl):
    freed, held, straight, left = nccl.run(parked)[0]
    assert straight == left
    assert freed >= held


def slept(stage: int, dtype: str) -> list[str]:
    """Bytes that `offload_states` reports beside those that CUDA frees; the optimizer first, the weights then."""
    told, traces = [], []
    for leaves in (False, True):
        engine = start(net(width=512, depth=4), config(stage, **precision(dtype)))
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            if leaves and number == 2:
                for include in (["optim_states", "hp_params"], None):
                    before = torch.cuda.memory_allocated()
                    reported = sum(engine.offload_states(include=include).values())
                    freed = before - torch.cuda.memory_allocated()
                    # Torch's allocator rounds every tensor up to 512 bytes.
                    if not 0 <= freed - reported < 1 << 18:
                        told.append(f"{include}: {reported} reported, {freed} freed")
                engine.reload_states()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        traces.append(losses)
        engine.destroy()
    return told if traces[0] == traces[1] else [*told, f"{traces}"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_reported_is_what_cuda_frees(nccl, stage, dtype):
    assert nccl.run(slept, stage, dtype)[0] == []


def moved_by_hand(stage: int, how: str, formats: dict[str, Any]) -> list[str]:
    """A tool moves shards and states to the CPU and back, as ms-swift does, and the engine trains on."""
    from onefold.compat import deepspeed

    told, traces = [], []
    for moves in (False, True):
        torch.manual_seed(1)
        settings = {"log_level": "warning", **config(stage, bf16={"enabled": True}, onefold=formats)}
        engine = deepspeed.initialize(model=net(width=512, depth=4), config=settings)[0]
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            if moves and number == 2:
                held = engine.model_memory.planned_bytes()
                before = torch.cuda.memory_allocated()
                _move(engine, "cpu", how, weights=stage == 3)
                freed = before - torch.cuda.memory_allocated()
                wanted = held.states + (held.parameters + held.masters if stage == 3 else 0)
                if freed < 0.9 * wanted:
                    told.append(f"{freed} bytes are free of {wanted}")
                if how != "no return":
                    _move(engine, "cuda", how, weights=stage == 3)
                    if before - torch.cuda.memory_allocated() > 1 << 18:
                        told.append("something has not come back")
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        traces.append(losses)
        engine.destroy()
    return told if traces[0] == traces[1] else [*told, f"{traces}"]


def _move(engine: Any, device: str, how: str, *, weights: bool) -> None:
    for parameter in engine.module.parameters() if weights else ():
        parameter.ds_tensor.data = parameter.ds_tensor.data.to(device, non_blocking=True)
    optimizer = engine.optimizer
    if how == "by parameter":
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    else:
        states = list(optimizer.state.values())
    for state in states:
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and how == "in place":
                value.data = value.data.to(device)
            elif isinstance(value, torch.Tensor):
                state[name] = value.to(device, non_blocking=True)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["by parameter", "by master", "in place", "no return"])
def test_moves_by_hand_free_the_device(nccl, stage, how):
    pytest.importorskip("pydantic", reason="configs under DeepSpeed's name are pydantic models")
    formats = {"state_dtype": "int8", "master_dtype": "bf16_int16"} if how == "by master" else {}
    assert nccl.run(moved_by_hand, stage, how, formats)[0] == []
