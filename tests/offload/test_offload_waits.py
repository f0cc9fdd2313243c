"""What comes late from a bus or a disk is waited for. On a CPU copies are done at once, so here they are held back."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import covering
from models import config, first_difference, more, net, precision, start, train

from onefold.offload.bus import Bus, CopyEvent

CPU = {"device": "cpu"}


class HeldBack(CopyEvent):
    """A copy that is made only when the host waits for it; what is there until then is not a number."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__()
        self._source, self._target, self._arrived = source.clone(), target, False
        target.fill_(torch.nan)

    def synchronize(self) -> None:
        if not self._arrived:
            self._arrived = True
            self._target.copy_(self._source)


@contextmanager
def late_copies_down() -> Iterator[list[HeldBack]]:
    held: list[HeldBack] = []
    plain = Bus.down

    def down(self: Bus, source: torch.Tensor, target: torch.Tensor, *, add: bool = False) -> CopyEvent:
        assert not add, "this is for windows of one micro-step"
        self.count("down", source.nbytes)
        held.append(HeldBack(source, target))
        return held[-1]

    Bus.down = down  # type: ignore[method-assign]
    try:
        yield held
    finally:
        Bus.down = plain  # type: ignore[method-assign]


def beside_late_copies(stage: int, delayed: bool) -> tuple[str | None, int]:
    """The first difference to a run whose gradients come down at once, and how many were held back."""
    keys = {"offload_optimizer": CPU, **({"offload_param": CPU} if stage == 3 else {})}
    settings = config(
        stage,
        zero_optimization=keys,
        gradient_clipping=0.3,
        onefold={"delayed_host_step": delayed},
        **precision("bf16"),
    )
    expected = train(start(net(), settings), 3)
    with late_copies_down() as held:
        got = train(start(net(), settings), 3)
    return first_difference(got, expected), len(held)


@covering(stage=(1, 2, 3), delayed=(False, True), strength=1)
def test_the_host_steps_when_its_gradient_has_come_down(on_ranks, stage, delayed):
    for difference, num_held in on_ranks(2, beside_late_copies, stage, delayed):
        assert num_held > 0
        assert difference is None


@contextmanager
def slow_reads(seconds: float) -> Iterator[list[int]]:
    """Every read of a swap takes a while, so nothing that is read is there by chance when it is used."""
    sizes: list[int] = []
    plain: Callable[..., int] = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        sizes.append(len(buffers[0]))
        time.sleep(seconds)
        return plain(descriptor, buffers, offset)

    os.preadv = preadv  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        os.preadv = plain


def beside_slow_reads(stage: int, keys: dict[str, Any]) -> tuple[str | None, int]:
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
        zero = {"offload_optimizer": {**disk, **keys}, **({"offload_param": disk} if stage == 3 else {})}
        expected = train(start(net(), config(2, **precision("bf16"))), 3)
        engine = start(net(), config(stage, zero_optimization=zero, **precision("bf16")))
        with slow_reads(0.02) as sizes:
            got = train(engine, 3)
        engine.destroy()
    return first_difference(got, expected), len(sizes)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("keys", [{}, more({"buffer_count": 1, "buffer_size": 2048, "pipeline_read": False})])
def test_a_window_of_states_is_stepped_when_it_has_been_read(on_ranks, stage, keys):
    for difference, num_reads in on_ranks(1, beside_slow_reads, stage, keys):
        assert num_reads > 0
        assert difference is None
