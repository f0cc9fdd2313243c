"""Divided experts on NCCL ranks: the training of plain torch on the same GPU."""

from __future__ import annotations

import pytest
import torch
from expert_cases import train_beside_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "other on each rank"])
def test_models_train_as_in_plain_torch(on_nccl_ranks, world, size, kind, stage):
    found = on_nccl_ranks(world, train_beside_torch, kind, size, stage, {}, {"gradient_clipping": 0.5})
    assert found[0]["divided"]


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_accumulation_steps": 2},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        {"onefold": {"collective": "native"}},
    ],
)
def test_features_train_with_divided_experts(on_nccl_ranks, keys):
    assert on_nccl_ranks(2, train_beside_torch, "all to one", 2, 3, {}, keys)[0]["divided"]
