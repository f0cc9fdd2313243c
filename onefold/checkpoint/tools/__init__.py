"""What is done with a checkpoint outside of training: weights out of it, facts about it."""
