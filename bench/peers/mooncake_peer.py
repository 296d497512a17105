"""Mooncake's transfer engine as an end of the benchmark: batches of reads over TCP."""

from mooncake.engine import TransferEngine
from peer import Mapped, run

HOST = "127.0.0.1"
BATCH = 128
"""Reads in one call, as in its own benchmark; thousands in one call were answered with broken connections."""


class MooncakeEnd:
    """One engine with one pool."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.engine = TransferEngine()
        if self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine did not start")

    def open(self, pool: Mapped) -> dict[str, object]:
        """Register the pool."""
        self.pool = pool
        if self.engine.register_memory(pool.address, pool.length_bytes):
            raise RuntimeError("Mooncake did not take the memory")
        return {"peer": f"{HOST}:{self.engine.get_rpc_port()}", "address": pool.address}

    def meet(self, told: dict[str, object]) -> None:
        """Note where the other end is."""
        self.peer, self.remote_address = str(told["peer"]), int(str(told["address"]))

    def prepare(self, length_bytes: int, local: list[int], remote: list[int]) -> None:
        """Cut the pages into batches."""
        mine = [self.pool.address + offset for offset in local]
        theirs = [self.remote_address + offset for offset in remote]
        self.batches = [
            (mine[at : at + BATCH], theirs[at : at + BATCH], [length_bytes] * len(mine[at : at + BATCH]))
            for at in range(0, len(mine), BATCH)
        ]

    def move(self) -> None:
        """Read all batches."""
        for mine, theirs, lengths in self.batches:
            if self.engine.batch_transfer_sync_read(self.peer, mine, theirs, lengths) < 0:
                raise RuntimeError("Mooncake did not move a batch")


if __name__ == "__main__":
    run(MooncakeEnd)
