"""Guards of a run: checks of losses and replicas at each step, and rollbacks to the last checkpoint.

All decisions are the same on all ranks, because they are made from values that the ranks have exchanged. `optim` calls
the checks before a step changes any weight, and `engine` loads the checkpoint of a rollback.
"""
