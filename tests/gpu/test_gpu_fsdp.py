"""FSDP2 models whose optimizer states are streamed from host memory through the GPU, on one rank and on two NCCL ranks
that share it: bits, bytes and checkpoints.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Net, Trace, first_difference
from test_fsdp_offload import (
    FUSED,
    OPTIMIZERS,
    bf16_weights_are_rounded_masters,
    full_state_dict,
    load,
    local,
    refusals,
    resume_from_state_dict,
    save,
    sharded_net,
    train,
    with_scaler,
    write_between_steps,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from onefold.fsdp import offload
from onefold.fsdp import offloaded_optimizer as module_under_test
from onefold.optim import gpu_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLDS = (1, 2)


@contextmanager
def streaming(chunk_bytes: int = 1 << 14) -> Iterator[None]:
    """States of parameters of any size are streamed, in small chunks."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with (
        mock.patch.object(module_under_test, "MIN_NUMEL", 1),
        mock.patch.object(gpu_stream, "CHUNK_BYTES", chunk_bytes),
    ):
        yield


def run(kind: str, dtype: str, how: dict[str, Any] | None, **training: Any) -> tuple[Trace, int]:
    """A run, and the bytes of its states in host memory. Without `how` nothing is offloaded."""
    with streaming():
        model = sharded_net(dtype, width=64)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if how is None:
            return train(model, optimizer, **training), 0
        optimizer = offload(model, optimizer, **how)
        trace = train(model, optimizer, **training)
        optimizer.synchronize()
        trace.weights = local(model)
        return trace, optimizer.host_bytes


def compare(kind: str, dtype: str, how: dict[str, Any], other: dict[str, Any] | None, training: Any) -> str | None:
    found, host_bytes = run(kind, dtype, how, **training)
    assert host_bytes > 0
    return first_difference(found, run(kind, dtype, other, **training)[0])


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "training"),
    [
        ("AdamW", "fp32", {}), ("AdamW", "mixed", {"accumulation": 2, "clip": 0.05}), ("AMSGrad", "fp32", {}),
        ("Adam", "mixed", {"clip": 0.05}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", WORLDS)
def test_streamed_states_are_bit_equal_to_the_fused_optimizer(
    on_nccl_ranks, world, kind, dtype, training, non_blocking
):
    how = {"ratio": 1.0, "non_blocking": non_blocking}
    assert on_nccl_ranks(world, compare, kind, dtype, how, None, {"num_steps": 5, **training}) == [None] * world


@pytest.mark.parametrize(
    ("kind", "dtype", "states"),
    [("AdamW", "bf16", "fp32"), ("AdamW", "fp32", "int8"), ("AdamW", "bf16", "int8"), ("momentum", "bf16", "fp32"),
     ("AMSGrad", "fp32", "int8"), ("Lion", "bf16", "int8"), ("Adagrad", "fp32", "fp32")],
)  # fmt: skip
@pytest.mark.parametrize("world", WORLDS)
def test_streamed_states_are_bit_equal_to_states_on_the_device(on_nccl_ranks, world, kind, dtype, states):
    ratios = [{"ratio": ratio, "states": states} for ratio in (1.0, 0.0)]
    assert on_nccl_ranks(world, compare, kind, dtype, *ratios, {"num_steps": 5, "clip": 0.05}) == [None] * world


def streamed(case: Any, *args: Any) -> Any:
    with streaming():
        return case(*args)


def test_the_cases_of_cpu_ranks_hold(on_nccl_ranks):
    assert on_nccl_ranks(2, streamed, bf16_weights_are_rounded_masters) == [[], []]
    assert on_nccl_ranks(2, streamed, write_between_steps, "bf16") == [[], []]
    assert on_nccl_ranks(2, streamed, with_scaler) == [(None, [2.0**7] * 2)] * 2
    for dtype, states in (("fp32", "fp32"), ("bf16", "int8")):
        assert on_nccl_ranks(2, streamed, resume_from_state_dict, "AdamW", dtype, states) == [None, None]
    assert "accepted" not in on_nccl_ranks(2, refusals)[0].values()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_resume_with_and_without_offload(on_nccl_ranks, tmp_path):
    """A checkpoint of two ranks is loaded on two, bit by bit, and on one, up to rounding."""
    folders = []
    for first in ({"ratio": 1.0}, None):
        folders.append(str(tmp_path / ("offloaded" if first else "plain")))
        expected = on_nccl_ranks(2, streamed, save, folders[-1], "fp32", first, 2)
        for second in ({"ratio": 1.0}, {"ratio": 0.5}, None):
            found = on_nccl_ranks(2, streamed, load, folders[-1], "fp32", second)
            assert [losses for losses, _ in found] == expected, (first, second)
    for folder in folders:
        ((losses, _),) = on_nccl_ranks(1, streamed, load, folder, "fp32", {"ratio": 1.0})
        assert losses == pytest.approx(expected[0], rel=1e-4)


def test_full_state_dicts_are_loaded(on_nccl_ranks):
    assert on_nccl_ranks(2, streamed, full_state_dict, "bf16") == [None, None]


def auto(device_memory: float | None) -> tuple[float | None, int]:
    model = sharded_net("fp32", width=512, depth=4)
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), device_memory=device_memory)
    train(model, optimizer, 1)
    return optimizer.ratio, optimizer.host_bytes


def test_auto_offloads_what_does_not_fit(on_nccl_ranks):
    """All ranks agree. With little memory everything is offloaded, and with all of the device nothing."""
    for limit, expected in ((0.001, 1.0), (None, 0.0)):
        found = on_nccl_ranks(2, auto, limit)
        assert [ratio for ratio, _ in found] == [expected] * 2
        assert all((num_bytes > 0) == (expected == 1.0) for _, num_bytes in found)


# -- memory ------------------------------------------------------------------------------------------------------------

CHUNK = 1 << 20


def measure(dtype: str, ratio: float, states: str) -> tuple[int, int, int, int, bool]:
    """Allocated bytes on the device after two steps; bytes of states on the host, on the device; bytes copied up."""
    with mock.patch.object(gpu_stream, "CHUNK_BYTES", CHUNK):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = sharded_net(dtype, width=512, depth=4)
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio, states)
        train(model, optimizer, 2)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() - before
        offloaded = [store for store in optimizer._stores.values() if store.is_offloaded]
        pinned = all(part.is_pinned() for store in offloaded for b in store._buffers.values() for part in b.tensors)
        assert optimizer.bytes_up == optimizer.bytes_down == 2 * optimizer.host_bytes
        return allocated, optimizer.host_bytes, optimizer.device_bytes, sum(s.num_bytes for s in offloaded), pinned


@pytest.mark.parametrize(
    ("dtype", "states", "per_element"), [("fp32", "fp32", 8), ("bf16", "fp32", 12), ("fp32", "int8", 2 + 8 / 256)]
)
def test_device_memory_is_saved_and_host_memory_has_the_documented_bytes(on_nccl_ranks, dtype, states, per_element):
    numels = [p.numel() for p in Net(width=512, depth=4).parameters()]
    large = sum(numel for numel in numels if numel >= module_under_test.MIN_NUMEL)
    on_nccl_ranks(1, measure, dtype, 0.0, states)  # the first products allocate workspaces of the process
    ((allocated, on_host, on_device, counted, pinned),) = on_nccl_ranks(1, measure, dtype, 1.0, states)
    ((without, none, all_on_device, _, _),) = on_nccl_ranks(1, measure, dtype, 0.0, states)
    assert pinned
    assert none == 0
    assert on_host == counted == per_element * large
    assert on_device == all_on_device - on_host
    # torch rounds allocations up to 512 bytes.
    assert allocated <= without - on_host + gpu_stream.IN_FLIGHT * (CHUNK + 4096) + 512 * 4 * len(numels)


def test_parameters_without_states_are_not_streamed(on_nccl_ranks):
    """SGD without momentum has no states of fp32 parameters, until momentum is switched on."""
    assert on_nccl_ranks(1, streamed, momentum_later_equals, 0.0) == [None]


def momentum_later_equals(other: float) -> str | None:
    traces = []
    for ratio in (1.0, other):
        model = sharded_net()
        optimizer = offload(model, OPTIMIZERS["SGD"](model.parameters()), ratio)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["momentum"] = 0.9
        traces.append(train(model, optimizer, 3, seed=1))
    return first_difference(*traces)


def auto_after_load() -> tuple[str | None, int, int]:
    """States that are loaded before the first step are moved to the device by it, with their values."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = sharded_net("fp32", width=512, depth=2)
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=1.0)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    saved["state"] = {i: {key: value.clone() for key, value in v.items()} for i, v in saved["state"].items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, optimizer, 2, seed=1)
    again = sharded_net("fp32", width=512, depth=2)
    again.load_state_dict(weights)
    resumed = offload(again, FUSED["AdamW"](again.parameters()))
    resumed.load_state_dict(saved)
    before = resumed.host_bytes
    return first_difference(train(again, resumed, 2, seed=1), expected), before, resumed.host_bytes


def test_auto_moves_loaded_states(on_nccl_ranks):
    for difference, before, after in on_nccl_ranks(1, auto_after_load):
        assert difference is None
        assert before > after == 0


def with_policy() -> str:
    model = Net(width=64)
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    try:
        offload(model, FUSED["AdamW"](model.parameters()))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_the_policy_of_fsdp2_is_refused(on_nccl_ranks):
    (text,) = on_nccl_ranks(1, with_policy)
    assert "parameter embed.weight is on cpu" in text
    assert "CPUOffloadPolicy is active" in text
