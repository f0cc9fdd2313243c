"""Parts of onefold for PyTorch's FSDP2: offloaded optimizer states and quantized collectives.

They need neither an engine nor a config of onefold.

    optimizer = onefold.fsdp.offload(model, optimizer)
    module.set_custom_all_gather(onefold.fsdp.QuantizedAllGather())
"""

from onefold.fsdp.collectives import QuantizedAllGather, QuantizedReduceScatter
from onefold.fsdp.offloaded_optimizer import OffloadedOptimizer
from onefold.fsdp.offloading import offload

__all__ = ["OffloadedOptimizer", "QuantizedAllGather", "QuantizedReduceScatter", "offload"]
