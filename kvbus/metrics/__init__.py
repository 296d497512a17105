"""Metrics for Prometheus: a table of names, read from counters that exist anyway, and a small server for a worker.

`reading.py` and `table.py` need nothing beside kvbus. prometheus-client is imported by `rendering.py` alone, and that
one only where somebody asked for metrics.
"""
