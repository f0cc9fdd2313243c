"""Saving: rank 0 sends a request, every rank writes its shard, and rank 0 publishes the checkpoint."""
