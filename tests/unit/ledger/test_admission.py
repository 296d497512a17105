"""Admission answers each request once; a refusal, a repeat and overload are values, in that order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.ledger.admission import AdmissionGate, Verdict


def gate(*, allow: tuple[str, ...] = ("a",), most: int = 2, ttl_s: float = 300.0, entries: int = 100) -> AdmissionGate:
    return AdmissionGate(instance="b", source_allow=allow, inflight_max=most, dedup_ttl_s=ttl_s, entries_max=entries)


def ask(one: AdmissionGate, what: str, *, now: float = 0.0, by: str = "", source: str = "a") -> Verdict:
    return one.admit(what, request_id=by or f"id-{what}-{now}", source=source, transfer=f"t-{what}", now=now).verdict


def test_no_allowlist_means_that_every_source_is_refused_with_what_to_do() -> None:
    one = gate(allow=())
    answer = one.admit("h", request_id="r", source="a", transfer="t", now=0.0)
    assert answer.verdict is Verdict.REFUSED
    assert "source_allow" in answer.reason
    assert one.statistics().refused == 1


def test_a_source_is_compared_as_it_is_written() -> None:
    one = gate(allow=("a",))
    for source in ("A", "a ", " a", "a/", "a.b", ""):
        assert ask(one, "h", source=source) is Verdict.REFUSED
    assert ask(one, "h", source="a") is Verdict.ACCEPTED


def test_an_instance_is_never_its_own_source() -> None:
    assert ask(gate(allow=("a", "b")), "h", source="b") is Verdict.REFUSED


def test_the_source_is_checked_before_the_repeat_and_the_repeat_before_the_load() -> None:
    one = gate(most=1)
    assert ask(one, "h") is Verdict.ACCEPTED
    assert ask(one, "h", source="stranger") is Verdict.REFUSED
    assert ask(one, "h", now=1.0) is Verdict.DEDUPED
    assert ask(one, "other", now=1.0) is Verdict.SKIPPED_BUSY
    statistics = one.statistics()
    assert (statistics.fired, statistics.deduped, statistics.skipped_busy, statistics.refused) == (1, 1, 1, 1)


def test_a_busy_answer_leaves_nothing_behind() -> None:
    one = gate(most=1)
    ask(one, "h")
    assert ask(one, "other", by="x") is Verdict.SKIPPED_BUSY
    assert one.statistics().seen == 1
    one.ended("h", settled=True)
    assert ask(one, "other", by="x") is Verdict.ACCEPTED


def test_no_place_at_all_is_always_busy() -> None:
    assert ask(gate(most=0), "h") is Verdict.SKIPPED_BUSY


def test_a_settled_request_is_deduped_until_its_time_counted_from_acceptance() -> None:
    one = gate(ttl_s=10.0)
    ask(one, "h", now=0.0)
    one.ended("h", settled=True)
    assert ask(one, "h", now=9.9) is Verdict.DEDUPED
    assert ask(one, "h", now=10.0) is Verdict.ACCEPTED, "the repeat did not refresh the time"


def test_a_running_request_is_never_run_twice_however_long_it_takes() -> None:
    # P21
    one = gate(ttl_s=10.0)
    ask(one, "h", now=0.0)
    assert ask(one, "h", now=1_000.0) is Verdict.DEDUPED
    one.ended("h", settled=True)
    assert ask(one, "h", now=1_001.0) is Verdict.ACCEPTED


def test_a_failed_request_is_forgotten_and_may_be_tried_again_at_once() -> None:
    one = gate()
    ask(one, "h")
    one.ended("h", settled=False)
    assert one.statistics().seen == 0
    assert ask(one, "h", by="another request") is Verdict.ACCEPTED


def test_a_request_that_the_queue_offers_again_never_runs_twice_whatever_became_of_it() -> None:
    # P22: the ack was lost, and the request comes back after its transfer has failed
    one = gate()
    ask(one, "h", by="the one request")
    one.ended("h", settled=False)
    again = one.admit("h", request_id="the one request", source="a", transfer="t-second", now=1.0)
    assert (again.verdict, again.transfer) == (Verdict.ADOPTED, "t-h")
    assert one.statistics().fired == 1


def test_what_is_remembered_of_ended_requests_is_bounded() -> None:
    one = gate(entries=3)
    for number in range(5):
        ask(one, f"h{number}", by=f"r{number}")
        one.ended(f"h{number}", settled=False)
    assert ask(one, "h4", by="r4") is Verdict.ADOPTED
    assert ask(one, "h0", by="r0") is Verdict.ACCEPTED


def test_the_end_of_an_older_run_does_not_end_a_newer_one() -> None:
    one = gate()
    one.ended("h", settled=True)
    ask(one, "h")
    one.ended("h", settled=True)
    one.ended("h", settled=False)
    statistics = one.statistics()
    assert (statistics.settled, statistics.failed, statistics.inflight, statistics.seen) == (1, 0, 0, 1)


def test_with_no_dedup_time_only_a_running_request_is_a_repeat() -> None:
    one = gate(ttl_s=0.0)
    ask(one, "h")
    assert ask(one, "h", now=1.0) is Verdict.DEDUPED
    one.ended("h", settled=True)
    assert one.statistics().seen == 0
    assert ask(one, "h", now=1.0) is Verdict.ACCEPTED


def test_a_redelivery_joins_its_own_transfer_running_or_settled() -> None:
    # P22
    one = gate()
    first = one.admit("h", request_id="r1", source="a", transfer="t1", now=0.0)
    again = one.admit("h", request_id="r1", source="a", transfer="t2", now=1.0)
    assert (first.verdict, again.verdict, again.transfer) == (Verdict.ACCEPTED, Verdict.ADOPTED, "t1")
    one.ended("h", settled=True)
    assert one.admit("h", request_id="r1", source="a", transfer="t3", now=2.0).verdict is Verdict.ADOPTED
    statistics = one.statistics()
    assert (statistics.fired, statistics.deduped) == (1, 0)


def test_a_dedup_names_the_transfer_that_it_joined() -> None:
    one = gate()
    one.admit("h", request_id="r1", source="a", transfer="t1", now=0.0)
    assert one.admit("h", request_id="r2", source="a", transfer="t2", now=0.0).transfer == "t1"


def test_entries_are_bounded_and_running_ones_are_never_evicted() -> None:
    # contract 50
    one = gate(most=3, entries=4)
    for n in range(2):
        ask(one, f"run{n}")
    for n in range(50):
        assert ask(one, f"h{n}") is Verdict.ACCEPTED
        one.ended(f"h{n}", settled=True)
        assert one.statistics().seen <= 4
    assert ask(one, "run0", now=1.0) is Verdict.DEDUPED
    assert ask(one, "h49", now=1.0) is Verdict.DEDUPED
    assert ask(one, "h0", now=1.0) is Verdict.ACCEPTED


def test_running_requests_may_exceed_the_entries_but_never_the_cap() -> None:
    # contract 50
    one = gate(most=5, entries=1)
    assert [ask(one, f"h{n}") for n in range(7)] == [Verdict.ACCEPTED] * 5 + [Verdict.SKIPPED_BUSY] * 2


def test_the_same_content_in_other_words_joins_while_it_runs() -> None:
    # contract 23
    one = gate()
    ask(one, "h1")
    assert one.same_content("h1", b"last") is None
    assert one.same_content("h1", b"last") is None
    ask(one, "h2")
    assert one.same_content("h2", b"last") == "t-h1"
    one.ended("h2", settled=False)
    one.ended("h1", settled=True)
    ask(one, "h3")
    assert one.same_content("h3", b"last") is None, "what has settled is in the index, nothing to join"
    one.ended("h1", settled=True)
    ask(one, "h4")
    assert one.same_content("h4", b"last") == "t-h3"


def test_the_content_of_a_forgotten_request_is_forgotten_too() -> None:
    # contract 50
    one = gate()
    ask(one, "h1")
    one.same_content("h1", b"last")
    one.ended("h1", settled=False)
    assert one._by_content == {}
    ask(one, "h1")
    assert one.same_content("h1", b"last") is None


def test_the_content_of_an_unknown_request_is_not_kept() -> None:
    one = gate()
    assert one.same_content("nobody", b"last") is None
    ask(one, "h")
    assert one.same_content("h", b"last") is None


step = st.tuples(
    st.sampled_from(["ask", "settle", "fail", "wait", "content"]),
    st.sampled_from(["h0", "h1", "h2", "h3", "h4"]),
    st.sampled_from(["a", "stranger"]),
)


@settings(deadline=None)
@given(st.lists(step, max_size=60), st.integers(0, 3), st.sampled_from([0.0, 2.0, 10.0]), st.integers(1, 4))
def test_the_counters_add_up_whatever_happens(
    steps: list[tuple[str, str, str]], most: int, ttl_s: float, entries: int
) -> None:
    # contract 2.1.19: fired is settled + failed + inflight at every instant
    one = gate(most=most, ttl_s=ttl_s, entries=entries)
    running: set[str] = set()
    now = 0.0
    for n, (what, which, source) in enumerate(steps):
        match what:
            case "ask":
                verdict = ask(one, which, now=now, by=f"r{n}", source=source)
                assert (verdict is Verdict.REFUSED) == (source == "stranger")
                if verdict is Verdict.ACCEPTED:
                    assert which not in running
                    running.add(which)
                if verdict is Verdict.SKIPPED_BUSY:
                    assert len(running) == most
            case "wait":
                now += 1.0
            case "content":
                one.same_content(which, b"last")
            case _:
                one.ended(which, settled=what == "settle")
                running.discard(which)
        statistics = one.statistics()
        assert statistics.inflight == len(running) <= most
        assert statistics.fired == statistics.settled + statistics.failed + statistics.inflight
        assert statistics.seen <= max(entries, most)


def test_once_all_names_are_forgotten_what_has_settled_may_run_again_and_what_runs_goes_on() -> None:
    # contract 24; P21
    one = gate(most=3)
    for what in ("settled", "running"):
        assert ask(one, what) is Verdict.ACCEPTED
    one.ended("settled", settled=True)
    assert ask(one, "settled", now=1.0) is Verdict.DEDUPED
    one.forget_settled()
    assert one.statistics().seen == 1
    assert ask(one, "settled", now=2.0) is Verdict.ACCEPTED
    assert ask(one, "running", now=2.0) is Verdict.DEDUPED
    one.ended("running", settled=True)
    assert ask(one, "running", now=3.0) is Verdict.ACCEPTED, "what it brought had no name any more"
