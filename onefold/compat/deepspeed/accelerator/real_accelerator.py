"""`get_accelerator()`: CUDA where torch sees a device, else the CPU."""

from __future__ import annotations

from functools import cache

import torch

from onefold.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    return True


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    if accel_obj.device_name() != get_accelerator().device_name():
        raise NotImplementedError(
            f"set_accelerator: another device than {get_accelerator().device_name()} is not supported"
        )
