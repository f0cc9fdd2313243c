"""Between two hosts: what the kernel counts on the cable is what the ledger says, and ZeRO++ sends a part of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks lie beside the package, and are not installed

from benchmarks.model import ModelShape
from benchmarks.network import UNSHAPED, NoNetwork, Rate, run
from benchmarks.systems import Workload

pytestmark = pytest.mark.program

# 14M parameters: large enough that headers and meetings are small beside them.
SHAPE = ModelShape(num_layers=4, width=512, num_heads=4, vocabulary=1024, max_sequence=64)
WORKLOAD = Workload(preset="tiny", dtype="bf16", batch=1, sequence=16, num_steps=3, num_warmup_steps=2, device="cpu")


@pytest.mark.slow
def test_the_kernel_counts_what_the_ledger_says():
    try:
        names = ["stage-3", "all-three", "stage-3-flat"]
        plain, coded, flat = run(names, WORKLOAD, Rate(UNSHAPED), timeout=240, shape=SHAPE)
    except NoNetwork as reason:
        pytest.skip(str(reason))
    for found in (plain, coded, flat):
        assert found.error is None, found.error
        for host in found.hosts:
            assert host.left == pytest.approx(host.left_by_ledger, rel=0.03)
            assert host.stayed == pytest.approx(host.stayed_by_ledger, rel=0.03)
    assert coded.mean("left") < 0.25 * plain.mean("left")
    # Gathers cross half as often as between all ranks; a sum of two in fp32 is as wide as two gradients in bf16.
    assert plain.mean("left") == pytest.approx(2 / 3 * flat.mean("left"), rel=0.03)
    assert plain.losses == flat.losses
    assert coded.losses == pytest.approx(plain.losses, rel=2e-2)


@pytest.mark.slow
def test_chunks_send_what_one_micro_step_sends():
    workload = dataclasses.replace(WORKLOAD, batch=4)
    try:
        names = ["stage-3", "chunks", "micro-steps"]
        whole, chunks, accumulated = run(names, workload, Rate(UNSHAPED), timeout=240, shape=SHAPE, num_ranks=1)
    except NoNetwork as reason:
        pytest.skip(str(reason))
    for found in (whole, chunks, accumulated):
        assert found.error is None, found.error
        for host in found.hosts:  # with headers; a busy machine sends smaller packets
            assert host.left == pytest.approx(host.left_by_ledger, rel=0.03)
    assert [host.left_by_ledger for host in chunks.hosts] == [host.left_by_ledger for host in whole.hosts]
    # Each of two ranks sends its half of the parameters twice, and the other's half of the gradients once, as bf16.
    per_pass = 3 * whole.num_parameters / 2 * 2
    assert chunks.mean("left_by_ledger") == pytest.approx(per_pass, rel=0.01)
    assert accumulated.mean("left_by_ledger") == pytest.approx(4 * per_pass, rel=0.01)
    assert chunks.losses == pytest.approx(whole.losses, rel=2e-2)
