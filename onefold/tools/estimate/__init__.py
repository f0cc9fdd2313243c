"""Forecast the memory, traffic and time of a run, from a dry run of its step with the engine itself.

`models` finds the model and `machines` the machine. `dry_run` runs a step on one rank of a fake process group: `trace`
records its memory, `caching_allocator` replays what torch's allocator makes of it. `forecast` adds up the results, and
`advice` recommends a setting. `textbook` has DeepSpeed's table of model states, which needs no dry run.
"""
