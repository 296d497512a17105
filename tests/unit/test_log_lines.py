"""Log lines: one each, for people or as JSON, with ids where they exist; and what a member tells of its transfers."""

import json
import logging
from collections.abc import Iterator

import pytest

from kvbus.commands.log_lines import VALUE_LENGTH_MAX, formatter
from kvbus.events import TransferStep
from kvbus.roles.journal import note_event
from kvbus.testing.bus import MemoryBroker, MemoryBus
from tests.unit.story_parts import HASH, REQUEST, TRANSFER, Pair


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of this test's own."""
    made = logging.getLogger("kvbus.test_log_lines")
    made.setLevel(logging.DEBUG)
    yield made
    made.handlers.clear()


class Lines(logging.Handler):
    """Keeps the lines that a form makes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.setFormatter(formatter(form))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def line_of(log: logging.Logger, form: str, text: str, *values: object, **about: object) -> str:
    """The one line that a record becomes."""
    lines = Lines(form)
    log.addHandler(lines)
    log.warning(text, *values, extra=about)
    (line,) = lines.lines
    assert "\n" not in line
    return line


def test_a_line_for_people_says_when_who_what_and_then_the_ids(log: logging.Logger) -> None:
    line = line_of(log, "text", "no plan for %s yet", "b-1", transfer="b-1", ticket=7, cause="r.1.1")

    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("20")
    assert stamp.endswith("Z")
    assert rest == "warning kvbus.test_log_lines: no plan for b-1 yet transfer=b-1 ticket=7 cause=r.1.1"


def test_a_json_line_holds_the_same(log: logging.Logger) -> None:
    document = json.loads(line_of(log, "json", "no plan for %s yet", "b-1", transfer="b-1", ticket=7, cause=""))

    assert document.pop("timestamp")
    assert document == {
        "event": "no plan for b-1 yet",
        "level": "warning",
        "logger": "kvbus.test_log_lines",
        "transfer": "b-1",
        "ticket": 7,
    }


def test_a_trace_back_stays_on_its_line(log: logging.Logger) -> None:
    for form in ("text", "json"):
        lines = Lines(form)
        log.handlers[:] = [lines]
        try:
            int("two\nlines")
        except ValueError:
            log.exception("it failed", extra={"transfer": "b-1"})
        (line,) = lines.lines
        assert "\n" not in line
        assert "ValueError: invalid literal" in line
        assert "b-1" in line


def test_what_others_send_neither_moves_the_cursor_nor_begins_a_line_nor_fills_the_disk(log: logging.Logger) -> None:
    line = line_of(log, "text", "%s", "\x1b[2J\r\nforged transfer=x", transfer='a "b" c')
    assert not {"\x1b", "\r", "\n"} & set(line)
    assert line.endswith('transfer="a \\"b\\" c"')
    log.handlers.clear()
    assert len(line_of(log, "json", "x" * 100_000)) < VALUE_LENGTH_MAX + 500


def test_only_ids_are_taken_from_a_record(log: logging.Logger) -> None:
    assert "secret" not in line_of(log, "text", "text", prompt="secret", token_ids=["secret"])


async def test_a_member_tells_its_transfers_with_all_their_ids(caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus(MemoryBroker())
    with caplog.at_level(logging.DEBUG, "kvbus.roles.journal"):
        pair = Pair(bus)
        write, read = pair.whole()
    records = [record for record in caplog.records if record.name == "kvbus.roles.journal"]
    steps = [one for one in records if getattr(one, "cause", "") == REQUEST]
    assert {one.__dict__["transfer"] for one in steps} == {TRANSFER}
    assert {one.__dict__["request_hash"] for one in steps} == {HASH}
    assert {one.__dict__["ticket"] for one in records if hasattr(one, "ticket")} == {write, read}
    assert any(one.getMessage() == "lease went back by peer_ack" for one in records)
    await bus.close()


def test_what_goes_well_is_quiet_unless_asked_for_and_what_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus(MemoryBroker())
    with caplog.at_level(logging.INFO, "kvbus.roles.journal"):
        Pair(bus).whole()
        assert not caplog.records
        Pair(bus).source_killed()
        note_event(TransferStep(transfer=TRANSFER, request_hash=HASH, step="moving"), "")
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("failed from a, 0 of 31 pages, 0 bytes: peer_lost")
