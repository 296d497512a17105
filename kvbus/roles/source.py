"""The source: answers who asks to borrow pages, and takes back what readers have let go of.

Everything between the look-up and the grant is one synchronous step on the loop that owns the pool: found, pinned, in
which generation, marked as accessed, signed (P9, contract 42). A repeat of a question gets the same answer (P18).
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvbus.dataplane.lending import LendingBackend, Reader
from kvbus.errors import KvbusError, PeerError
from kvbus.events import Event, LeaseReleased, LendAnswered, LendRequested, ReaderKey, ReleaseConfirmed, column
from kvbus.grants import Grant, LenderKey
from kvbus.ledger.facts import Fact, FailureClass
from kvbus.ledger.lending import Key, LendBook, LendEntry, LendState
from kvbus.ledger.types import Direction, LeaseFailure, LeaseView, SubmitMode
from kvbus.names import NAME_LENGTH_BYTES, names_from_bytes, tokens_from_bytes
from kvbus.processes import ProcessWatch
from kvbus.roles.digesting import Digester
from kvbus.roles.doubts import Doubts
from kvbus.roles.offers import LenderName, Offer, PoolAccess, key_of, looks
from kvbus.roles.poolside import PoolSide
from kvbus.roles.prefills import Prefiller
from kvbus.roles.questions import WaitingQuestions
from kvbus.roles.readers import KnownReaders
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.roles.tasks import Tasks
from kvbus.roles.tokens import names_answered

__all__ = ["LEND_MODE", "Fenced", "LenderName", "PoolAccess", "Source", "key_of"]

LEND_MODE = SubmitMode("lending", Direction.READ)

TEXT_LENGTH_MAX = 2_000

_KNOWN, _UNKNOWN = ReleaseConfirmed(known=True), ReleaseConfirmed(known=False)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fenced:
    """What came of fencing one reader: the tickets that went back, and why others did not."""

    tickets: tuple[int, ...]
    refused: dict[int, str]


class Source:
    """Lends the pool's pages to readers of other instances."""

    def __init__(
        self,
        *,
        name: LenderName,
        pool: PoolSide,
        access: PoolAccess,
        rounds: Rounds,
        lending: LendingBackend,
        key: LenderKey,
        book: LendBook,
        prefiller: Prefiller,
        recorder: Recorder,
        watch: ProcessWatch,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._pool = pool
        self._geometry = pool.geometry()
        self._digester = Digester(pool.memory)
        self._doubts = Doubts(pool, recorder)
        self._access = access
        self._rounds = rounds
        self._lending = lending
        self._key = key
        self._book = book
        self._prefiller = prefiller
        self._recorder = recorder
        self._clock = clock
        self._questions = WaitingQuestions()
        self._tasks = Tasks()
        self._readers = KnownReaders(
            watch, is_served=lambda who: bool(book.keys_of(*who)), on_death=lambda who: self.reader_died(*who)
        )
        self._draining = False

    # ------------------------------------------------------------------------------------------------------ answers

    async def answer(self, event: Event) -> bytes:
        """Answer one message on the lease subject; PeerError for a kind that does not belong there."""
        body = event.body
        if isinstance(body, LendRequested):
            if event.header.i != body.key.instance:
                raise PeerError("a question in another's name", sender=event.header.i, key=body.key.instance)
            answer = await self._lend(body)
            return self._recorder.encoded(answer, event.header.event_id)
        if isinstance(body, LeaseReleased):
            key, nonce, found = body.key, body.nonce, body.found
            known = self.released(key, nonce)
            if found is not None and self._book.is_closed(key_of(key), nonce):
                self._doubts.note(key, found)
            return self._recorder.encoded(_KNOWN if known else _UNKNOWN, event.header.event_id)
        if (named := names_answered(self._pool, body, self._name.instance)) is not None:
            return self._recorder.encoded(named, event.header.event_id)
        raise PeerError("expected lend_requested, lease_released or prefix_asked", kind=event.header.k)

    def released(self, key: ReaderKey, nonce: bytes) -> bool:
        """Take a reader's word that its access has ended, from the bus or in band; idempotent.

        The nonce of its own question makes it the reader's word; with another one it is nobody's, and changes nothing.
        """
        book_key = key_of(key)
        entry = self._book.find(book_key)
        if entry is not None and not hmac.compare_digest(entry.nonce, nonce):
            return False
        if entry is not None and entry.state is LendState.GRANTED:
            if not self._lending.acknowledge(key, nonce):
                return False
            self._book.close(book_key, nonce)
            self._rounds.run()
            return True
        if entry is not None and entry.state is LendState.FENCED:
            self._lending.acknowledge(key, nonce)
            self._pool.lender.lift(entry.lease_id)
        # Nothing is lent under this key: the tombstone keeps a question that is still under way, or a computation that
        # has not ended, from lending.
        self._book.close(book_key, nonce)
        self._questions.wake(book_key)
        return True

    def reader_died(self, instance: str, member: str, epoch: int) -> None:
        """A reader's process is proved dead: nothing of it reads any more."""
        self._readers.forget((instance, member, epoch))
        for key in self._book.keys_of(instance, member, epoch):
            if entry := self._book.find(key):
                if entry.state is LendState.FENCED:
                    self._pool.lender.lift(entry.lease_id)
                self._book.close(key, entry.nonce)
            self._questions.wake(key)
        if self._lending.reader_died(instance, member, epoch):
            self._rounds.run()

    def fence(self, instance: str, member: str, epoch: int, text: str) -> Fenced:
        """Isolate a reader and take back what it was lent, although it may still read: it can deliver none of it (P5).

        Only somebody who knows that this reader stays silent asks for it: an operator, or an orchestrator that has lost
        its host. No time that passes does. What is written into its pages until it speaks, or is proved dead, is of the
        salt that it was lent.
        """
        holder, tickets = self._rounds.holder, list[int]()
        refused: dict[int, str] = {}
        self._lending.isolate_epoch(instance, epoch)
        for key in self._book.keys_of(instance, member, epoch):
            entry = self._book.find(key)
            if entry is None or entry.state is not LendState.GRANTED:
                continue
            if refusal := holder.fence(entry.ticket, text):
                refused[entry.ticket] = refusal
            else:
                self._book.fence(key)
                tickets.append(entry.ticket)
        self._rounds.run()
        return Fenced(tuple(tickets), refused)

    def tick(self) -> None:
        """Drop reported pages that nobody has any more; called each round, and free where there are none."""
        self._doubts.drop()

    def stop_lending(self) -> None:
        """Refuse new questions from now on; what is lent stays until its reader lets go."""
        self._draining = True

    def lend_again(self) -> None:
        """Answer new questions again."""
        self._draining = False

    @property
    def computing(self) -> int:
        """Questions whose pages are being computed or digested: what comes of them is lent, or let go."""
        return len(self._tasks)

    async def close(self) -> None:
        """End what still computes; bounded by the cancellation itself."""
        await self._tasks.close()
        await self._digester.close()

    # -------------------------------------------------------------------------------------------------------- steps

    async def _lend(self, asked: LendRequested) -> LendAnswered:
        key, nonce = key_of(asked.key), asked.nonce
        if self._book.is_closed(key, nonce):
            return _refused(FailureClass.CANCELLED, "this reader has said before that its access has ended")
        entry = self._book.find(key)
        if entry is None:
            refusal = self._refusal(asked)
            if refusal is not None:
                return refusal
            entry = self._book.open(key, nonce, now=self._clock())
            try:
                self._decide(asked, entry)
            except ValueError as error:  # names or positions that no prompt has; nothing was lent
                entry.refusal = (FailureClass.BAD_REQUEST.name.lower(), str(error))
            except Exception:  # a fault of ours, told as such; nothing was lent, and the key is free again
                self._book.forget(key)
                raise
        elif not hmac.compare_digest(entry.nonce, nonce):
            # The grant carries the nonce by which its reader ends the lease: it is for nobody else's eyes.
            return _refused(FailureClass.GRANT_REFUSED, "this key is in use, under another nonce")
        if entry.state is LendState.COMPUTING and entry.refusal is None and asked.wait_s > 0:
            await self._questions.wait(key, asked.wait_s)
        return self._answer(key, entry)

    def _answer(self, key: Key, entry: LendEntry) -> LendAnswered:
        """Say where an entry stands; a refusal is said once, and the key may then be asked for again."""
        if entry.state is LendState.GRANTED:
            return LendAnswered(status="granted", grant=entry.grant, signature=entry.signature)
        if entry.refusal is not None:
            if self._book.find(key) is entry:  # another question may have it by now, whose entry is its own
                self._book.forget(key)
            return LendAnswered(status="refused", failure=entry.refusal[0], reason=entry.refusal[1][:TEXT_LENGTH_MAX])
        if entry.state is LendState.FENCED:
            return _refused(FailureClass.PEER_LOST, f"{self._name.instance} has fenced this reader")
        if entry.state is LendState.CLOSED:
            return _refused(FailureClass.CANCELLED, "the reader closed this key meanwhile")
        return LendAnswered(status="computing")

    def _refusal(self, asked: LendRequested) -> LendAnswered | None:
        """Return why this question leads to nothing, before anything is touched."""
        if self._draining:
            return _refused(FailureClass.SHUTDOWN, f"draining: {self._name.instance} is leaving and lends no more")
        if asked.source_epoch not in {None, self._name.epoch}:
            # Its reader takes no grant of ours, and stops telling us of its end once the run it asked is gone (P18).
            return _refused(FailureClass.PEER_LOST, f"{self._name.instance} has started again since you looked")
        mine = self._pool.layout.fingerprint()
        if asked.fingerprint != mine:
            text = f"layout fingerprints differ: {self._name.instance} has {mine}, you have {asked.fingerprint}"
            return _refused(FailureClass.GRANT_REFUSED, text)
        names = asked.names
        if not names or len(names) % NAME_LENGTH_BYTES:
            return _refused(FailureClass.BAD_REQUEST, f"names must be whole names of {NAME_LENGTH_BYTES} bytes")
        self._book.sweep(self._clock())
        if self._book.is_full():
            return _refused(FailureClass.LEASE_REFUSED, f"{len(self._book)} readers are being served; try again later")
        unknown = self._readers.refusal(asked)
        return None if unknown is None else _refused(*unknown)

    def _decide(self, asked: LendRequested, entry: LendEntry) -> None:
        """Lend at once where that is possible; otherwise say why not, or start to compute."""
        names = names_from_bytes(asked.names)
        pages = self._pool.lender.pages_held(names)
        held, on_miss = len(pages), asked.on_miss
        if held == len(names) or (on_miss == "partial" and held):
            self._lend_digested(asked, entry, names, pages)
        elif on_miss == "prefill":
            self._start_prefill(asked, entry, len(names) - held)
        else:
            text = (
                f"{self._name.instance} holds {held} of the {len(names)} blocks, and on_miss is {on_miss!r}: "
                "on_miss 'prefill' lets it compute them"
            )
            entry.refusal = (FailureClass.SOURCE_MISSES.name.lower(), text)

    def _lend_digested(
        self, asked: LendRequested, entry: LendEntry, names: tuple[bytes, ...], pages: Sequence[int]
    ) -> None:
        """Lend at once, or as soon as the pages have their digests; they are pinned until then (P9)."""
        if self._digester.ready(pages):
            self._lend_now(asked, entry, names)
            return
        pins = self._pool.kept(pages)
        if isinstance(pins, LeaseFailure):
            entry.refusal = (pins.failure.name.lower(), pins.text)
            return
        on_fault = partial(self._faulted, asked, entry)
        task = self._tasks.start(self._digest(asked, entry, pins.pages), name="digesting", on_fault=on_fault)
        task.add_done_callback(lambda _task: pins.drop())

    def _held(self, asked: LendRequested) -> list[int]:
        return self._pool.lender.pages_held(names_from_bytes(asked.names))

    async def _digest(self, asked: LendRequested, entry: LendEntry, pages: tuple[int, ...]) -> None:
        try:
            await self._digester.make(pages)
            while entry.state is LendState.COMPUTING and not self._digester.ready(self._held(asked)):
                await self._digester.make(self._held(asked))  # some were stored anew meanwhile
            if entry.state is LendState.COMPUTING:
                self._lend_now(asked, entry)
        except ValueError as error:
            entry.refusal = (FailureClass.BAD_REQUEST.name.lower(), str(error))
        finally:
            self._questions.wake(key_of(asked.key))

    async def _digest_kept(self, pages: Sequence[int]) -> LeaseFailure | None:
        """Make the digests of pages that were computed for a peer, and count them as its own meanwhile (P26)."""
        pins = self._pool.kept(pages)
        if isinstance(pins, LeaseFailure):
            return pins
        try:
            await self._digester.make(pages)
        finally:
            pins.drop()
        return None

    def _lend_now(self, asked: LendRequested, entry: LendEntry, names: tuple[bytes, ...] = ()) -> None:
        holder, names = self._rounds.holder, names or names_from_bytes(asked.names)
        lease = self._pool.lender.lend_read(names, asked.first_block, whole=asked.on_miss == "prefill")
        key, offer = asked.key, self._access.offer(asked)
        reader = Reader(
            key,
            asked.nonce,
            asked.process,
            looks(asked),
            secret=offer.secret,
            by_socket_only=offer.by_socket_only,
        )
        ticket = holder.take(lease, LEND_MODE, reader, now=self._clock(), peer=key.instance, transfer=key.transfer)
        self._rounds.run()
        view = holder.view(ticket)
        if view is None or not view.pages or not holder.bits(ticket) & Fact.SUBMITTED:
            text = lease.failure.text if lease.failure else f"{self._name.instance} takes no new readers now"
            entry.refusal = (FailureClass.LEASE_REFUSED.name.lower(), text)
            self._lending.withdraw(ticket)
            self._rounds.run()
            return
        try:
            data, signature = self._key.seal(self._grant(reader, ticket, view, offer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the grant never left
            entry.refusal = (FailureClass.LEASE_REFUSED.name.lower(), str(error))
            self._lending.withdraw(ticket)
            self._rounds.run()
            return
        self._book.grant(key_of(key), ticket=ticket, grant=data, signature=signature, lease_id=lease.lease_id)

    def _grant(self, reader: Reader, ticket: int, view: LeaseView, offer: Offer) -> Grant:
        digests = self._digester.column(view)
        return Grant(
            lender_instance=self._name.instance,
            lender_member=self._name.member,
            lender_epoch=self._name.epoch,
            reader=reader.key,
            ticket=ticket,
            rank=view.rank,
            fingerprint=self._pool.layout.fingerprint(),
            nonce=reader.nonce,
            pool=self._geometry,
            pages=column(view.pages, 4),
            counters=column(view.counters, 8),
            ucx=offer.ucx,
            memory=offer.memory,
            socket=offer.socket,
            checked=reader.checked,
            digests=None if digests is None else column(digests, 8),
        )

    # ------------------------------------------------------------------------------------------------------ prefill

    def _start_prefill(self, asked: LendRequested, entry: LendEntry, blocks: int) -> None:
        # Pins are never refused, so the room is checked before the work whose result they will keep.
        failure = self._pool.lender.refusal(blocks, salt=asked.salt)
        if failure is not None:
            entry.refusal = (failure.failure.name.lower(), f"{self._name.instance}: {failure.text}")
            return
        self._tasks.start(self._prefill(asked, entry), name="prefill", on_fault=partial(self._faulted, asked, entry))

    def _faulted(self, asked: LendRequested, entry: LendEntry, text: str) -> None:
        """Something broke before anything was lent: a refusal, so that whoever asks hears of it and the key goes."""
        if entry.state is LendState.COMPUTING:
            entry.refusal = (FailureClass.LEASE_REFUSED.name.lower(), f"{self._name.instance}: {text}")
        self._questions.wake(key_of(asked.key))

    async def _prefill(self, asked: LendRequested, entry: LendEntry) -> None:
        key = key_of(asked.key)
        try:
            token_ids = tokens_from_bytes(asked.tokens)
            lend = partial(self._lend_computed, asked, entry)
            await self._prefiller.computed(token_ids, asked.salt, lend, wait_s=asked.budget_s)
        except (KvbusError, ValueError) as error:
            log.warning("prefill for %s failed: %s", asked.key.transfer, error, extra={"transfer": asked.key.transfer})
            entry.refusal = (FailureClass.ENGINE_LOST.name.lower(), f"{self._name.instance}: {error}")
        finally:
            self._questions.wake(key)

    async def _lend_computed(self, asked: LendRequested, entry: LendEntry, failed: LeaseFailure | None) -> None:
        refused = failed or await self._digest_kept(self._held(asked))
        if entry.state is not LendState.COMPUTING:
            return  # the reader has gone: nothing is lent
        if refused is not None:
            entry.refusal = (refused.failure.name.lower(), f"{self._name.instance}: {refused.text}")
        else:
            self._lend_now(asked, entry)


def _refused(failure: FailureClass, text: str) -> LendAnswered:
    return LendAnswered(status="refused", failure=failure.name.lower(), reason=text[:TEXT_LENGTH_MAX])
