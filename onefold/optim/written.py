"""Writes to parameters from outside: `p.clamp_()`, `p.data.mul_()` and their kin reach the master.

[Note: a write that no counter shows]
Where a master of its own stands behind an unsharded parameter, the parameter is the master's rounding from one step to
the next, unless somebody has written to it; and writes through `.data` change no version counter. So the step compares:
an element that is not its master's rounding has been written, and becomes the master's value. That reads two bytes a
parameter beside the four that the update reads anyway. Where the master is on the host and the parameter on a GPU they
cannot be compared; a fingerprint of the parameter is taken when it arrives and again at the next step instead.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from onefold.log import logger
from onefold.offload.shard_store import as_integers


class WriteCheck:
    """Compares masters with what computes, a range at a time. One thread uses it at a time."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None

    def take_over(self, master: torch.Tensor, used: torch.Tensor) -> None:
        """Elements of `used` that are not the master's rounding become the master's."""
        if master.is_cuda and (kernels := _kernels()):
            kernels.take_over(master, used)
            return
        rounded = self._rounded(master, used.dtype)
        if master.is_cuda or not torch.equal(as_integers(rounded), as_integers(used)):
            master.copy_(torch.where(rounded == used, master, used.to(master.dtype)))

    def _rounded(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if master.dtype == dtype:
            return master
        fits = self._scratch is not None and self._scratch.dtype == dtype and self._scratch.device == master.device
        if self._scratch is None or not fits or self._scratch.numel() < master.numel():
            self._scratch = torch.empty(master.numel(), dtype=dtype, device=master.device)
        return self._scratch[: master.numel()].copy_(master)


@cache
def _kernels() -> ModuleType | None:
    """The Triton kernel, once it has been seen to build and to run."""
    try:
        from onefold.optim import write_kernels

        write_kernels.try_out()
    except Exception as error:  # whatever a compiler may raise
        logger.warning(
            "the check for written parameters: Triton's kernel cannot be used (%s: %s); torch compares, in more "
            "passes over memory (onefold.honour_writes false turns the check off)",
            type(error).__name__,
            error,
        )
        return None
    return write_kernels
