"""Measurements of this machine: memory tiers, the links between ranks."""
