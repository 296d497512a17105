"""A simulator: whole instances, with the real roles, ledger and pool, in a world whose every turn a seed decides."""
