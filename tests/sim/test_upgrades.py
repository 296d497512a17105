"""Instances whose peers speak a later version: its fields are passed over, its kinds skipped, its majors refused."""

import logging
from collections import Counter
from collections.abc import Callable

import pytest

from kvbus.testing.sim.settings import CALM, SimSettings
from kvbus.testing.sim.world import SimResult, World
from kvbus.topics import Family, Topics
from kvbus.transport import Delivery, NotStored, Stored
from tests.versions import later_major, later_minor, unknown_kind

TOPICS = Topics()
FOREIGN_EVERY = 5
"""Of so many messages to one family, one is followed by two that this version cannot read."""


class Upgraded:
    """Stands before a world's broker: whatever is said there comes as a later version would say it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, *, foreign: bool) -> None:
        broker = world.broker
        self.said: Counter[Family] = Counter()
        self.foreign: Counter[Family] = Counter()
        """Pairs that came to somebody: one of a later major version, one of a later kind."""
        self._adds = foreign
        self._send, self._store, self._put = broker.send, broker.store, broker.put
        for name in ("send", "store", "put"):
            monkeypatch.setattr(broker, name, getattr(self, name))

    def send(self, delivery: Delivery, answer: Callable[[bytes], None] | None = None) -> int:
        live = delivery.sequence > 0  # what the broker repeats was made later when it was stored
        data = delivery.data if live else later_minor(delivery.data)
        later = answer and (lambda said: answer(later_minor(said)))
        listeners = self._send(Delivery(delivery.subject, data, delivery.sequence, delivery.last_on_subject), later)
        if not live:
            others = self._others(delivery.subject, delivery.data)
            for other in others:
                self._send(Delivery(delivery.subject, other), answer and (lambda _said: None))
            heard = listeners > 0 or answer is None
            self.foreign[TOPICS.parse(delivery.subject).family] += heard and len(others) == 2
        return listeners

    def store(self, subject: str, data: bytes, message_id: str, after: int | None = None) -> Stored | NotStored:
        answer = self._store(subject, later_minor(data), message_id, after)
        if isinstance(answer, Stored) and not answer.duplicate:
            family, others = TOPICS.parse(subject).family, self._others(subject, data)
            self.foreign[family] += len(others) == 2
            for number, other in enumerate(others):
                queued = family is Family.TRANSFER
                there = f"{subject[:-8]}{answer.sequence:08x}" if queued else subject  # a queue's subject holds one
                self._store(f"{there[:-1]}{number}" if queued else there, other, f"{message_id}.{number}")
        return answer

    def put(self, bucket: str, key: str, value: bytes) -> None:
        registers = not value.isdigit()  # an epoch is no event
        self._put(bucket, key, later_minor(value) if registers else value)
        if registers and self._adds:
            self._put(bucket, f"{key}7", later_major(value))
            self._put(bucket, f"{key}8", unknown_kind(value))

    def _others(self, subject: str, data: bytes) -> tuple[bytes, ...]:
        family = TOPICS.parse(subject).family
        self.said[family] += 1
        if not self._adds or self.said[family] % FOREIGN_EVERY:
            return ()
        return later_major(data), unknown_kind(data)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals, thousands of them, are not worth a record each."""
    caplog.set_level(logging.CRITICAL, logger="kvbus")


def run(world: World) -> SimResult:
    result = world.run()
    assert result.violation is None, result.violation
    assert result.leaked == ()
    assert result.transfers["fired"] >= world.settings.transfers
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_town_of_a_later_minor_version_is_understood_to_the_last_message(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(World(SimSettings(seed=1, transfers=40, instances=2, ranks=ranks, rates=CALM)))
    world = World(SimSettings(seed=1, transfers=40, instances=2, ranks=ranks, rates=CALM))
    upgraded = Upgraded(world, monkeypatch, foreign=False)

    result = run(world)

    assert upgraded.said[Family.COMMAND] > 40
    assert result.transfers["settled"] > 0
    assert result.transfers == plain.transfers
    assert result.hash == plain.hash


@pytest.mark.parametrize("ranks", [1, 2])
def test_kinds_and_majors_of_later_versions_on_every_subject_hurt_nobody_and_are_counted(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(SimSettings(seed=1, transfers=60, instances=2, ranks=ranks, rates=CALM))
    upgraded = Upgraded(world, monkeypatch, foreign=True)

    result = run(world)

    assert result.transfers["settled"] > 5
    assert world.broker.queued == 0
    members = [member.parts for member in world.town.up() if member.parts]
    intakes = [member.intake.statistics for member in members]
    asked = upgraded.foreign[Family.COMMAND] + upgraded.foreign[Family.TRANSFER]
    assert min(upgraded.foreign[Family.COMMAND], upgraded.foreign[Family.TRANSFER]) > 0
    assert (sum(one.malformed for one in intakes), sum(one.misplaced for one in intakes)) == (asked, asked)
    councils = [member.council for member in members if member.council]
    assert len(councils) == (0 if ranks == 1 else 4)
    told = upgraded.foreign[Family.HEARTBEAT] + upgraded.foreign[Family.SHARES]
    # A later major and an unknown kind beside each message, heard by every member.
    assert sum(one.statistics.malformed for one in councils) == (2 * ranks * told if councils else 0)
    assert all(one._log.malformed > 1 for one in councils)
