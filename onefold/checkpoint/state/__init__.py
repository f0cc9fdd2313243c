"""The state of this rank in a checkpoint, and unsharded weights gathered from all ranks."""
