"""Parts of onefold for PyTorch's FSDP2. They need neither an engine nor a config of onefold."""

from onefold.fsdp.collectives import QuantizedAllGather, QuantizedReduceScatter

__all__ = ["QuantizedAllGather", "QuantizedReduceScatter"]
