"""Tools for checkpoints outside of training: export of weights, listing and verification."""
