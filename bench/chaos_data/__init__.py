"""The data plane's faults between real processes, as a table: `python -m bench.chaos_data`."""
