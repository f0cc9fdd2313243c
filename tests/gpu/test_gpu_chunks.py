"""Chunked blocks and the tiled loss on a CUDA device: results, dropout, memory, no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import first_difference, start, weights_of
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.runtime.chunked_call import ChunkedCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, LENGTH, BATCH, VOCABULARY = 256, 128, 16, 4096
CPU = {"device": "cpu"}
TIERS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 states": {"stage": 3, "offload_optimizer": CPU},
    "3 host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.down(F.gelu(self.up(x))), dropout)


class GPT(nn.Module):
    def __init__(self, depth: int = 4, tiled: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tiled = tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        if self.tiled:
            return onefold.tiled_cross_entropy(h, self.head, x, 4)
        return F.cross_entropy(self.head(h).float().flatten(0, 1), x.flatten())


def settings(tier: str, chunks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, "overlap_comm": True, **TIERS[tier]},
        "onefold": {
            "batch_chunks": chunks,
            **({"offloaded_step": "device"} if "offload_optimizer" in TIERS[tier] else {}),
        },
    }


def run(tier: str, chunks: int, **shape: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(3)
    engine = start(GPT(**shape), settings(tier, chunks))
    torch.manual_seed(4)
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(4):
        loss = engine(torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: weight.cpu() for name, weight in weights_of(engine.module).items()}
    engine.destroy()
    return losses, weights


def test_results_are_those_of_the_whole_batch(nccl):
    expected, weights = nccl.run(run, "3", 0)[0]
    for tiled in (False, True):
        losses, others = nccl.run(run, "3 host", 4, tiled=tiled)[0]
        assert losses == pytest.approx(expected, rel=1e-2)
        for name, weight in weights.items():
            apart = (others[name].float() - weight.float()).norm() / weight.float().norm()
            assert apart < 1e-2, (tiled, name)


def test_stages_and_tiers_are_bit_equal_with_the_same_chunks(nccl):
    found = {tier: nccl.run(run, tier, 4)[0] for tier in TIERS}
    for tier in TIERS:
        assert first_difference(list(found[tier]), list(found["0"])) is None, tier


def test_dropout_is_reproducible(nccl):
    first, again = (nccl.run(run, "3", 4, dropout=0.3)[0] for _ in range(2))
    assert first_difference(list(again), list(first)) is None


def masks_agree() -> bool:
    """The gradient of a weight before a dropout shows which elements backward has dropped."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(64, device="cuda"))
    hidden = torch.ones(12, 64, device="cuda")
    torch.manual_seed(1)
    output = ChunkedCall("layer", lambda h: F.dropout(h * weight, 0.5), (hidden,), {}).run(5, [hidden], [weight])
    (found,) = torch.autograd.grad(output.sum(), [weight])
    return torch.equal(found, output.detach().sum(0))


def test_dropout_has_the_same_mask_in_forward_and_backward(nccl):
    assert nccl.run(masks_agree)[0]


def peak_of(chunks: int, tiled: bool) -> int:
    torch.manual_seed(3)
    engine = start(GPT(8, tiled), settings("3 host", chunks))
    x = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.backward(engine(x))
        engine.step()
    engine.wait_for_step()
    peak = torch.cuda.max_memory_allocated() - before
    engine.destroy()
    return peak


def test_memory_is_that_of_one_chunk(nccl):
    whole, chunked, both = (nccl.run(peak_of, *case)[0] for case in ((0, False), (8, False), (8, True)))
    logits = BATCH * LENGTH * VOCABULARY * 4
    boundaries = 8 * BATCH * LENGTH * WIDTH * 2
    assert chunked < whole
    # The logits in bf16 and fp32, their softmax and gradient exist in a quarter of the tokens at a time.
    assert both < chunked - logits
    assert both > boundaries


def waits() -> None:
    torch.manual_seed(3)
    engine = start(GPT(tiled=True), settings("3", 4))
    x = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
    for step in range(3):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(engine(x))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.step()
    engine.destroy()


def test_chunks_do_not_wait_for_the_device(nccl):
    nccl.run(waits)


def trained(chunks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    return run("3", chunks)


def test_on_two_nccl_ranks(on_nccl_ranks):
    whole, chunked = (on_nccl_ranks(2, trained, chunks) for chunks in (0, 4))
    for (expected, _), (found, weights) in zip(whole, chunked, strict=True):
        assert found == pytest.approx(expected, rel=1e-2)
        assert first_difference(weights, chunked[0][1]) is None


def compiled() -> list[float]:
    torch.manual_seed(3)
    engine = start(GPT(), settings("3", 4))
    engine.compile()
    losses = []
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        loss = engine(torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_chunks_of_compiled_units(nccl):
    assert nccl.run(compiled)[0] == pytest.approx(nccl.run(run, "3", 0)[0][0], rel=1e-2)
