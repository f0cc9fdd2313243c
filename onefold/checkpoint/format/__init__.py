"""The files of a checkpoint, and how they are checked as they are read."""
