"""NIXL as an end of the benchmark: READ over descriptor lists that are prepared once, as inference engines use it.

A transfer is what an engine does for each request: make the transfer from index arrays, post it, look until it is
complete, release it.
"""

import base64
import select

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from peer import Mapped, run

SPINS = 50
"""Looks without a pause; then the other end's thread must get a core."""
PAUSE_S = 50e-6


class NixlEnd:
    """One agent with one pool, with NIXL's own defaults."""

    def __init__(self, role: str) -> None:
        self.agent = nixl_agent(role, nixl_agent_config())

    def open(self, pool: Mapped) -> dict[str, object]:
        """Register the pool."""
        self.pool = pool
        self.registered = self.agent.register_memory(np.array([[pool.address, pool.length_bytes, 0]]), "DRAM")
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": pool.address}

    def meet(self, told: dict[str, object]) -> None:
        """Take the other agent's metadata."""
        name = self.agent.add_remote_agent(base64.b64decode(str(told["metadata"])))
        self.remote = name if isinstance(name, str) else name.decode()
        self.remote_address = int(str(told["address"]))

    def prepare(self, length_bytes: int, local: list[int], remote: list[int]) -> None:
        """Prepare the lists of both sides."""
        mine = [(self.pool.address + offset, length_bytes, 0) for offset in local]
        theirs = [(self.remote_address + offset, length_bytes, 0) for offset in remote]
        self.local_list = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", np.array(mine, dtype=np.uint64), "DRAM")
        self.remote_list = self.agent.prep_xfer_dlist(self.remote, np.array(theirs, dtype=np.uint64), "DRAM")
        self.indexes = np.arange(len(local), dtype=np.int32)

    def move(self) -> None:
        """Make, post and await one READ."""
        agent = self.agent
        transfer = agent.make_prepped_xfer("READ", self.local_list, self.indexes, self.remote_list, self.indexes)
        state, spins = agent.transfer(transfer), 0
        while state == "PROC":
            spins += 1
            if spins > SPINS:
                select.select((), (), (), PAUSE_S)
            state = agent.check_xfer_state(transfer)
        agent.release_xfer_handle(transfer)
        if state == "ERR":
            raise RuntimeError("NIXL ended the transfer with an error")


if __name__ == "__main__":
    run(NixlEnd)
