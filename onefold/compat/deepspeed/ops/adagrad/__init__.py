"""Adagrad under DeepSpeed's name."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(__name__, same("onefold.compat.deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad"))
