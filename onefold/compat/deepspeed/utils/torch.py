"""Questions about the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    assert min_version or max_version, "give min_version, max_version or both"
    installed = Version(torch.__version__)
    return not (min_version and Version(str(min_version)) > installed) and not (
        max_version and Version(str(max_version)) < installed
    )


def register_grad_hook(param: Any, hook: Callable[..., Any]) -> Any:
    """Call `hook(param)` whenever a gradient has been added to `param.grad`."""
    return param.register_post_accumulate_grad_hook(hook)
