"""Small shards are stepped together: fewer kernels, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Net, config, first_difference, start, train

from onefold.optim import pipeline


def stepped(tile: int, optimizer: dict[str, Any], options: dict[str, Any]) -> tuple[Any, int]:
    """Train with tiles of a size, and count the calls of fused kernels."""
    calls = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(pipeline.TILE, "cpu", tile)
        for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_"):
            original = getattr(torch, name)

            def counted(*args: Any, kernel: Any = original, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return kernel(*args, **kwargs)

            patched.setattr(torch, name, counted)
        torch.manual_seed(0)
        engine = start(Net(), config(2, optimizer=optimizer, **options))
        found = train(engine, 4)
        engine.destroy()
    return found, calls


def compare(optimizer: dict[str, Any], options: dict[str, Any]) -> str | None:
    together, few = stepped(1 << 20, optimizer, options)
    alone, many = stepped(1 << 8, optimizer, options)
    if optimizer["type"].startswith("Adam"):
        assert 0 < few <= 4, "one for each step that is taken"
        assert many > 5 * few
    return first_difference(together, alone)


@pytest.mark.parametrize("optimizer", [
    {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    {"type": "Adam", "params": {"lr": 0.01, "amsgrad": True}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "Lion", "params": {"lr": 0.01}},
], ids=lambda optimizer: optimizer["type"])  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"bf16": {"enabled": True}, "gradient_clipping": 0.1}, {"fp16": {"enabled": True, "initial_scale_power": 20}},
], ids=str)  # fmt: skip
def test_small_shards_have_the_bits_of_single_ones(on_ranks, optimizer, options):
    assert on_ranks(1, compare, optimizer, options) == [None]
