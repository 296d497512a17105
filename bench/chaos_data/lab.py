"""The parent's side: members under names, transfers between them, and what is checked when a run has ended."""

import heapq
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.chaos_data.content import Eye, names_of
from bench.chaos_data.house import FaultError, House, wait_for
from bench.chaos_data.planes import FRAME
from bench.chaos_data.records import Described, End, HandOver, MemberSettings, Sealed, Standing
from bench.chaos_data.table import Row
from kvbus.commands.audit import lines
from kvbus.commands.auditing import Verdict, audit
from kvbus.commands.recordings import Record, Stored
from kvbus.errors import PeerError
from kvbus.events import LendAnswered, LendRequested, ReaderKey, decode
from kvbus.grants import Expected
from kvbus.names import epoch_from
from kvbus.topics import Family

EVIDENCE_S = 60.0
"""How long evidence is waited for: six times as long as any bound of the data plane."""
REST_S = 60.0
ROWS = 128
RATE_BYTES_S = 16 << 20
"""Half a second for the usual 128 pages of 64 KiB, so that a fault meets any moment of it."""


@dataclass(slots=True)
class Seat:
    """One member of one house."""

    house: House
    number: int = 0

    def ask(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401 - as the pipe gives it
        """Call the member."""
        return self.house.ask(verb, *arguments, member=self.number)

    @property
    def settings(self) -> MemberSettings:
        """What it was started with."""
        return self.house.settings[self.number]

    @property
    def told(self) -> Described:
        """What it tells of itself."""
        return self.house.described[self.number]


@dataclass(slots=True)
class Transfer:
    """One transfer that has begun: `rows` of `names` into `pages` of the destination."""

    source: Seat
    destination: Seat
    key: ReaderKey
    nonce: bytes
    names: tuple[bytes, ...]
    answer: LendAnswered
    ticket: int = 0
    pages: tuple[int, ...] = ()

    @property
    def sealed(self) -> Sealed:
        """The grant as it came, and the key that the registry would name."""
        return self.answer.grant, self.answer.signature, self.source.told.verify_key

    @property
    def expected(self) -> Expected:
        """What the destination has asked for."""
        source, destination = self.source, self.destination
        return Expected(
            reader=self.key,
            lender_instance=source.settings.instance,
            lender_epoch=source.settings.epoch,
            fingerprint=destination.told.fingerprint,
            page_bytes=destination.settings.page_bytes,
            names_asked=len(self.names),
        )

    def end(self) -> End:
        """Wait until the destination knows that its access has ended."""
        found = self.end_within(EVIDENCE_S)
        if found is None:
            raise FaultError(f"{self.key.transfer} has not ended at its reader after {EVIDENCE_S:g} s")
        return found

    def end_within(self, wait_s: float) -> End | None:
        """As `end`, but None where it does not end in time."""
        try:
            found: End = wait_for(lambda: self.destination.ask("end_of", self.ticket), wait_s, "")
        except FaultError:
            if not self.destination.house.process.is_alive():
                raise
            return None
        return found

    def cancel(self) -> float:
        """Ask the destination to stop it; return when that was."""
        at: float = self.destination.ask("cancel", self.ticket)
        return at

    def lent_end(self) -> End:
        """Wait until the source knows that access has ended."""
        found: End = wait_for(
            lambda: self.source.ask("lent_end", self.key.transfer),
            EVIDENCE_S,
            f"{self.key.transfer} ends at its source",
        )
        return found

    def tell(self) -> None:
        """Pass the reader's word on, as the bus does; harmless where it came in band before."""
        self.source.ask("released", self.key, self.nonce)


@dataclass(slots=True)
class Lab:
    """Houses of one run of a fault; its end checks everything and ends them."""

    row: Row
    chance: random.Random
    plant: str = ""
    houses: list[House] = field(default_factory=list)
    eyes: dict[tuple[int, int], Eye] = field(default_factory=dict)
    _folder: Any = None
    _counts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Check, end and audit; a fault that did not come about as it should is a problem of the row."""
        try:
            if isinstance(error, FaultError):
                self.row.problems.append(str(error))
                for seat in self.living():
                    seat.house.go_on()  # the fault may have broken off while it stood still
            if error is None or isinstance(error, FaultError):
                self._check()
        except FaultError as problem:
            self.row.problems.append(str(problem))
        finally:
            self.row.aborted += sum(house.end() for house in self.houses)
            for eye in self.eyes.values():
                eye.close()
        if error is None or isinstance(error, FaultError):
            self._audit()
        self._folder.cleanup()
        return isinstance(error, FaultError)

    # ------------------------------------------------------------------------------------------------------- members

    def seat(self, instance: str, transport: str, **chosen: Any) -> Seat:  # noqa: ANN401 - fields of MemberSettings
        """Start one member in a process of its own."""
        return Seat(self.house([self.member(instance, transport, **chosen)]))

    def member(self, instance: str, transport: str, **chosen: Any) -> MemberSettings:  # noqa: ANN401 - as above
        """Return settings with an epoch and a file of their own."""
        number = next(self._counts)
        epoch = epoch_from(number, self.chance.getrandbits(32))
        facts = Path(self._folder.name) / f"{number:03}.{instance}"
        return MemberSettings(instance=instance, epoch=epoch, transport=transport, facts=facts, **chosen)

    def house(self, members: Sequence[MemberSettings]) -> House:
        """Start a process with these members."""
        house = House(members, self.plant)
        self.houses.append(house)
        return house

    def again(self, seat: Seat) -> Seat:
        """Start the next run of a member under the same name."""
        old = seat.settings
        fresh = self.member(old.instance, old.transport)
        return Seat(self.house([replace(old, epoch=fresh.epoch, facts=fresh.facts)]))

    def eye(self, seat: Seat) -> Eye:
        """Look into a member's pool from outside."""
        key = (seat.told.process.pid, seat.number)
        if key not in self.eyes:
            self.eyes[key] = Eye(seat.told.window)
        return self.eyes[key]

    # ----------------------------------------------------------------------------------------------------- transfers

    def offer(self, source: Seat, destination: Seat, *, tag: str = "", rows: int = ROWS) -> Transfer:
        """Have a source lend so many fresh pages to a destination; nothing is read yet."""
        name = tag or f"{self.row.fault} {next(self._counts)}"
        names = names_of(name, rows)
        if not tag:
            refused = source.ask("write", names)
            if refused:
                raise FaultError(f"the source could not write {rows} pages: {refused}")
        key = ReaderKey(
            instance=destination.settings.instance,
            member="m0",
            epoch=destination.settings.epoch,
            transfer=f"t{next(self._counts)}",
            attempt=1,
            rank=0,
        )
        nonce = self.chance.randbytes(16)
        asked = LendRequested(
            key=key,
            nonce=nonce,
            fingerprint=destination.told.fingerprint,
            names=b"".join(names),
            first_block=0,
            on_miss="partial",
            budget_s=30.0,
            wait_s=0.0,
            process=destination.told.process,
            source_epoch=source.settings.epoch,
            transports=(destination.told.transport,),
        )
        answer: LendAnswered = source.ask("lend", asked)
        if answer.status != "granted":
            raise FaultError(f"nothing was lent: {answer.reason}")
        return Transfer(source, destination, key, nonce, names, answer)

    def begin(
        self, source: Seat, destination: Seat, *, tag: str = "", rows: int = ROWS, hand_to: Sequence[bytes] = ()
    ) -> Transfer:
        """Begin a transfer of fresh pages, or of pages that the source holds under a tag."""
        transfer = self.offer(source, destination, tag=tag, rows=rows)
        transfer.ticket, transfer.pages = destination.ask(
            "fetch", transfer.sealed, transfer.expected, transfer.names, tuple(hand_to)
        )
        if not transfer.pages:
            raise FaultError(f"no pages were had: {destination.ask('refusal_of', transfer.ticket)}")
        return transfer

    def until_share(self, transfer: Transfer, share: float) -> None:
        """Wait until that share of a transfer's rows has begun to arrive, or it has ended."""
        eye, wanted = self.eye(transfer.destination), max(1, int(share * len(transfer.names)))

        def there() -> bool:
            return eye.begun(transfer.pages, transfer.names) >= wanted or bool(
                transfer.destination.ask("end_of", transfer.ticket)
            )

        wait_for(there, EVIDENCE_S, f"{share:.0%} of {transfer.key.transfer} arrive")

    def whole(self, transfer: Transfer) -> End:
        """Wait until a transfer has ended, tell its source, and demand that it has brought every page."""
        end = transfer.end()
        transfer.tell()
        self.row.check(end.result == "delivered" and not end.text, f"{transfer.key.transfer}: {end.result}: {end.text}")
        return end

    def handed_over(self, transfer: Transfer) -> None:
        """Demand that the content which waited for a transfer's pages has them, and had none while they were read."""

        def taken() -> HandOver | None:
            found: HandOver = transfer.destination.ask("hand_over_of", transfer.ticket)
            return found if found.taken_at else None

        found: HandOver = wait_for(taken, EVIDENCE_S, "the pages are handed to new content")
        self.row.check(not found.refused, f"the pages were not had although access has ended: {found.refused}")
        self.row.check(not found.too_early, f"the pages could be had {found.too_early} times before access had ended")
        self.row.check(found.looks, "nobody tried to have the pages while they were read")

    def links(self, seat: Seat) -> int:
        """Count a reader's endpoints, connections or mappings: one a source and epoch."""
        counted: dict[str, int] = seat.ask("counted")
        return next(counted[name] for name in ("endpoints", "connections", "mappings") if name in counted)

    def is_lent_back(self, transfer: Transfer) -> bool:
        """Whether the source counts the lease as ended now."""
        return transfer.source.ask("lent_end", transfer.key.transfer) is not None

    def share(self) -> float:
        """Choose a moment of a transfer."""
        return self.chance.uniform(0.02, 0.98)

    # --------------------------------------------------------------------------------------------------- at the end

    def living(self) -> list[Seat]:
        """Return the members whose processes were not killed, and have not ended by themselves."""
        return [
            Seat(house, number)
            for house in self.houses
            if not (house.was_killed or house.was_lost)
            for number in range(len(house.settings))
        ]

    def at_rest(self, *seats: Seat) -> None:
        """Wait until nothing is lent or written at these members, or at all that live."""
        for seat in seats or self.living():

            def rests(seat: Seat = seat) -> bool:
                standing: Standing = seat.ask("standing")
                return not standing.out and not standing.held

            try:
                wait_for(rests, REST_S, "")
            except FaultError:
                standing: Standing = seat.ask("standing")
                self.row.pages_leaked += standing.out
                text = f"{seat.settings.instance}: {standing.held} leases and {standing.out} pages are out for good"
                self.row.problems.append(text)

    def look(self, *seats: Seat) -> None:
        """Compare every page of these members, or of all that live, with what its name says, and check their books."""
        for seat in seats or self.living():
            standing: Standing = seat.ask("standing")
            self.row.check(not standing.fault, f"{seat.settings.instance}: {standing.fault}")
            self.row.bytes_wrong += self.eye(seat).wrong_bytes(standing.content)

    def _check(self) -> None:
        self.at_rest()
        self.look()
        for seat in self.living():
            if seat.number == 0:
                seat.ask("flush")

    def _audit(self) -> None:
        """Audit what all members recorded, as if one broker had stored it."""
        result = audit(record_of(sorted(Path(self._folder.name).iterdir())))
        self.row.audits += 1
        if result.verdict is not Verdict.CLEAN:
            self.row.audits_unclean += 1
            self.row.problems.append(f"audit {result.verdict.value}: " + "; ".join(itertools.islice(lines(result), 3)))


def record_of(files: Sequence[Path]) -> Record:
    """Return what the files of several members hold as one record, in the order of time."""
    record = Record(end_ns=time.time_ns())
    numbers = dict.fromkeys(Family, 0)
    for _, subject, data in heapq.merge(*map(_frames, files), key=lambda frame: frame[0]):
        family = Family.FACTS if ".facts." in subject else Family.SETTLE
        numbers[family] += 1
        record.stored += Stored(family, numbers[family], subject, data).events()
    return record


def _frames(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Yield time, subject and bytes of each event; a frame that a kill cut short is none."""
    raw, at = path.read_bytes(), 0
    while at + FRAME.size <= len(raw):
        name_bytes, data_bytes = FRAME.unpack_from(raw, at)
        at += FRAME.size
        if at + name_bytes + data_bytes > len(raw):
            return
        subject, data = raw[at : at + name_bytes].decode(), raw[at + name_bytes : at + name_bytes + data_bytes]
        at += name_bytes + data_bytes
        try:
            yield decode(data).header.t, subject, data
        except PeerError as error:
            raise FaultError(f"{path.name} holds no event: {error}") from error


@contextmanager
def ballast(length_bytes: int) -> Iterator[int]:
    """Keep a process beside that takes, touches and gives back so much memory, over and over; yields its pid."""
    pid = os.posix_spawn(
        "/proc/self/exe", [os.fspath("python"), "-c", _BALLAST, str(length_bytes)], {**os.environ, "PYTHONPATH": ""}
    )
    try:
        yield pid
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


_BALLAST = """
import mmap, sys
length = int(sys.argv[1])
while True:
    memory = mmap.mmap(-1, length)
    for at in range(0, length, mmap.PAGESIZE):
        memory[at] = 1
    memory.close()
"""
