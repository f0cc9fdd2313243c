"""`OnDevice`: build a model on a device, in a dtype."""

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    """Tensors made inside lie on `device` ("meta" included), floating-point ones in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)
