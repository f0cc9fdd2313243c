"""Weights and training states on disk."""
