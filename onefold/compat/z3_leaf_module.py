"""The module `deepspeed.utils.z3_leaf_module`, which can be called as the function of the same name.

Once this module is imported, the attribute `z3_leaf_module` of `deepspeed.utils` is the module and no longer the
function.
"""

import sys
from types import ModuleType

from torch import nn

from onefold import utils


class _CallableModule(ModuleType):
    def __call__(self, model: nn.Module) -> bool:
        return utils.z3_leaf_module(model)


sys.modules[__name__].__class__ = _CallableModule
