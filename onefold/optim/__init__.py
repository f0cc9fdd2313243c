"""The sharded optimizer step, the loss scale, the learning-rate schedules."""
