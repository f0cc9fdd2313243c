"""Between two hosts: what the kernel counts on the cable is what the ledger says, and ZeRO++ sends a part of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks lie beside the package, and are not installed

from benchmarks.model import ModelShape
from benchmarks.network import UNSHAPED, NoNetwork, Rate, run
from benchmarks.systems import Workload

# 1.9M parameters: large enough that headers and meetings are small beside them.
SHAPE = ModelShape(num_layers=2, width=256, num_heads=4, vocabulary=512, max_sequence=64)
WORKLOAD = Workload(preset="tiny", dtype="bf16", batch=1, sequence=16, num_steps=3, num_warmup_steps=2, device="cpu")


@pytest.mark.slow
def test_the_kernel_counts_what_the_ledger_says():
    try:
        plain, coded = run(["stage-3", "all-three"], WORKLOAD, Rate(UNSHAPED), timeout=120, shape=SHAPE)
    except NoNetwork as reason:
        pytest.skip(str(reason))
    for found in (plain, coded):
        assert found.error is None, found.error
        for host in found.hosts:
            assert host.left == pytest.approx(host.left_by_ledger, rel=0.05)
            assert host.stayed == pytest.approx(host.stayed_by_ledger, rel=0.05)
    assert coded.mean("left") < 0.35 * plain.mean("left")
    assert coded.losses == pytest.approx(plain.losses, rel=2e-2)
