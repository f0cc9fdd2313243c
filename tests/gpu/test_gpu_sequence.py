"""Sequence parallelism on NCCL ranks: the training of whole sequences in plain torch on the same GPU."""

from __future__ import annotations

import pytest
import torch
from test_sequence_parallel import LENGTH, MICRO, run, sent_elements

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_with_sdpa_trains_as_with_whole_sequences(on_nccl_ranks, stage, recomputes):
    results = run(on_nccl_ranks, 2, "plain_model", 4, 4, stage=stage, recomputes=recomputes, prompt=3)
    elements = 2 * sent_elements(MICRO, LENGTH // 2, 4, 4, 4, 2)  # of two blocks
    assert {result["bytes"] for result in results} == {elements * 4 * (3 if recomputes else 2)}


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize(("world", "size", "key_heads"), [(2, 2, 2), (4, 4, 2), (4, 2, 1)])
def test_a_transformers_model_trains_as_with_whole_sequences(on_nccl_ranks, kind, world, size, key_heads):
    run(on_nccl_ranks, world, "transformers_model", kind, 4, key_heads, size=size, gradient_clipping=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_samples_and_windows(on_nccl_ranks, packed):
    run(on_nccl_ranks, 2, "transformers_model", "Llama", 4, 2, packed=packed, prompt=LENGTH // 2 + 2)
    run(on_nccl_ranks, 2, "transformers_model", "Mistral", 4, 2, sliding_window=5, packed=packed)
