"""Questions about torch's version."""

from __future__ import annotations

import torch


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least and at most of these versions."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version takes min_version, max_version or both")
    found = torch.__version__  # compares as a version
    above = min_version is None or found >= str(min_version)
    return bool(above and (max_version is None or found <= str(max_version)))
