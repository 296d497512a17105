"""The broker's faults under load, as a table: `python -m bench.chaos_broker`."""
