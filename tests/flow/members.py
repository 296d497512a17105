"""What tests of instances with two members ask: who leads, what the settle log says, whether all of it is back."""

from contextlib import suppress

from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Audit, Verdict
from kvbus.events import Event
from tests.flow.town import TOPICS, Town
from tests.waiting import until

MEMBERS = ("m0", "m1")
LEADS_S = 60.0
"""Ten seconds in which a member that is not heard of may yet come, the turns behind them, and what starting costs."""


async def leader(pair: Town, instance: str = "b", wait_s: float = LEADS_S) -> str:
    """The member that leads an instance, once one does."""
    found: list[str] = []

    async def leads() -> bool:
        for name, worker in pair.workers.items():
            if worker.name == instance and worker.alive and (await pair.counters(name))["settle_leads"]:
                found.append(name)
        return bool(found)

    await until(leads, wait_s, what=f"a member leads {instance}")
    return found[-1]


async def decisions(pair: Town, transfer: str, instance: str = "b") -> list[Event]:
    """What the settle log says of one transfer, in its order."""
    log = await pair.events(instance, settle=True)
    return [event for event in log if getattr(event.body, "transfer", "") == transfer]


async def kinds(pair: Town, transfer: str) -> list[str]:
    """The kinds of the decisions about one transfer, in their order."""
    return [event.header.k for event in await decisions(pair, transfer)]


async def until_decided(pair: Town, transfer: str, kind: str, wait_s: float) -> None:
    """Wait until the settle log says so of a transfer."""

    async def decided() -> bool:
        return kind in await kinds(pair, transfer)

    await until(decided, wait_s, what=f"{transfer} is {kind}")


async def assert_audit_is_clean(pair: Town) -> None:
    """Nothing that was recorded breaks a rule, and nothing is missing."""
    found: list[Audit] = []

    async def says_something() -> bool:
        found.append((await audit_log(pair.bus, TOPICS))[1])
        return found[-1].verdict is not Verdict.INCOMPLETE  # as while the last facts are on their way

    with suppress(AssertionError):
        await until(says_something)
    assert found[-1].verdict is Verdict.CLEAN, "\n".join(lines(found[-1]))
