"""The programs around the library: commands, forecasts, the built-in trainer, benchmarks of a machine, report pages."""
