"""Flat parameters in units, and when they are unsharded, resharded and reduced.

[Note: words of the runtime]
* flat parameter (`FlatParam`): parameters of a unit that share dtype and treatment, flattened into one tensor, with
  one shard a rank. Its `full` is the unsharded tensor, its `store` holds this rank's shard between uses, in whatever
  tier that rests, and what the optimizer keeps beside it: the fp32 master and states.
* flat gradient (`FlatGrad`): gradients land in a `slot`, a buffer of the pool; its reduction leaves this rank's sum in
  its `shard`.
* unit (`Unit`): flat parameters that are unsharded, resharded, reduced and stepped together, usually of one block.
* unshard, reshard: all-gather the shards into `full`, and free it again. Unsharded parameters are views of `full`.
* refresh: the all-gather after a step of flat parameters that stay unsharded (stages 1 and 2, persistent ones).
* pass: one forward and its backward. Order (`Order`): which collective comes next, the same on every rank; program:
  the launches of a pass as they were recorded.
* handle (`ParamHandle`): who can unshard a parameter from outside a forward.
"""

from onefold.runtime.build import lay_out
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.hooks import Hooks
from onefold.runtime.in_flight import InFlightCollectives
from onefold.runtime.param_handle import ParamHandle, about_to_write, handle_of, handles_of, unsharded, unsharded_shape
from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Unit

__all__ = [
    "FlatParam",
    "Hooks",
    "InFlightCollectives",
    "ParamHandle",
    "Schedule",
    "Unit",
    "about_to_write",
    "handle_of",
    "handles_of",
    "lay_out",
    "unsharded",
    "unsharded_shape",
]
