"""CUDA graphs of blocks: forward and backward of each block, captured once and replayed with one launch each."""

from onefold.graphs.captured_blocks import CapturableBlock, CapturedBlocks, FlatWeights
from onefold.graphs.captured_call import Gradients

__all__ = ["CapturableBlock", "CapturedBlocks", "FlatWeights", "Gradients"]
