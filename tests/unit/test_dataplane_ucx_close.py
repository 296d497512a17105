"""A forced close over cma: UCX takes it at once while gets stand in its queue, and later progress still writes them.

So the end of the close alone is no evidence; the end of every request is. The queue is kept long here: one segment a
progress call, where kvbus's own setting copies sixteen and empties it in the very round of the close.
"""

from kvbus.ledger.facts import Evidence
from tests.unit.helpers.lending_process import LendingProcess, content, lending_process, reader_key
from tests.unit.helpers.reader_side import CANARY, arrived_of, ucx_side
from tests.waiting import wait_until

PAGE_BYTES = 2 << 20
PAGES = 128
QUEUE_PAGES = 32
"""Twice what may be in flight: where the last so many are untouched, the queue was full."""
NEW_CONTENT = 255
"""No page of a lender is filled with it."""
ONE_SEGMENT_A_CALL = {"CMA_TX_QUOTA": "1"}
TRIES_MAX = 100
"""A try counts only where the close came while the queue was full: a matter of milliseconds."""


def test_pages_may_take_new_content_in_the_very_moment_of_the_evidence() -> None:  # contract 40, 41
    # Planted fault that this catches: `Link._finish_close` that ends attempts without its look at the requests.
    with lending_process(page_bytes=PAGE_BYTES, pages=PAGES) as source:
        late = next((late for late in (pages_written_late(source) for _ in range(TRIES_MAX)) if late is not None), None)
    assert late is not None, "no close met a full queue"
    assert not late, f"{len(late)} pages were written after the evidence"


def pages_written_late(source: LendingProcess) -> list[int] | None:
    """Close by force midway, write new content with the evidence; return what was not left alone after that."""
    was_full: list[bool] = []

    def write_new_content() -> None:
        if not was_full:  # in UCX's own thread: no progress is made between the evidence and this
            was_full.append(all(side.holds(page, CANARY) for page in range(PAGES - QUEUE_PAGES, PAGES)))
            for page in range(PAGES):
                side.memory.page_bytes(page)[:] = NEW_CONTENT

    with ucx_side(
        page_bytes=PAGE_BYTES, pages=PAGES + 1, settings=ONE_SEGMENT_A_CALL, on_wake=write_new_content
    ) as side:
        side.submit(source.grant(range(PAGES)), range(PAGES))
        wait_until(lambda: not side.holds(0, CANARY))
        side.reader.isolate("A")
        evidence = side.end_of().evidence
        side.submit(source.grant((5,), reader=reader_key("t2")), (PAGES,), ticket=2, peer="C")
        assert arrived_of(side.end_of(2)) == (True,)  # all that stood in line before it has come by then
        assert side.holds(PAGES, content(5))
        if not was_full[0]:
            return None
        assert evidence is Evidence.ENDPOINT_DESTROYED
        return [page for page in range(PAGES) if not side.holds(page, NEW_CONTENT)]
