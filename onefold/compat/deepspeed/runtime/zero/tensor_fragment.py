"""Masters, gradients and optimizer states of one parameter; the same as `deepspeed.utils.tensor_fragment`."""

from onefold.compat.deepspeed.utils import tensor_fragment as _there
from onefold.compat.deepspeed.utils.tensor_fragment import __all__ as _names
from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(__name__, same(_there.__name__, *_names))
