"""Random searches over one part each, for what the simulated world does not hold: several ranks, rewritten pages, pids.

Each takes a seed and returns the first thing that was wrong, or None; equal seeds take equal steps.
"""
