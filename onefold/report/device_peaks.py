"""Peaks of GPUs: dense bf16 matrix products per second, from data sheets. No torch."""

from __future__ import annotations

import re

PEAKS: dict[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100-PCIE": 756e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A6000": 155e12,
    "A10G": 70e12,
    "V100": 112e12,  # fp16: it has no bf16
    "V100-SXM2": 125e12,
    "5090": 210e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""FLOP/s with fp32 accumulation and without sparsity, by the names of `onefold plan`."""

# Names that torch reports, in the order in which they are compared.
_NAMES = (
    (r"H100 PCIE", "H100-PCIE"),
    (r"H100( 80GB HBM3)?$", "H100"),
    (r"H200$", "H200"),
    (r"B200$", "B200"),
    (r"A100-(SXM4?|PCIE)-(40|80)GB$", "A100"),
    (r"A100 80GB PCIE$", "A100"),
    (r"L40S$", "L40S"),
    (r"RTX A6000$", "A6000"),
    (r"A10G$", "A10G"),
    (r"V100-SXM2-", "V100-SXM2"),
    (r"V100-PCIE-", "V100"),
    (r"RTX ([345]090)$", ""),
)


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by the name that torch reports.

    Return None if it is unknown, as of a CPU, a MIG slice or a virtual GPU, whose name ends with a profile (-40C).
    """
    name = device_name.upper()
    if " MIG " in name or "GRID" in name or re.search(r"-\d+[ABCQ](ME)?$", name):
        return None
    for pattern, key in _NAMES:
        if found := re.search(rf"\b{pattern}", name):
            return PEAKS[key or found[1]]
    return None
