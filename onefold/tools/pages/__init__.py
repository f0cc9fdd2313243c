"""Charts and the report page of a run, from its record."""
