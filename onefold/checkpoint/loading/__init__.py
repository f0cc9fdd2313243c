"""Loading of checkpoints into an engine with any plan and number of ranks."""
