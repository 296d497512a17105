"""Two coordinators at once, and a wall clock that jumps."""

import asyncio
import signal

from bench.chaos_broker.scene import Scene
from bench.chaos_broker.worker import move_clock
from tests.flow.members import MEMBERS, leader
from tests.waiting import until

TAKE_OVER_S = 20.0
"""Ten heartbeats without a sign of the coordinator, a turn of up to two seconds, and what a busy machine adds."""
JUMP_S = 3_600.0
JUMPED_S = 2.5
"""With each clock: several heartbeats, and a refresh of the registry."""


async def two_coordinators(scene: Scene) -> None:
    """The member that leads b stands still until another leads; then it goes on, and both believe that they lead."""
    stage = scene.stage
    led = await leader(stage)
    other = next(name for name in (f"b/{member}" for member in MEMBERS) if name != led)
    stage.workers[led].signal(signal.SIGSTOP)
    try:

        async def taken_over() -> bool:
            return bool((await stage.counters(other))["settle_leads"])

        await until(taken_over, TAKE_OVER_S, what=f"{other} leads")
    finally:
        stage.workers[led].signal(signal.SIGCONT)

    async def agreed() -> bool:
        counters = [await stage.counters(name) for name in (led, other)]
        return sum(one["settle_leads"] for one in counters) == 1 and len({one["settle_term"] for one in counters}) == 1

    await until(agreed, TAKE_OVER_S, what="one member leads, and both know it")
    counters = await stage.counters(other)
    scene.row.notes.append(f"{led} stood still and came back; term {counters['settle_term']} holds")


async def clock_jumped(scene: Scene) -> None:
    """The wall clocks of both workers jump by an hour, ahead and back, one after the other."""
    for instance in ("b", "a"):
        for seconds in (JUMP_S, -JUMP_S, 0.0):
            move_clock(scene.stage.clock(instance), seconds)
            await asyncio.sleep(JUMPED_S)
    scene.row.notes.append(
        "a worker's wall clock is moved where it reads it; the broker's own is that of the host, and stays"
    )
