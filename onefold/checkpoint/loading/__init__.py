"""Checkpoints read into an engine, whatever plan and number of ranks wrote them."""
