"""ZeRO++ and MiCS on a CUDA device: two ranks that share it, over host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batches, config, net, precision, start, weights_of

import onefold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "LoCo": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4}},
    "all": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    "all, offloaded": {
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def run(node_size: int, accumulation: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {}
    for name, keys in SETTINGS.items():
        settings = config(
            3,
            zero_optimization={**keys, "overlap_comm": True, "stage3_max_reuse_distance": 0},
            gradient_accumulation_steps=accumulation,
            gradient_clipping=0.3,
            onefold={"node_size": node_size, "collective": "exchange"},
            **precision("bf16"),
        )
        engine = start(net(width=128, depth=4), settings)
        losses = []
        for x, y in batches(6 * accumulation):
            loss = engine(x.cuda(), y.cuda())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = {key: weight.cpu() for key, weight in weights_of(engine.module).items()}
        for key, parameter in engine.module.named_parameters():
            master = onefold.utils.safe_get_full_fp32_param(parameter)
            assert torch.equal(weights[key], master.bfloat16().cpu()), (name, key)
        found[name] = losses, weights, engine.get_global_grad_norm()
        engine.destroy()
    return found


@pytest.mark.parametrize(("node_size", "accumulation"), [(1, 1), (2, 1), (2, 2)])
def test_wires_on_a_device(staged, node_size, accumulation):
    found = staged.run(run, node_size, accumulation)
    for mine in found:
        exact = mine["stage 3"]
        assert mine["hpZ"][0] == exact[0]
        assert all(torch.equal(mine["hpZ"][1][key], exact[1][key]) for key in exact[1])
        for name, (losses, weights, norm) in mine.items():
            assert losses == pytest.approx(exact[0], rel=2e-2), name
            assert norm == found[0][name][2]
            assert all(torch.equal(weights[key], found[0][name][1][key]) for key in weights), name
