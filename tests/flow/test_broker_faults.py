"""The table of the broker's faults: rows of it are clean here, and it shows what goes wrong."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.chaos_broker import brokers, plants, scene
from bench.chaos_broker.__main__ import main
from bench.chaos_broker.catalog import CASES, Case, chosen
from bench.chaos_broker.follower import applied_twice
from bench.chaos_broker.notes import Notes, longest_pause
from bench.chaos_broker.stage import clustered
from bench.chaos_broker.table import ZEROS, Row, cells, problems
from kvbus import subscriber
from kvbus.events import Event, Header, LeaseGranted, TransferOutcome
from kvbus.subscriber import Subscriber

ROOT = Path(__file__).parents[2]
RUN_S = 280.0


def ran(*names: str, plant: str = "") -> dict[str, Mapping[str, Any]]:
    """Run rows as `make chaos-broker` does; the rows by name, all of them clean unless a fault is planted."""
    command = [sys.executable, "-m", "bench.chaos_broker", "--json"]
    command += [part for name in names for part in ("--only", name)]
    command += ["--plant", plant] if plant else []
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert run.returncode in {0, 1}, run.stderr
    document = json.loads(run.stdout)
    assert document["clean"] == (run.returncode == 0)
    rows = {row["fault"]: row for row in document["rows"]}
    assert set(rows) == set(names)
    if plant:
        return rows
    assert document["clean"], [row["wrong"] for row in rows.values()]
    assert not any(row[zero] for row in rows.values() for zero in ZEROS)
    return rows


def played(name: str, plant: str = "") -> Row:
    """Run one row in this process."""
    (case,) = chosen([name])
    return case.run(plant)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a planted fault keeps from coming is not waited for as long as what is only slow."""
    for name in ("CAUGHT_UP_S", "END_S"):
        monkeypatch.setattr(scene, name, 8.0)
    monkeypatch.setattr(scene, "REST_S", 1.0)


# P22, P23: a killed broker, and one whose store is gone
@pytest.mark.slow
def test_a_broker_that_dies_loses_no_fact_and_has_no_request_run_twice() -> None:
    rows = ran("broker killed, back after 3 s", "broker back with an empty store", "first connect to nothing")
    assert rows["broker killed, back after 3 s"]["audit"] == "clean"


@pytest.mark.slow
def test_clients_that_misbehave_cost_no_fact() -> None:
    ran("a callback that raises", "an oversized event", "a slow subscriber", "duplicate, reordered, old epoch")


@pytest.mark.slow
def test_rights_that_go_and_clocks_that_jump_cost_no_fact_and_no_page() -> None:
    ran("permission removed", "credentials expired", "a clock jump")


@pytest.mark.slow
def test_a_cluster_that_loses_the_leader_of_its_facts_loses_no_fact() -> None:
    once = partial(brokers.leaders_killed, kills=1)
    row = Case("leader killed, once", once, brokers.ELECTED_S, opening=clustered).run("")
    assert row.is_clean, problems([row])
    assert row.audit == "clean"


@pytest.mark.slow
def test_an_outbox_that_gives_up_shows_as_facts_lost(soon: None) -> None:
    row = played("broker killed, back after 3 s", "outbox-forgets")
    assert row.facts_lost > 0
    assert not row.is_clean


@pytest.mark.slow
def test_message_ids_that_are_made_anew_show_as_facts_twice() -> None:
    # Only a store that is under way when the broker stops is repeated: nearly always there is one.
    rows = (next(iter(ran("broker stopped for 12 s", plant="ids-anew").values())) for _ in range(3))
    shown = next((row for row in rows if row["facts_twice"] > 0), None)
    assert shown is not None
    assert not shown["clean"]


# P22
@pytest.mark.slow
def test_a_request_that_is_run_for_each_delivery_shows_as_applied_twice(soon: None) -> None:
    # Only what runs when the broker is killed is delivered again: nearly always there is something.
    rows = (played("broker killed, back after 3 s", "runs-again") for _ in range(3))
    shown = next((row for row in rows if row.applied_twice > 0), None)
    assert shown is not None
    assert not shown.is_clean


# P18
@pytest.mark.slow
def test_a_reader_that_never_says_that_it_has_let_go_shows_as_leaked_pages(soon: None) -> None:
    row = played("an oversized event", "pages-stay")
    assert row.leaked_pages > 0
    assert not row.is_clean


@pytest.mark.slow
def test_a_follower_that_repairs_no_gap_shows_as_facts_lost(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_hear", "_read"):
        monkeypatch.setattr(Subscriber, name, getattr(Subscriber, name))  # puts them back
    plants.sow("gaps-stay")
    row = played("a slow subscriber")
    assert row.facts_lost > 0
    assert not row.is_clean


@pytest.mark.slow
def test_a_follower_that_knows_no_repeat_shows_as_facts_twice(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber._Log, "note", subscriber._Log.note)  # puts it back
    plants.sow("repeats-count")
    row = played("duplicate, reordered, old epoch")
    assert row.facts_twice > 0
    assert not row.is_clean


# -------------------------------------------------------------------------------------------------------- the table


def row_of(**changed: Any) -> Row:  # noqa: ANN401 - fields of Row
    clean = {"requests": 3, "settled": 3, "facts_sent": 9, "facts_seen": 9, "pause_s": 1.0, "audit": "clean"}
    return Row("fault", 2.0, **{**clean, **changed})


def test_a_row_is_clean_only_where_something_settled_was_seen_and_audited_and_every_zero_is_one() -> None:
    assert row_of().is_clean
    for zero in ZEROS:
        assert not row_of(**{zero: 1}).is_clean, zero
    assert "1 applied twice" in problems([row_of(applied_twice=1)])[0]
    assert not row_of(problems=["it never held"]).is_clean
    assert not row_of(failed=1).is_clean
    assert row_of(failed=1, may_fail=True).is_clean
    assert "at most 2 s" in problems([row_of(pause_s=2.5)])[0]
    for nothing in ({"settled": 0}, {"facts_seen": 0}, {"audit": ""}, {"pause_s": None}):
        assert "proves nothing" in problems([row_of(**nothing)])[0]


def test_a_row_is_the_same_after_its_document() -> None:
    row = row_of(notes=["as it was"], pause_s=0.25)
    assert Row.of(json.loads(json.dumps(row.document()))) == row
    assert cells(row)[-2:] == ("clean", "0.25 s")


def test_a_pause_is_the_longest_time_between_neighbours_and_the_ends_count() -> None:
    assert longest_pause([1.0, 2.0, 2.5], 0.5, 3.0) == 1.0
    assert longest_pause([], 0.0, 7.0) == 7.0
    assert longest_pause([1.0, 9.0], 0.0, 4.0) == 3.0  # what settled later is not within the span


def test_notes_confirm_what_left_together_under_the_id_of_its_last_event(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    lines = ["S 1000000000 a.m0.7.1", "S 2000000000 a.m0.7.2", "S 3000000000 a.m0.7.10", "T 3000000000 a.m0.7.2"]
    lines += ["A 4000000000 a.m0.7.2", "T 4000000000 b.m1.3.8", "A 5000000000 b.m1.3.9", "V 5000000000 hash"]
    path.write_text("".join(f"{line}\n" for line in lines))
    notes = Notes.read(path)
    assert notes.said == {"a.m0.7.1": 1.0, "a.m0.7.2": 2.0, "a.m0.7.10": 3.0, "b.m1.3.9": 5.0}
    assert notes.confirmed == {"a.m0.7.1": 4.0, "a.m0.7.2": 4.0, "b.m1.3.9": 5.0}
    assert notes.tried == {"a.m0.7.2", "b.m1.3.8"}
    assert notes.refused == {"hash"}


def test_notes_confirm_facts_and_decisions_each_by_the_messages_of_their_own_stream(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    lines = ["S 1000000000 a.m0.7.1", "D 2000000000 a.m0.7.2", "S 3000000000 a.m0.7.3", "D 4000000000 a.m0.7.4"]
    lines += ["C 5000000000 a.m0.7.4", "A 6000000000 a.m0.7.1"]
    path.write_text("".join(f"{line}\n" for line in lines))
    notes = Notes.read(path)
    assert notes.said.keys() == {f"a.m0.7.{number}" for number in (1, 2, 3, 4)}
    assert notes.confirmed == {"a.m0.7.2": 5.0, "a.m0.7.4": 5.0, "a.m0.7.1": 6.0}


def event_of(body: TransferOutcome | LeaseGranted, sequence: int) -> Event:
    return Event(Header(k=body.KIND, i="b", m="m0", e=7, s=sequence, t=1), body)


def test_what_takes_effect_twice_is_named() -> None:
    settled = TransferOutcome(transfer="t1", request_hash="0" * 32, source="a", destination="b", outcome="settled")
    lease = LeaseGranted(
        ticket=1, transfer="t1", rank=0, direction="write", lender="pool", peer="a", pages=b"", counters=b""
    )
    assert applied_twice([event_of(settled, 1), event_of(lease, 2)]) == []
    again = settled.model_copy(update={"transfer": "t2"})
    assert "settled as ['t1', 't2']" in applied_twice([event_of(settled, 1), event_of(again, 2)])[0]
    assert "stands 2 times" in applied_twice([event_of(lease, 1), event_of(lease, 2)])[0]


def test_rows_are_chosen_by_name_or_by_a_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen([]) == list(CASES)
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.name for case in chosen(["lame duck"])] == ["lame duck"]
    assert len(chosen(["broker killed"])) == 2
    assert main(["--list", "--only", "a clock jump"]) == 0
    assert capsys.readouterr().out == "a clock jump\n"
    assert main(["--only", "nothing of the kind"]) == 2
