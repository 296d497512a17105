"""Connections that never come about cost nothing for good."""

from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Failed
from tests.unit.helpers.lending_process import lending_process, reader_key
from tests.unit.helpers.reader_side import TCP_ONLY, arrived_of, ucx_side

POSIX_ONLY = {"TLS": "posix", "MM_ERROR_HANDLING": "y"}
TRIES = 3


def mappings(plane: UcxPlane | None) -> int:
    """How much memory UCX has been given, in pieces."""
    assert plane is not None
    return plane.call(lambda: len(plane._context._memory))


def test_a_source_that_no_transport_leads_to_is_refused_and_leaves_no_memory_behind() -> None:
    with (
        lending_process(settings=POSIX_ONLY) as elsewhere,
        lending_process(settings=TCP_ONLY) as source,
        ucx_side(settings=TCP_ONLY) as side,
    ):
        before = mappings(side.plane)
        for ticket in range(1, TRIES + 1):
            side.submit(elsewhere.grant((1,), reader=reader_key(f"t{ticket}")), (ticket,), ticket=ticket)
            change = side.end_of(ticket)
            assert change.evidence is Evidence.NEVER_SUBMITTED
            assert isinstance(change.result, Failed)
            assert change.result.failure is FailureClass.PEER_LOST
        assert mappings(side.plane) == before
        side.submit(source.grant((1,), reader=reader_key("t9")), (9,), ticket=9, peer="C")
        assert arrived_of(side.end_of(9)) == (True,)
