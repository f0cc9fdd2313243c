"""Saving: rank 0 requests, every rank writes its part, rank 0 publishes."""
