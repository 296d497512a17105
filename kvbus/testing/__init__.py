"""Shipped parts for tests and simulations: they keep the promises of the real ones inside one process."""
