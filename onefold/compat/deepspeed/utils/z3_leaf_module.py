"""Modules that are never cut into smaller units.

This module and a function in it have one name: once it is imported, `deepspeed.utils.z3_leaf_module` is the module.
It can be called as the function.
"""

import sys
from types import ModuleType

from torch import nn

from onefold.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_module,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_module", "unset_z3_leaf_modules", "z3_leaf_module",
    "z3_leaf_parameter",
]  # fmt: skip


class _AsTheFunction(ModuleType):
    def __call__(self, model: nn.Module) -> bool:
        return z3_leaf_module(model)


sys.modules[__name__].__class__ = _AsTheFunction
