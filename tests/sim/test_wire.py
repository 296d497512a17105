"""What the real roles say in the simulated world, where everything goes wrong, is what the table of channels says."""

import logging
from collections.abc import Callable

import pytest

from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.world import World
from kvbus.transport import BUCKET_INSTANCES, Delivery
from tests.wire_table import ANSWERED, BUCKET, SENT, Overheard

NEVER_SIMULATED = {"live_facts", "stats", "member_stats", "cache", "snapshot", "drain", "blocks", "live_blocks"}
"""The simulated broker repeats no facts, nobody asks for counters, for pages held or for a member's state there, nobody
drains a member, and no engine has a bridge."""
NEVER_SAID = {"names_forgotten", "snapshot", "prefix_asked"}
"""Follows from such questions; and nobody there asks for a prefix by its name."""
NEVER_REPEATED = {("live_settle", "batch")}
"""Decisions leave together where an instance has one member, and nobody hears them there."""
SEEDS = range(1, 13)
"""Seeds of which the first shows all kinds; others in case that the roles change."""


def overhear(world: World, overheard: Overheard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a tap between the members and their broker."""
    broker = world.broker
    send, store, put = broker.send, broker.store, broker.put

    def tapped_send(delivery: Delivery, answer: Callable[[bytes], None] | None = None) -> int:
        found = overheard.hear(delivery.subject, delivery.data)
        if answer is None or found is None:
            return send(delivery, answer)

        def tapped_answer(data: bytes) -> None:
            overheard.hear_answer(found, data)
            answer(data)

        return send(delivery, tapped_answer)

    def tapped_store(subject: str, data: bytes, message_id: str, after: int | None = None) -> object:
        overheard.hear(subject, data)
        return store(subject, data, message_id, after)

    def tapped_put(bucket: str, key: str, value: bytes) -> None:
        if bucket == BUCKET_INSTANCES:
            overheard.hear(f"{BUCKET}{key}", value)
        put(bucket, key, value)

    for name, tapped in (("send", tapped_send), ("store", tapped_store), ("put", tapped_put)):
        monkeypatch.setattr(broker, name, tapped)


def test_members_send_every_kind_on_its_channels_and_none_elsewhere_whatever_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="kvbus")
    overheard = Overheard()
    sent = {one for one in SENT if one[0] not in NEVER_SIMULATED and one[1] not in NEVER_SAID} - NEVER_REPEATED
    answered = {one for one in ANSWERED if one[0] not in NEVER_SIMULATED and one[1] not in NEVER_SAID}

    for seed in SEEDS:
        for ranks in (1, 2):
            world = World(SimSettings(seed=seed, transfers=40, instances=2, ranks=ranks))
            overhear(world, overheard, monkeypatch)
            assert world.run().violation is None
        if (overheard.sent, overheard.answered) == (sent, answered):
            break

    assert overheard.strangers == []
    assert overheard.sent == sent
    assert overheard.answered == answered
