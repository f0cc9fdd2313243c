"""What is drawn of a run, from its record."""
