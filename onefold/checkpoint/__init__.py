"""Checkpoints: their files (format), how ranks write them (saving) and read them (loading), DeepSpeed's, and tools."""
