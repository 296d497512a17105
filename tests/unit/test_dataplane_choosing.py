"""Choosing among readers: which one takes an order, what it goes on with, what rests, and what is told of it."""

from collections.abc import Sequence

import pytest

from kvbus.dataplane.choosing import REST_ORDERS, ChoosingReader, Found, Way
from kvbus.dataplane.planner import Planner
from kvbus.dataplane.reading import ReadOrder
from kvbus.errors import BackendError
from kvbus.events import column
from kvbus.grants import Grant, MemoryAccess, PoolGeometry, SocketAccess, UcxAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Direction, Failed, LeaseView, Order, SubmissionRejectedError
from kvbus.processes import identity
from kvbus.testing.ledger_parts import ManualBackend
from tests.unit.helpers.lending_process import reader_key

HERE = identity()
SIBLING = HERE.model_copy(update={"pid": HERE.pid + 1})
PLANNER = Planner(HERE)


def grant(*, pages: Sequence[int] = (1, 2), epoch: int = 7 << 32 | 1, **changes: object) -> Grant:
    fields: dict[str, object] = {
        "lender_instance": "A",
        "lender_member": "m0",
        "lender_epoch": epoch,
        "reader": reader_key(),
        "ticket": 5,
        "rank": 0,
        "fingerprint": "f",
        "nonce": b"n" * 16,
        "pool": PoolGeometry(
            base=4096, length_bytes=1 << 20, generations_offset=0, pages_offset=4096, page_stride=65536,
            page_bytes=65536, page_count=8,
        ),
        "pages": column(pages, 4),
        "counters": column([2] * len(pages), 8),
        "ucx": UcxAccess(address=b"a", rkey=b"r"),
        "memory": MemoryAccess(process=SIBLING, fd=5),
        "socket": SocketAccess(addresses=("127.0.0.1",), port=1, secret=b"s" * 32),
    }  # fmt: skip
    return Grant.model_validate({**fields, **changes})


class Town:
    """A chooser over three backends that do what a test says."""

    def __init__(self, lanes: Sequence[str] = ()) -> None:
        self.backends = {name: ManualBackend(name) for name in ("ucx", "memory", "socket")}
        self.lanes = list(lanes)
        self.chooser = ChoosingReader(
            "auto", tuple(self.backends.values()), planner=PLANNER, lanes={"ucx": lambda _peer: tuple(self.lanes)}
        )
        self.last = 0

    def submit(self, offered: Grant | None = None, *, peer: str = "A") -> int:
        """Submit an order of its own ticket, and return that."""
        self.last += 1
        hint = ReadOrder(offered or grant(), None, SIBLING)
        view = LeaseView("f", 0, 9, (0, 1), (b"x" * 16, b"y" * 16), (3, 4), (1, 1))
        self.chooser.submit(Order(self.last, 1, view, Direction.WRITE, hint, peer, None))
        return self.last

    def at(self, ticket: int) -> list[str]:
        """The backends that have this ticket's attempt open."""
        return [name for name, backend in self.backends.items() if (ticket, 1) in backend.open]

    def refuse(self, ticket: int, name: str, text: str = "no permission") -> None:
        failed = Failed(FailureClass.PEER_LOST, text)
        self.backends[name].tell(Change(ticket, 1, failed, Evidence.NEVER_SUBMITTED, text))

    def end(self, ticket: int) -> None:
        for name in self.at(ticket):
            self.backends[name].deliver(ticket)
        assert len(self.chooser.changes()) == 1

    def texts(self, ticket: int) -> list[str]:
        return [way.text for way in self.chooser.ways(ticket)]


def test_an_order_takes_the_way_that_the_planner_ranks_first_and_says_why_once() -> None:
    town = Town()
    ticket = town.submit()
    assert town.at(ticket) == ["memory"]
    (told,) = town.chooser.ways(ticket)
    assert told.step == "moving"
    assert told.text.startswith("by memory: same host, 2 pages of 64 KiB; ucx over cma costs ")
    assert town.chooser.ways(ticket) == ()
    many = town.submit(grant(pages=range(1, 8), pool=grant().pool.model_copy(update={"page_bytes": 512})))
    assert town.at(many) == ["memory"]
    assert town.at(town.submit(grant(memory=None))) == ["ucx"]
    assert town.at(town.submit(grant(memory=None, ucx=None))) == ["socket"]


def test_an_attempt_is_at_one_backend_at_a_time_and_goes_on_only_where_it_was_never_submitted() -> None:  # P3
    # Planted fault that this catches: going on as soon as a failure is reported, without its evidence.
    town = Town()
    ticket = town.submit()
    town.backends["memory"].tell(Change(ticket, 1, Failed(FailureClass.PEER_LOST, "broken"), None))
    assert [change.evidence for change in town.chooser.changes()] == [None]
    assert town.at(ticket) == ["memory"]
    town.backends["memory"].end(ticket, Evidence.COMPLETED)
    assert [change.evidence for change in town.chooser.changes()] == [Evidence.COMPLETED]
    assert town.at(ticket) == []

    other = town.submit()
    tried = []
    for _ in range(2):
        (now,) = town.at(other)
        tried.append(now)
        town.refuse(other, now)
        assert town.chooser.changes() == []
        assert len(town.at(other)) == 1
    assert tried == ["memory", "ucx"]
    town.end(other)
    assert town.chooser.statistics().passed_on == 2


def test_what_was_refused_is_told_with_its_reason_and_rests_for_that_peer_and_epoch() -> None:
    town = Town()
    first = town.submit()
    town.refuse(first, "memory")
    town.chooser.changes()
    texts = town.texts(first)
    assert texts[1].startswith("by ucx over cma: same host, 2 pages of 64 KiB; socket costs 1.")
    assert texts[1].endswith("memory refused: no permission")
    town.end(first)

    second = town.submit()
    assert town.at(second) == ["ucx"]
    assert "memory was refused lately (no permission)" in town.texts(second)[0]
    assert town.at(town.submit(grant(ucx=None, socket=None))) == ["memory"]  # nothing else is left
    assert town.at(town.submit(peer="another")) == ["memory"]
    assert town.at(town.submit(grant(epoch=8 << 32 | 1))) == ["memory"]


def test_a_rest_ends_after_so_many_orders() -> None:
    town = Town()
    town.refuse(town.submit(), "memory")
    town.chooser.changes()
    ways = [town.at(town.submit())[0] for _ in range(REST_ORDERS + 1)]
    assert ways == ["ucx"] * REST_ORDERS + ["memory"]


def test_a_connection_that_breaks_is_passed_by_the_next_time_and_one_that_was_ended_here_is_not() -> None:
    town = Town()
    broken = town.submit()
    town.backends["memory"].answer(broken, Failed(FailureClass.PEER_LOST, "the connection broke"), Evidence.COMPLETED)
    assert len(town.chooser.changes()) == 1  # it may have touched the pages: the transfer ends here
    assert town.at(broken) == []
    assert town.at(town.submit()) == ["ucx"]

    town = Town()
    cancelled = town.submit()
    town.chooser.cancel(cancelled, 1)
    town.refuse(cancelled, "memory", "cancelled first")
    assert len(town.chooser.changes()) == 1
    assert town.at(cancelled) == []
    assert town.at(town.submit()) == ["memory"]
    assert town.chooser.statistics().refused == {}


def test_an_order_that_nobody_takes_is_rejected_with_the_last_word() -> None:
    town = Town()
    for backend in town.backends.values():
        backend.faults.by_method["submit"] = SubmissionRejectedError(FailureClass.TRANSPORT, f"{backend.name} is full")
    with pytest.raises(SubmissionRejectedError, match="socket is full"):
        town.submit()
    assert town.chooser.statistics().refused == {"memory": 1, "ucx": 1, "socket": 1}
    assert town.texts(town.last) == []


def test_lanes_are_told_once_a_connection_and_stand_in_the_reason_afterwards() -> None:
    town = Town(lanes=("tcp/lo", "cma/memory"))
    first, offer = town.submit(grant(memory=None)), grant(memory=None)
    town.end(first)
    assert town.chooser.ways(first)[1] == Way("moved", "over tcp/lo, cma/memory")
    second = town.submit(offer)
    town.end(second)
    (told,) = town.texts(second)
    assert told.startswith("by ucx over cma (tcp/lo, cma/memory): same host")
    assert town.chooser.statistics().lanes == {"tcp/lo": 1, "cma/memory": 1}

    slow = Town(lanes=("tcp/lo",))
    slow.end(slow.submit(grant(memory=None)))
    assert slow.at(slow.submit(grant(memory=None, pages=range(1, 8)))) == ["socket"]  # without cma it is the dearer


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    town = Town()
    for _ in range(5000):
        town.end(town.submit())
    assert town.chooser.ways(1) == ()
    assert len(town.chooser.ways(town.last)) == 1


def test_a_transport_that_has_broken_down_is_named_and_orders_go_on_by_the_others() -> None:  # R21
    # Planted fault that this catches: a broken transport whose exception loses what the others have listed.
    town = Town()
    first, other = town.submit(grant(memory=None, socket=None)), town.submit()
    assert (town.at(first), town.at(other)) == (["ucx"], ["memory"])
    town.backends["ucx"].faults.plant("changes", BackendError("the thread is gone"))
    town.backends["memory"].deliver(other)
    assert [change.ticket for change in town.chooser.changes()] == [other]
    assert town.chooser.statistics().failed == {"ucx": "the thread is gone"}
    town.backends["ucx"].faults.plant("submit", SubmissionRejectedError(FailureClass.TRANSPORT, "the thread is gone"))
    assert town.at(town.submit(grant(memory=None))) == ["socket"]


def test_the_binding_breaks_down_with_its_last_transport_and_says_so_once() -> None:  # R14, R21
    # Planted fault that this catches: an exception that loses what another transport has listed in the same call.
    town = Town()
    ticket = town.submit(grant(memory=None, socket=None))
    assert town.at(ticket) == ["ucx"]
    for name in ("ucx", "memory"):
        town.backends[name].faults.plant("changes", BackendError(f"{name} is gone"))
        assert town.chooser.changes() == []
    town.backends["ucx"].faults.remove("changes")  # it still tells of its attempts
    town.backends["ucx"].deliver(ticket)
    town.backends["socket"].faults.plant("changes", BackendError("socket is gone"))
    with pytest.raises(BackendError, match=r"ucx is gone; memory is gone; socket is gone"):
        town.chooser.changes()
    assert [change.ticket for change in town.chooser.changes()] == [ticket]
    assert town.chooser.changes() == []


def test_what_was_found_of_the_lenders_pages_is_told_once_and_within_a_bound() -> None:
    town = Town()
    ticket = town.submit()
    failed = Failed(FailureClass.PAGE_DIFFERS, "two pages differ")
    town.backends["memory"].tell(Change(ticket, 1, failed, Evidence.COMPLETED, "", (0, 1), 3))
    town.chooser.changes()
    assert town.chooser.found(ticket) == Found((0, 1), 3)
    assert town.chooser.found(ticket) == Found((), 0)
    later = ticket
    for number in range(5000):
        later = town.submit()
        town.backends["memory"].tell(Change(later, 1, failed, Evidence.COMPLETED, "", (number,)))
        town.chooser.changes()
    assert town.chooser.found(ticket + 1) == Found()
    assert town.chooser.found(later).differing == (4999,)
