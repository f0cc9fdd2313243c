"""The record of a run on a GPU: the same numbers, and no wait for the device to have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batches, config, net, precision, start

from onefold.report.run_file import RunFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def without_waiting(call: Callable[[], None]) -> Callable[[], None]:
    """The same, where an operation that makes the host wait for the device is an error."""

    def guarded() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded


def steps_on_the_device(folder: str, clipping: float) -> list[dict[str, Any]]:
    settings = config(2, gradient_clipping=clipping, gradient_accumulation_steps=2, **precision("bf16"))
    engine = start(net(width=256), {**settings, "onefold": {"report": folder}})
    assert engine._reports.steps is not None
    engine._reports.steps.begin_step = without_waiting(engine._reports.steps.begin_step)  # type: ignore[method-assign]
    engine._reports.steps.end_step = without_waiting(engine._reports.steps.end_step)  # type: ignore[method-assign]
    known, losses = [], []
    for x, y in batches(8):
        loss = engine(x, y)
        engine.backward(loss)
        losses.append(loss.detach())
        engine.step()
        if engine.state.window.micro_steps % 2 == 0:
            known.append({"loss": torch.stack(losses).float().mean(), "norm": engine.state.decision.norm_to_read()})
            losses.clear()
    found = [{"loss": step["loss"].item(), "norm": step["norm"].read()} for step in known]
    engine.close()
    return found


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_the_record_has_the_numbers_of_the_device_without_waiting_for_it(nccl, tmp_path, clipping):
    known = nccl.run(steps_on_the_device, str(tmp_path), clipping)[0]
    run = RunFile.read(tmp_path)
    assert [row.step for row in run.steps] == [1, 2, 3, 4]
    assert [row.loss for row in run.steps] == pytest.approx([step["loss"] for step in known], rel=1e-2)
    assert [row.grad_norm for row in run.steps] == [step["norm"] for step in known]
    for row in run.steps:
        memory = row.memory
        assert memory.device_allocated is not None
        assert memory.device_peak is not None
        assert memory.rest == memory.device_allocated - memory.by_tier()["device"]
        assert memory.by_tier()["device"] <= memory.device_allocated <= memory.device_peak
    assert "cuda" in run.facts["versions"]
    assert set(run.report.peaks) == {"device", "host"}
