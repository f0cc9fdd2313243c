"""The sharded optimizer step, the loss scale and the learning-rate schedules."""
