"""The stories of compose/, run on real containers: `python -m tests.cluster`."""
