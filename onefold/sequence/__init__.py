"""Sequence parallelism: neighbouring ranks compute parts of the same sequences, and attention exchanges their heads."""

from onefold.sequence.parallel import SequenceParallel, make_sequence_parallel
from onefold.sequence.sequence_loader import SequenceLoader
from onefold.sequence.sequence_ranks import SequenceRanks

__all__ = ["SequenceLoader", "SequenceParallel", "SequenceRanks", "make_sequence_parallel"]
