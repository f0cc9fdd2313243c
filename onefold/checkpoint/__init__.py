"""Checkpoints: the file format, saving, loading, import from DeepSpeed, and tools."""
