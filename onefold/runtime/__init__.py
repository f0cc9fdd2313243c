"""Flat parameters in units, and when they are unsharded, resharded and reduced.

[Note: terms of the runtime]
* flat parameter (`FlatParam`): parameters of a unit with the same dtype and treatment, flattened into one tensor with
  one shard per rank. `full` is the unsharded tensor. `store` has this rank's shard, in any tier, the fp32 master and
  the optimizer states.
* flat gradient (`FlatGrad`): gradients are accumulated in a `slot`, a buffer of the pool. Its reduction leaves this
  rank's part of the sum in `shard`.
* unit (`Unit`): flat parameters that are unsharded, resharded, reduced and stepped together, usually of one block.
* unshard, reshard: all-gather the shards into `full`, and free it. Unsharded parameters are views of `full`.
* update: the all-gather after a step of flat parameters that stay unsharded (stages 1 and 2, persistent ones).
* pass: one forward and its backward. `Order` keeps the order of collectives the same on every rank. The program is the
  recorded order of the launches of a pass.
* proxy (`parameter_proxy`): the class of a Parameter whose values are in a flat parameter. Handle (`ParamHandle`): how
  code outside of a forward unshards, reads and writes such a Parameter.
"""

from onefold.runtime.build import lay_out
from onefold.runtime.expert_parts import ExpertOf
from onefold.runtime.flat_param import FlatParam
from onefold.runtime.hooks import Hooks
from onefold.runtime.in_flight import InFlightCollectives
from onefold.runtime.param_handle import ParamHandle, about_to_write, handle_of, handles_of, unsharded, unsharded_shape
from onefold.runtime.schedule import Schedule
from onefold.runtime.unit import Unit

__all__ = [
    "ExpertOf",
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
