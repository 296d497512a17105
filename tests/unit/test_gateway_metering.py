"""What a gateway counts of its answers: each once, by what the client was told."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvbus.gateway.metering import ELSEWHERE, Metering, RequestCounts

SCOPE: Scope = {"type": "http", "method": "GET"}


async def nothing() -> Message:
    raise AssertionError("no application here reads a body")


async def taken(_message: Message) -> None:
    """A client that takes what it is sent."""


async def counted(*, begins: bool) -> list[tuple[str, int]]:
    """What is counted of an answer that breaks, behind its head or before it: classes of status."""
    counts = RequestCounts()

    async def broken(_scope: Scope, _receive: Receive, send: Send) -> None:
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a fault behind the door")

    with pytest.raises(RuntimeError, match="behind the door"):
        await Metering(broken, counts=counts, routes={})(SCOPE, nothing, taken)
    found = list(counts.by_class())
    assert {labels["route"] for labels, _ in found} == {ELSEWHERE}
    return [(labels["status"], count) for labels, count in found]


async def test_an_answer_that_breaks_behind_its_head_is_counted_once() -> None:
    assert await counted(begins=True) == [("2xx", 1)]


async def test_what_breaks_before_anything_was_sent_is_a_fault_of_the_gateway() -> None:
    assert await counted(begins=False) == [("5xx", 1)]
