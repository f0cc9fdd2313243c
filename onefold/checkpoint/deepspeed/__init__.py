"""DeepSpeed's checkpoints, read without running anything in them, and converted."""
