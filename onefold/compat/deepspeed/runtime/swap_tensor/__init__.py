"""Tensors in files, as DeepSpeed names their sizes."""

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Smaller tensors stay in memory with DeepSpeed. onefold writes flat parameters, whatever their size."""
