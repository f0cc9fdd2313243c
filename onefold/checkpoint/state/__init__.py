"""The part of a job's state that this rank holds, and whole weights gathered from all ranks."""
