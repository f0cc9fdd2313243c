"""What a run will hold, send and take, before it: by rehearsing its step with the engine itself.

`models` finds the model, `machines` the machine, `rehearsal` takes one imagined rank through a step (`trace` follows
its memory, `caching_allocator` what the device makes of it), `forecast` puts it together and `advice` chooses.
"""
