"""What a worker does: serve its engine, lend as a source, take as a destination, tell the bus. Built by `worker.py`."""
