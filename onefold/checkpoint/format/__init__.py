"""The files of a checkpoint, with checks of everything that is read."""
