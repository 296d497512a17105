"""Deaths of real processes of this host: a pid may come to mean another process, which no simulated one does."""

import asyncio
import random
import subprocess
import sys
import threading

from kvbus.processes import ProcessWatch, identity
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, require

SEEN_MAX_S = 10.0
"""A killed process is gone within milliseconds; only a starved machine meets this."""
PROCESSES = 3


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self._random = random.Random(f"{seed}:deaths")

    async def run(self) -> None:
        for self.step in range(1, PROCESSES + 1):
            child = _started()
            watch = ProcessWatch(asyncio.get_running_loop())
            try:
                await self._watch_one(watch, child)
            finally:
                watch.close()
                child.kill()
                if child.stdin is not None:
                    child.stdin.close()
                child.wait()

    async def _watch_one(self, watch: ProcessWatch, child: "subprocess.Popen[bytes]") -> None:
        """Watch a process, and one that had the same pid before it: only the death of the first may be heard."""
        who, loop = identity(child.pid), asyncio.get_running_loop()
        earlier = who.model_copy(update={"start_ticks": who.start_ticks - self._random.randint(1, 1_000)})
        heard: list[str] = []
        ended = asyncio.Event()

        def died() -> None:
            heard.append("the process")
            ended.set()

        watch.watch(earlier, lambda: heard.append("the one before"))
        require(watch.watch(who, died), "a process of this host that lives cannot be watched")
        await loop.run_in_executor(None, threading.Event().wait, 0.02)  # the loop meanwhile sees whatever is readable
        require(not heard, f"the death of {' and '.join(heard)} is believed, and the pid's process lives")
        child.kill()
        async with asyncio.timeout(SEEN_MAX_S):
            await ended.wait()
        require(heard == ["the process"], f"one process died, and the death of {' and '.join(heard)} is believed")


def _started() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def search(seed: int) -> Found | None:
    """Watch some processes; return the first death that was believed and had not been seen."""
    one = _Search(seed)
    try:
        asyncio.run(one.run())
    except BrokenPromiseError as error:
        return Found(str(error), one.step)
    return None
