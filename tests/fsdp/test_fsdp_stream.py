"""The states of an FSDP2 model that are streamed through the GPU, run by a CPU with streams that copy as late as they
may (`test_device_pass.py`): results, traffic, and what waits for a step that has not ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from models import Net, Trace, batches, first_difference, more
from test_device_pass import below_a_gpu
from test_fsdp_offload import (
    FUSED,
    OPTIMIZERS,
    empty_shards,
    local,
    sharded_as,
    sharded_net,
    train,
    write_between_steps,
)
from torch import nn

from onefold.fsdp import OffloadedOptimizer, offload, parameter_states
from onefold.fsdp import offloaded_optimizer as module_under_test
from onefold.offload.host_memory import HostShortage, page_aligned
from onefold.optim import gpu_stream


@contextmanager
def streaming(chunk_bytes: int = 1 << 14) -> Iterator[None]:
    """States of parameters of any size are streamed, in small chunks. All other tensors are taken to be on the GPU."""
    on_host: set[int] = set()

    def allocate(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        memory = page_aligned(num_bytes, pinned=pinned)
        on_host.add(memory.untyped_storage().data_ptr())
        return memory

    def is_on_gpu(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in on_host

    with (
        below_a_gpu(),
        mock.patch.object(module_under_test, "MIN_NUMEL", 1),
        mock.patch.object(gpu_stream, "CHUNK_BYTES", chunk_bytes),
        mock.patch.object(gpu_stream, "_is_on_gpu", is_on_gpu),
        mock.patch.object(parameter_states, "page_aligned", allocate),
    ):
        yield


def traces(kind: str, dtype: str, how: dict[str, Any], **training: Any) -> list[Trace]:
    """Runs with streamed states, and with states on the device."""
    found = []
    for ratio in (1.0, 0.0):
        with streaming():
            model = sharded_net(dtype, width=64)
            optimizer = offload(model, OPTIMIZERS[kind](model.parameters()), ratio=ratio, **how)
            found.append(train(model, optimizer, **training))
            optimizer.synchronize()
            found[-1].weights = local(model)
            assert (optimizer.bytes_up > 0) == (optimizer.host_bytes > 0) == (ratio == 1.0)
    return found


def compare(kind: str, dtype: str, how: dict[str, Any], **training: Any) -> str | None:
    return first_difference(*traces(kind, dtype, how, **training))


@pytest.mark.parametrize(
    ("kind", "dtype", "states"),
    [("AdamW", "fp32", "fp32"), more("AdamW", "bf16", "fp32"), more("momentum", "bf16", "fp32"),
     more("AMSGrad", "fp32", "int8"), ("AdamW", "bf16", "int8")],
)  # fmt: skip
@pytest.mark.parametrize("non_blocking", [True, more(False)])
def test_streamed_states_are_bit_equal_to_states_on_the_device(on_ranks, kind, dtype, states, non_blocking):
    how = {"states": states, "non_blocking": non_blocking}
    assert on_ranks(2, compare, kind, dtype, how, accumulation=2, clip=0.05) == [None, None]


def streamed_writes() -> list[str | None]:
    with streaming():
        return write_between_steps("bf16")


def test_in_place_writes_to_parameters_are_kept(on_ranks):
    assert on_ranks(2, streamed_writes) == [[], []]


def streamed_small_shards() -> tuple[list[int], str | None]:
    with streaming():
        return empty_shards()


def test_shards_smaller_than_a_block_are_streamed(on_ranks):
    assert on_ranks(2, streamed_small_shards) == [([3] * 4, None)] * 2


def ratios() -> list[tuple[int, int, str | None]]:
    """Bytes on the host and the device by ratio, and what differs from the first."""
    found, first = [], None
    for ratio in (1.0, 0.5, 0.0):
        with streaming():
            model = sharded_net(width=64)
            optimizer = offload(model, FUSED["AdamW"](model.parameters()), ratio=ratio)
            trace = train(model, optimizer, 3)
            first = first or trace
            found.append((optimizer.host_bytes, optimizer.device_bytes, first_difference(trace, first)))
    return found


def test_the_ratio_moves_bytes_and_no_bit(on_ranks):
    numels = [p.numel() for p in Net(width=64).parameters()]
    by_rank = on_ranks(2, ratios)
    assert {problem for of_rank in by_rank for *_, problem in of_rank} == {None}
    totals = [[sum(rank[number][where] for rank in by_rank) for where in (0, 1)] for number in range(3)]
    total = 8 * sum(numels)
    assert totals[0] == [total, 0]
    assert totals[2] == [0, total]
    assert sum(totals[1]) == total
    assert total / 2 <= totals[1][0] < total / 2 + 8 * max(numels)


def traffic(dtype: str, states: str) -> tuple[int, int, int]:
    with streaming():
        model = sharded_net(dtype, width=64)
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, states)
        train(model, optimizer, 2)
        return optimizer.bytes_up, optimizer.bytes_down, optimizer.host_bytes


@pytest.mark.parametrize(("dtype", "states"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "int8")])
def test_each_state_crosses_the_bus_once_in_each_direction(on_ranks, dtype, states):
    """Gradients and fp32 parameters, which are on the device, do not."""
    for up, down, host_bytes in on_ranks(2, traffic, dtype, states):
        assert up == down == 2 * host_bytes > 0


# -- non-blocking steps ------------------------------------------------------------------------------------------------


class HeldBack:
    """Keeps the thread of a non-blocking step waiting until something waits for it, and records what that waits for."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._gate, self.waited = threading.Event(), list[list[str]]()
        self._thread, wait = optimizer._thread, optimizer._wait_for

        def waiting(stores: Any) -> None:
            stores = list(stores)
            self.waited.append([store.name for store in stores])
            if stores:
                self._gate.set()
            wait(stores)

        optimizer._wait_for = waiting

    def step(self, optimizer: OffloadedOptimizer) -> None:
        optimizer.synchronize()
        self._gate.clear()
        assert self._thread is not None
        self._thread.submit(self._gate.wait)
        optimizer.step()


def one_backward(model: nn.Module) -> float:
    x, y = batches(1)[0]
    loss = model(x, y)
    loss.backward()
    return loss.item()


def forwards_wait(prefetch: bool) -> tuple[bool, str | None, list[list[str]]]:
    """Whether parameters are old after a step, what differs after a forward, and what its hooks waited for."""
    reference = sharded_net()
    plain = FUSED["AdamW"](reference.parameters())
    with streaming():
        model = sharded_net()
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, non_blocking=True)
        if prefetch:
            model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        held, before = HeldBack(optimizer), local(model)
        losses = []
        one_backward(model)
        held.step(optimizer)
        is_old = first_difference(local(model), before) is None
        held.waited.clear()
        losses.append(one_backward(model))
        waited = held.waited
    one_backward(reference)
    plain.step()
    plain.zero_grad()
    return is_old, first_difference(losses, [one_backward(reference)]), waited


@pytest.mark.parametrize("prefetch", [False, True])
def test_forwards_wait_for_their_parameters(on_ranks, prefetch):
    """The root's hook waits before FSDP2's hook all-gathers, also for what that prefetches."""
    for is_old, difference, waited in on_ranks(2, forwards_wait, prefetch):
        assert is_old, "the step returned before its end"
        assert difference is None
        modules = [names[0].split(".")[1] if names[0].startswith("blocks") else "root" for names in waited]
        assert modules == ["root", *(["0", "1"] if prefetch else []), "0", "1", "2"]
        assert waited[0] == ["embed.weight", "head.weight"]


def grouped_wait() -> list[list[str]]:
    """What the hooks of modules wait for that one call of `fully_shard` has grouped."""
    with streaming():
        model = sharded_as("grouped modules")
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, non_blocking=True)
        held = HeldBack(optimizer)
        one_backward(model)
        held.step(optimizer)
        held.waited.clear()
        one_backward(model)
        return held.waited


def test_grouped_modules_wait_for_each_other(on_ranks):
    """FSDP2 all-gathers all of them before the forward of the first."""
    for waited in on_ranks(2, grouped_wait):
        modules = [names[0].split(".")[1] if names[0].startswith("blocks") else "root" for names in waited]
        assert modules == ["root", "0", "1", "0", "1", "2"]


def changed_rate() -> str | None:
    """A rate in a tensor that a scheduler changes in place while the step is held back."""
    weights = []
    for non_blocking in (True, False):
        with streaming():
            model = sharded_net()
            rate = torch.tensor(1e-2)
            plain = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
            optimizer = offload(model, plain, 1.0, non_blocking=non_blocking)
            one_backward(model)
            if non_blocking:
                HeldBack(optimizer).step(optimizer)
            else:
                optimizer.step()
            optimizer.param_groups[0]["lr"].fill_(5.0)
            optimizer.synchronize()
            weights.append(local(model))
    return first_difference(*weights)


def test_a_step_uses_the_rates_of_its_start(on_ranks):
    assert on_ranks(2, changed_rate) == [None, None]


def others_wait() -> list[bool]:
    """State dicts, in-place zeroing, and a step that follows at once."""
    found = []
    with streaming():
        for use in (
            lambda model, optimizer: model.state_dict(),
            lambda model, optimizer: optimizer.state_dict(),
            lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
            lambda model, optimizer: optimizer.step(),
        ):
            model = sharded_net()
            optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, non_blocking=True)
            held = HeldBack(optimizer)
            one_backward(model)
            held.step(optimizer)
            held.waited.clear()
            use(model, optimizer)
            found.append(sum(map(len, held.waited)) >= len(list(model.parameters())))
            optimizer.synchronize()
    return found


def test_readers_of_states_wait_for_a_step(on_ranks):
    assert on_ranks(2, others_wait) == [[True] * 4] * 2


def fail(non_blocking: bool) -> list[str]:
    """Errors after a step that failed: of everything that waits for a background step, and of later steps."""
    found = []
    with streaming():
        model = sharded_net()
        optimizer = offload(model, FUSED["AdamW"](model.parameters()), 1.0, non_blocking=non_blocking)
        one_backward(model)
        with mock.patch.object(gpu_stream.GpuStream, "_launch", side_effect=OSError("the bus is broken")):
            for call in (optimizer.step, optimizer.synchronize, optimizer.step, lambda: one_backward(model)):
                try:
                    call()
                except (OSError, RuntimeError) as error:
                    found.append(str(error))
    return found


def test_an_error_of_a_step_is_not_lost(on_ranks):
    assert on_ranks(1, fail, True) == [["the bus is broken"] * 3]
    ((first, second),) = on_ranks(1, fail, False)
    assert first == "the bus is broken"
    assert "an earlier step failed (OSError: the bus is broken), so only some parameters are updated" in second


def too_large() -> str:
    """Only rank 1 sees too little memory. Both ranks raise, and nothing is allocated."""
    model = sharded_net()
    free = 1 << (10 if torch.distributed.get_rank() else 40)
    with mock.patch.object(module_under_test, "available_bytes", return_value=free):
        try:
            offload(model, FUSED["AdamW"](model.parameters()), 1.0)
        except HostShortage as error:
            return str(error)
    return "accepted"


def test_all_ranks_raise_if_one_node_has_too_little_memory(on_ranks):
    for text in on_ranks(2, too_large):
        assert "GB of host memory on each of 2 ranks, but a node has less" in text


def test_a_non_blocking_step_needs_no_thread_on_a_cpu(on_ranks):
    assert on_ranks(2, without_device) == [True, True]


def without_device() -> bool:
    model = sharded_net()
    optimizer = offload(model, FUSED["AdamW"](model.parameters()), non_blocking=True)
    train(model, optimizer, 1)
    torch.distributed.barrier()
    return optimizer._thread is None
