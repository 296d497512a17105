"""The bus over NATS: the only file that imports its client.

The promises are those of `kvbus.transport.Bus`. What is here beyond calling the client guards against its measured
faults: a callback that raises kills the connection without a word, an oversized message closes it for good, calls hang
through an outage. So every callback is wrapped, every message is measured first, every call has a bound, and a client
that closed is replaced (`kvbus.bus_link`) with all its subscriptions.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvbus import bus_guards as guards
from kvbus.bus_access import Access, Denials, TlsFiles, denied
from kvbus.bus_answers import Answers, Pulled, first
from kvbus.bus_assets import AssetLimits, Assets, WorkLimits
from kvbus.bus_guards import CONNECT_BUDGET_S, Crew, Tally
from kvbus.bus_jetstream import CALL_S, Fetched, JetStream
from kvbus.bus_link import RETRY_MAX_S, RETRY_MIN_S, Link
from kvbus.bus_routes import Routes
from kvbus.bus_streams import StreamCalls
from kvbus.errors import BusError
from kvbus.permissions import INBOX, User
from kvbus.topics import Topics
from kvbus.transport import (
    BusHealth,
    Delivery,
    Handler,
    NoAnswer,
    NotStored,
    Responder,
    Stored,
    Subscription,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ATTEMPT_S = 2
_PING_S, _PINGS_MISSED = 3, 2  # a half-open connection is found within ten seconds; the client's own is six minutes
_PENDING_MAX_BYTES = 8 << 20  # eight of the largest messages; the client's own 2 MiB hold two
_BUFFERED_CALM_BYTES = 1 << 20  # an eighth: below it a publish only appends to the client's buffer, and cannot wait
_DRAIN_S = 5
_CLOSED_GRACE_S = 0.5  # a closed client fails its calls at once
_ANSWERS_MAX = 64  # in progress at once: as many as a destination runs transfers; more requests wait their turn
_NOBODY_LISTENS = "503"
_PULL_ENDED = frozenset({"404", "408"})  # nothing there; the wait is over


class NatsBus(StreamCalls):
    """A bus over one NATS connection; make it with `await NatsBus.connect(url, name=…)`."""

    def __init__(
        self, url: str, name: str, access: Access, *, topics: Topics, limits: AssetLimits, work: WorkLimits
    ) -> None:
        self._url = url
        self._name = name
        self._access = access
        self._denials = Denials()
        self._prefix = topics.prefix
        self._tally = Tally(_log)
        self._routes: Routes[Msg] = Routes(
            self._call, self._denials, lambda: self._link.client, lambda: self._link.connected
        )
        self._link: Link[NatsClient] = Link(guards.shown(url), self._tally, self._open, self._routes.mend)
        self._streams = JetStream(self, Assets(topics, limits), work, self._tally)
        self._inboxes: dict[tuple[str, str], tuple[Pulled[Msg], NatsSubscription]] = {}
        self._answers: Answers[Msg] = Answers()
        self._answer_inbox = ""
        self._answering = Crew(_ANSWERS_MAX)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        credentials: Path | None = None,
        tls: TlsFiles | None = None,
        topics: Topics | None = None,
        limits: AssetLimits | None = None,
        work: WorkLimits | None = None,
    ) -> "NatsBus":
        """Return a connected bus, kept through any outage; BusError or ConfigError (old server) within ten seconds.

        Any node leads to its cluster; name several, with commas between, so that one of them may be away.
        """
        access = Access.of(token or None, user, password, credentials, tls)
        limits = limits or AssetLimits()
        bus = cls(url, name, access, topics=topics or Topics(), limits=limits, work=work or WorkLimits())
        await bus._link.start()
        return bus

    # -------------------------------------------------------------------------------------------------- messages

    async def publish(self, subject: str, data: bytes) -> None:
        """Send at most once; BusError while there is no connection or where the message is too long."""
        self._check(subject, data)
        await self.tell(subject, data)

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """Send into the subject's stream and await the ack; a message id, with the same `after`, is stored once.

        A lost ack is asked for again within the wait, with the same id. BusError when the wait ends without one: the
        message may be stored or not, so call again with the same id and the same `after`.
        """
        self._check(subject, data, guards.store_headers(message_id, after))
        return await self._streams.store(subject, data, message_id, wait_s, after)

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """Ask and await one answer."""
        self._check(subject, data)
        try:
            return (await self._request(subject, data, None, wait_s)).data
        except nats.errors.NoRespondersError:
            return NoAnswer("nobody_listens")
        except TimeoutError:
            return NoAnswer("late")

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Hear a subject or filter; active at the server when this returns. Handlers run one at a time, in order.

        A handler that raises is counted and logged, and hears the next message. It must not close its own subscription.
        """

        async def on_message(message: Msg) -> None:
            try:
                await handler(_delivery(message))
            except Exception as error:
                self._tally.complain("handler_raised", f"{subject}: {error!r}")

        return await self._routes.add(subject, on_message)

    async def respond(self, subject: str, responder: Responder) -> Subscription:
        """Answer requests on a subject, up to 64 at once over all subjects; later ones wait.

        A responder that raises answers nothing: it is counted, logged, and the requester's wait ends by itself.
        """

        async def on_message(message: Msg) -> None:
            await self._answering.begin(partial(self._answer, message, responder))

        return await self._routes.add(subject, on_message)

    async def _answer(self, message: Msg, responder: Responder) -> None:
        try:
            answer = await responder(_delivery(message))
            # Whoever asks chooses where the answer goes, and could send it where only this instance may speak.
            if message.reply.startswith(f"{INBOX}."):
                self._check(message.reply, answer)
                await self.tell(message.reply, answer)
        except Exception as error:
            self._tally.complain("responder_raised", f"{message.subject}: {type(error).__name__}: {error}")

    # ---------------------------------------------------------------------------------- the door for JetStream

    @property
    def closing(self) -> bool:
        """Whether this bus has ended, for waits that would otherwise sit an outage out."""
        return self._link.closing

    async def ask(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, wait_s: float) -> bytes:
        """Ask; TimeoutError if no answer comes, BusError where nobody could give one. Measures nothing."""
        try:
            return (await self._request(subject, data, headers, wait_s)).data
        except nats.errors.NoRespondersError as error:
            raise BusError("this broker has no stream for this: run `kvbus init` once", subject=subject) from error

    async def tell(self, subject: str, data: bytes) -> None:
        """Send without an answer. Measures nothing."""
        await self._send(subject, data)

    async def fetch(self, stream: str, consumer: str, *, most: int, wait_s: float) -> Sequence[Fetched]:
        """Pull until `most` came or the broker says that the wait is over; TimeoutError if nothing came."""
        inbox = await self._inbox(stream, consumer)
        pull = json.dumps({"batch": most, "expires": int(wait_s * 1e9)}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        fetched: list[Fetched] = []
        with self._denials.of("publish", subject) as refused:
            await self._send(subject, pull, reply=inbox.subject)
            while len(fetched) < most:
                try:
                    message = await inbox.next(wait_s + 1, refused)
                except TimeoutError:
                    await self.leave(stream, consumer)  # the pull is lost, or its answer will come late: to nobody
                    break
                except asyncio.CancelledError:
                    await self.leave(stream, consumer)  # what still comes is offered again to whoever asks next
                    raise
                if (status := (message.headers or {}).get("Status")) is None:
                    fetched.append(_fetched(message))
                    continue
                if not fetched and status not in _PULL_ENDED:
                    raise BusError("the broker ended a pull", consumer=consumer, status=status)
                break
            if refused.done():
                raise denied("publish", subject)
        if not fetched:
            raise TimeoutError
        return fetched

    async def leave(self, stream: str, consumer: str) -> None:
        """Stop listening for what a consumer delivers."""
        inbox = self._inboxes.pop((stream, consumer), None)
        if inbox is not None and self._link.connected:
            await self._call(inbox[1].unsubscribe())

    async def _inbox(self, stream: str, consumer: str) -> Pulled[Msg]:
        client = self._link.client
        if (found := self._inboxes.get((stream, consumer))) is None:
            pulled: Pulled[Msg] = Pulled(client.new_inbox())

            async def on_message(message: Msg) -> None:
                pulled.put(message)

            found = pulled, await self._call(client.subscribe(pulled.subject, cb=on_message))
            self._inboxes[stream, consumer] = found
        return found[0]

    async def _request(self, subject: str, data: bytes, headers: Mapping[str, str] | None, wait_s: float) -> Msg:
        with self._denials.of("publish", subject) as refused, self._answers.expected() as (token, answer):
            await self._send(subject, data, reply=f"{self._answer_inbox}.{token}", headers=headers)
            try:
                message = await first(answer, wait_s, refused)
            except TimeoutError:
                if refused.done():
                    raise denied("publish", subject) from None
                raise
        if not message.data and (message.headers or {}).get("Status") == _NOBODY_LISTENS:
            raise nats.errors.NoRespondersError
        return message

    async def _send(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply: str = "") -> None:
        client = self._link.client
        publishing = client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
        if client.pending_data_size > _BUFFERED_CALM_BYTES:
            await self._call(publishing)
            return
        with self._errors_as_ours():
            await publishing

    async def _on_answer(self, message: Msg) -> None:
        self._answers.take(message.subject.rpartition(".")[2], message)

    async def _on_reconnected(self) -> None:
        for pulled, _ in self._inboxes.values():  # the broker has forgotten what was pulled
            pulled.fail(TimeoutError())
        await self._link.on_reconnected()

    async def _on_closed(self) -> None:
        self._end_waits()
        await self._link.on_closed()

    def _end_waits(self) -> None:
        gone = BusError("the connection was closed while a call was in progress; call again once it is back")
        self._answers.fail(gone)
        for pulled, _ in self._inboxes.values():
            pulled.fail(gone)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            with self._errors_as_ours():
                return await self._link.calls.within(call, CALL_S)
        except TimeoutError as error:
            raise BusError("the client did not come back in time; call again", broker=self._link.where) from error

    @contextmanager
    def _errors_as_ours(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except (nats.errors.Error, OSError) as error:
            raise BusError("the client failed; call again", broker=self._link.where, reason=repr(error)) from error

    def _check(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        limit_bytes = min(guards.limit_for(subject, self._prefix), self._link.client.max_payload)
        guards.check_message(subject, data, headers, limit_bytes=limit_bytes)

    # --------------------------------------------------------------------------------- connection, subscriptions

    @property
    def user(self) -> User | None:
        """Whose credential this is, where it says so."""
        return self._access.credential.user if self._access.credential else None

    def health(self) -> BusHealth:
        """Say whether a message could be sent now, to which server, and what went wrong so far."""
        return BusHealth(self._link.connected, self._link.where, self._tally.counters())

    async def close(self) -> None:
        """Flush, stop subscriptions, disconnect; bounded, repeatable."""
        await self._answering.end(_DRAIN_S if self._link.connected else 0.0)
        self._link.closing = True  # refuses new calls; `connected` is false from here on
        self._end_waits()
        await self._link.close()
        await self._link.calls.end(_CLOSED_GRACE_S)

    async def _open(self) -> NatsClient:
        client = NatsClient()
        refused = asyncio.Event()
        last: list[Exception] = []
        opening = True

        async def on_error(error: Exception) -> None:
            if not last or not guards.is_of_tls(last[0]):  # which a broken pipe may follow, and says nothing
                last[:] = [error]
            if (what := self._denials.heard(error)) is not None:
                self._tally.complain(f"denied_{what[0]}", error)
                self._routes.note_denied(*what)
                return
            if "authorization" in str(error).lower():
                refused.set()
                error = guards.refused(self._link.where, error)
            if not opening:  # until then the last error tells the story
                await self._link.on_error(error)

        try:
            await self._connect(client, on_error, refused)
            opening = False
            version = client.connected_server_version
            guards.check_version((version.major, version.minor), self._link.where)
            self._end_waits()
            self._inboxes.clear()
            inbox = client.new_inbox()
            await self._call(client.subscribe(f"{inbox}.*", cb=self._on_answer))
            self._answer_inbox = inbox
            await self._routes.attach_all(client)
        except BaseException as error:
            await self._link.retire(client, drain=False)
            if isinstance(error, TimeoutError | nats.errors.Error | OSError):
                raise guards.unreachable(
                    self._link.where, last[-1] if last else error, credentials=refused.is_set()
                ) from error
            raise
        return client

    async def _connect(
        self, client: NatsClient, on_error: Callable[[Exception], Awaitable[None]], refused: asyncio.Event
    ) -> None:
        def elsewhere(servers: list[Server], _info: dict[str, object]) -> tuple[Server | None, float]:
            # The pool keeps its order: whoever asked for its first would ask a dead node of a cluster for ever.
            return min(servers, key=lambda one: one.reconnects), guards.jittered(RETRY_MIN_S, RETRY_MAX_S)

        connecting = client.connect(
            guards.nodes(self._url),
            name=self._name,
            error_cb=on_error,
            disconnected_cb=self._link.on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            connect_timeout=_ATTEMPT_S,
            reconnect_time_wait=1,  # between attempts of the first connect; later ones follow `elsewhere`
            max_reconnect_attempts=-1,
            reconnect_to_server_handler=elsewhere,
            ping_interval=_PING_S,
            max_outstanding_pings=_PINGS_MISSED,
            pending_size=_PENDING_MAX_BYTES,
            flush_timeout=_ATTEMPT_S,
            drain_timeout=_DRAIN_S,
            **self._access.options(),
        )
        # The client would try again for ever with credentials that the server has refused.
        await self._link.calls.within_unless(connecting, refused, CONNECT_BUDGET_S)


def _delivery(message: Msg) -> Delivery:
    headers = message.headers or {}
    sequence, last = (guards.number(headers.get(name)) for name in ("Nats-Sequence", "Nats-Last-Sequence"))
    return Delivery(message.subject, message.data, sequence, last)


def _fetched(message: Msg) -> Fetched:
    at = message.metadata
    delivery = Delivery(message.subject, message.data, at.sequence.stream)
    stored_s = at.timestamp.timestamp()
    return Fetched(delivery, at.num_delivered, at.sequence.consumer, at.num_pending, message.reply, stored_s)
