"""The ledger: who holds which pages, on what evidence they go back. Synchronous, without a clock and without I/O."""
