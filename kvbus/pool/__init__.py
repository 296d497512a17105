"""Pages in shared memory, the index that finds them again, and the lender that lends them on evidence only."""
