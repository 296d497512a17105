"""One member's own words, made by hand, for tests of what a picture makes of them."""

from kvbus.columns import column
from kvbus.events import (
    Event,
    FactsSeen,
    Header,
    LeaseGranted,
    OutcomeFixed,
    TransferOutcome,
    TransferStep,
    decode,
    encode,
)
from kvbus.ledger.facts import Fact
from kvbus.parts import Body, FactDetailRow

HASH = "ab" * 16
SECOND = 1_000_000_000
FIRST_RUN, SECOND_RUN = 1 << 32 | 5, 2 << 32 | 9


class Teller:
    """Makes the events of one member, a millisecond apart."""

    def __init__(
        self, instance: str = "b", *, member: str = "m0", epoch: int = FIRST_RUN, from_ns: int = SECOND
    ) -> None:
        self.instance, self.member, self.epoch = instance, member, epoch
        self.now_ns, self.said = from_ns, 0

    def __call__(self, body: Body) -> Event:
        self.said += 1
        self.now_ns += 1_000_000
        header = Header(k=body.KIND, i=self.instance, m=self.member, e=self.epoch, s=self.said, t=self.now_ns)
        return decode(encode(header, body))

    def step(self, step: str, transfer: str = "b-1", text: str = "") -> Event:
        return self(TransferStep(transfer=transfer, request_hash=HASH, step=step, text=text))

    def granted(self, ticket: int, transfer: str = "b-1", *, pages: int = 4, direction: str = "write") -> Event:
        return self(
            LeaseGranted.model_validate(
                {
                    "ticket": ticket, "transfer": transfer, "rank": 0, "direction": direction, "lender": "pool",
                    "peer": "a", "pages": column(range(pages), 4), "counters": column(range(pages), 8),
                }
            )
        )  # fmt: skip

    def facts(self, ticket: int, *facts: Fact, failure: str = "", peer: str = "", text: str = "") -> Event:
        bits = sum(facts)
        details = (FactDetailRow(ticket=ticket, failure=failure, text=text, peer=peer),) if failure else ()
        lines = 1 if bits else 0
        return self(
            FactsSeen(
                n=lines, ticket=column([ticket] * lines, 8), rank=column([0] * lines, 2),
                bits=column([bits] * lines, 4), lo=column([0] * lines, 4), hi=column([0] * lines, 4), details=details,
            )
        )  # fmt: skip

    def ended(self, ticket: int, arrived: int) -> Event:
        return self(
            OutcomeFixed(
                ticket=ticket, attempt=1, result="delivered", arrived=arrived, length_bytes=arrived << 16,
                evidence="completed",
            )
        )  # fmt: skip

    def outcome(self, transfer: str = "b-1", word: str = "settled", *, moved: int = 4) -> Event:
        return self(
            TransferOutcome.model_validate(
                {
                    "transfer": transfer, "request_hash": HASH, "source": "a", "destination": self.instance,
                    "outcome": word, "pages_wanted": 4, "pages_moved": moved, "length_bytes": moved << 16,
                }
            )
        )  # fmt: skip

    def life(self, ticket: int = 1, transfer: str = "b-1") -> list[Event]:
        """All that a transfer's destination records, from its first step to its outcome."""
        return [
            self.step("accepted", transfer),
            self.granted(ticket, transfer),
            self.facts(ticket, Fact.TAKEN, Fact.GRANTED),
            self.step("moving", transfer, "by ucx"),
            self.ended(ticket, 4),
            self.facts(ticket, Fact.TAKEN, Fact.GRANTED, Fact.SUBMITTED, Fact.DELIVERED, Fact.ACCESS_ENDED),
            self.facts(ticket, Fact.SETTLED, Fact.RETURNED),
            self.outcome(transfer),
        ]
