"""Checkpoints on the host and MLPs in tiles on a CUDA device: results, memory, copies beside the computation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models import start, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from onefold import checkpointing
from onefold.checkpointing import Settings
from onefold.offload import activation_offload
from onefold.offload.bus import Bus, CopyEvent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, TOKENS, DEPTH = 1024, 16384, 8
INPUT = TOKENS * WIDTH * 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.gelu(self.up_proj(h)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(WIDTH), Mlp(), nn.Dropout(0.1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.dropout(self.mlp(self.norm(h)))


class Stack(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.reentrant = reentrant

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h.float().square().mean()


def trained(stage: int, on_host: bool, tiles: int, reentrant: bool) -> tuple[list[float], dict[str, Any], int, int]:
    """Losses, weights, the bytes that the last forward leaves for its backward, and the peak of both."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"cpu_checkpointing": on_host},
        "onefold": {"tiled_mlp": tiles},
    }
    engine = start(Stack(reentrant), config)
    generator = torch.Generator(device="cuda").manual_seed(1)
    losses, left, peak = [], 0, 0
    for _ in range(3):
        gc.collect()
        x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = engine(x)
        losses.append(loss.item())
        left = torch.cuda.memory_allocated() - before
        engine.backward(loss)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        engine.step()
    weights = {name: tensor.cpu() for name, tensor in weights_of(engine.module).items()}
    engine.close()
    assert not activation_offload._blocks
    checkpointing._settings, checkpointing._configured_by = Settings(), "nobody"
    return losses, weights, left, peak


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_on_the_host_have_the_same_bits_and_free_their_memory(nccl, stage, reentrant):
    plain, host = (nccl.run(trained, stage, on_host, 0, reentrant)[0] for on_host in (False, True))
    assert host[0] == plain[0]
    assert all(torch.equal(tensor, host[1][name]) for name, tensor in plain[1].items())
    # All inputs but the one in use and the next one.
    assert plain[2] - host[2] > (DEPTH - 4) * INPUT


def test_tiles_of_mlps_free_their_hidden_layers(nccl):
    plain, tiled = (nccl.run(trained, 3, True, tiles, False)[0] for tiles in (0, 8))
    assert tiled[0] == pytest.approx(plain[0], rel=1e-2)
    # The hidden layer before and after its activation, of which an eighth remains.
    assert plain[3] - tiled[3] > 4 * INPUT


def copies_and_recomputations() -> tuple[int, list[float]]:
    """The number of copies to the device, and the milliseconds from each to the recomputation that needs it."""
    copies: list[torch.cuda.Event] = []
    begins: list[torch.cuda.Event] = []
    up = Bus.up

    def event(stream: Any = None) -> torch.cuda.Event:
        found = torch.cuda.Event(enable_timing=True)
        found.record(stream or torch.cuda.current_stream())
        return found

    def timed_up(bus: Bus, source: torch.Tensor, target: torch.Tensor, after: Any = None) -> CopyEvent:
        arrived = up(bus, source, target, after)
        copies.append(event(bus._streams["up"]))
        return arrived

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    engine = start(model := Stack(False), config)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    engine.backward(engine(x))
    engine.step()
    loss = engine(x)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: begins.append(event()))
    Bus.up = timed_up  # type: ignore[method-assign]
    try:
        engine.backward(loss)
    finally:
        Bus.up = up  # type: ignore[method-assign]
    begins.append(event())
    torch.cuda.synchronize()
    engine.close()
    checkpointing._settings, checkpointing._configured_by = Settings(), "nobody"
    pairs = zip(copies[1:], begins[1:], strict=False)
    return len(copies), [arrived.elapsed_time(begun) for arrived, begun in pairs]


def test_the_input_of_a_block_has_arrived_when_its_recomputation_begins(nccl):
    """Check by events that copies overlap the recomputation and backward of the block after."""
    ((number, early),) = nccl.run(copies_and_recomputations)
    assert number == DEPTH
    assert all(milliseconds > 0 for milliseconds in early)
