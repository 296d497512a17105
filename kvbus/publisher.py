"""The requester's door: ask a destination to take a prompt's KV from a source, and await what comes of it.

A request goes into a durable queue, so the destination may be away. What it says comes back on the requester's own
subject: first a verdict, then the outcome.
"""

import asyncio
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from kvbus import tracing
from kvbus.bus import NatsBus
from kvbus.config import discover, discover_credentials, named_credentials
from kvbus.errors import BusError, PeerError
from kvbus.events import (
    REQUEST_LENGTH_MAX_BYTES,
    Event,
    Header,
    Message,
    Prompt,
    TransferCancelRequested,
    TransferOutcome,
    TransferRequested,
    TransferVerdict,
    decode,
    encode,
)
from kvbus.handles import UNASKED, TransferHandle, Verdict
from kvbus.names import TOKEN_ID_MAX, request_hash, token_bytes
from kvbus.parts import Body, OnMiss
from kvbus.patience import Staged, staged
from kvbus.permissions import Role
from kvbus.submitting import Rooms, Submissions
from kvbus.topics import Command, Topics, escape
from kvbus.transport import Bus, Delivery, NoAnswer, NotStored, Subscription

__all__ = ["Publisher", "TransferHandle", "Verdict", "checked_prompt", "transfer_and_wait"]

ANSWER_S = 5.0
"""A destination answers a direct question between two rounds, within milliseconds; this long only when overloaded."""

Asked = str | Sequence[int] | Sequence[dict[str, str]] | Prompt
"""A prompt as a requester gives it: text, token ids, chat messages, or as it travels."""

_HEADERS_BYTES = 512  # what the broker's headers may add to a request; the id in them is at most 200 bytes
_TEXT_MAX = 200


class Publisher:
    """Publishes transfer requests; use it as `async with Publisher() as publisher`.

    With neither a bus nor a URL it finds the broker that `kvbus up` started on this host.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        requester: str | None = None,
        *,
        bus: Bus | None = None,
        topics: Topics | None = None,
    ) -> None:
        self._url = url
        self._token = token
        self._named = bool(requester)
        self.requester = requester or f"requester-{secrets.token_hex(8)}"
        self._given_bus = bus
        self._bus: Bus | None = None
        self._topics = topics or Topics()
        self._subscription: Subscription | None = None
        # A requester has no epoch, so a random start keeps the ids of two runs under one name apart.
        self._sequence = secrets.randbits(60)
        self._handles: weakref.WeakSet[TransferHandle] = weakref.WeakSet()
        self._rooms = Rooms(self._topics)
        self._submissions = Submissions()
        self.malformed = 0

    async def __aenter__(self) -> Self:
        """Connect and listen for results; BusError or ConfigError within ten seconds says what is wrong."""
        escape(self.requester)
        self._bus = self._given_bus or await self._connect()
        user = self._bus.user if isinstance(self._bus, NatsBus) else None
        if user is not None and user.role is Role.REQUESTER and not self._named:
            self.requester = user.name  # it hears the results of this name, and of no other
        try:
            self._subscription = await self._bus.subscribe(self._topics.result(self.requester), self._hear)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; a bus that was given stays open."""
        await self.close()

    async def close(self) -> None:
        """Stop listening and, if we made the connection, end it; repeatable."""
        self._submissions.close()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.close()
        bus, self._bus = self._bus, None
        if bus is not None and bus is not self._given_bus:
            await bus.close()

    async def transfer(
        self,
        *,
        source: str,
        destination: str,
        prompt: Asked,
        model: str = "",
        salt: str = "",
        on_miss: OnMiss = "prefill",
        budget_s: float = 30.0,
        urgent: bool = False,
    ) -> TransferHandle:
        """Ask `destination` to take the KV of a prompt from `source`; returns once the request is durable or answered.

        The prompt is text, token ids, or chat messages with `role` and `content`. An urgent request is put to the
        destination itself: it is quicker, and lost if nobody is there. While the broker is away the answer is a verdict
        too, at once, with `bus_unavailable` as its reason. ValueError names a field that does not fit; BusError means
        that the broker would not take the request.
        """
        bus = self._running()
        request = self._request(source, destination, prompt, model, salt=salt, on_miss=on_miss, budget_s=budget_s)
        about = {"request_hash": request.request_hash, "source": source, "destination": destination}
        span = tracing.begin("kvbus.request", tracing.current(), about, kind="producer")
        request = request.model_copy(update={"traceparent": span.traceparent}) if span.traceparent else request
        try:
            return await self._submit(bus, request, urgent=urgent)
        finally:
            span.end()

    async def _submit(self, bus: Bus, request: TransferRequested, *, urgent: bool) -> TransferHandle:
        header = self._header(request)
        data = encode(header, request)
        if len(data) + _HEADERS_BYTES > REQUEST_LENGTH_MAX_BYTES:
            raise ValueError(
                f"prompt makes a request of {len(data)} bytes, expected at most "
                f"{REQUEST_LENGTH_MAX_BYTES - _HEADERS_BYTES}: shorten it, or send token ids (4 bytes each)"
            )
        handle = TransferHandle(request)
        self._handles.add(handle)
        if not bus.health().connected:
            handle.hear_verdict(Verdict("refused", UNASKED))
            return handle
        submit = partial(self._ask_directly if urgent else self._queue, bus, handle, data)
        if not await self._submissions.unless_away(submit, bus, handle.hear_submitted):
            handle.hear_unsure()
        return handle

    async def stage(
        self,
        *,
        source: str,
        destination: str,
        prompt: Asked,
        salt: str = "",
        on_miss: OnMiss = "prefill",
        budget_s: float = 30.0,
        patience_s: float = 60.0,
    ) -> Staged:
        """Ask as `transfer` does, and again where a restart, a drain or load has refused it, for up to `patience_s`.

        So a rolling restart of all instances fails no request. What the members of an instance have voided, as they do
        while one of them leaves, is asked again too. What cannot pass by itself ends at once.
        """

        async def ask() -> TransferHandle:
            return await self.transfer(
                source=source, destination=destination, prompt=prompt, salt=salt, on_miss=on_miss, budget_s=budget_s
            )

        return await staged(ask, budget_s=budget_s, patience_s=patience_s)

    async def cancel(self, request_hash: str, destination: str) -> bool:
        """Ask a destination to stop a queued or running transfer; False if it did not answer."""
        body = TransferCancelRequested(request_hash=request_hash)
        data = encode(self._header(body), body)
        subject = self._topics.command(destination, Command.CANCEL)
        return not isinstance(await self._running().request(subject, data, wait_s=ANSWER_S), NoAnswer)

    async def _connect(self) -> Bus:
        url, token = (self._url, self._token) if self._url else discover()
        credentials = named_credentials() if self._url else discover_credentials()
        return await NatsBus.connect(
            url, name=self.requester, token=self._token or token, credentials=credentials, topics=self._topics
        )

    def _running(self) -> Bus:
        if self._bus is None:
            raise BusError("this publisher is closed: use it inside `async with Publisher() as publisher`")
        return self._bus

    def _header(self, body: Body) -> Header:
        self._sequence += 1
        return Header(k=body.KIND, i=self.requester, s=self._sequence, t=time.time_ns())

    def _request(
        self,
        source: str,
        destination: str,
        prompt: Asked,
        model: str,
        *,
        salt: str,
        on_miss: OnMiss,
        budget_s: float,
    ) -> TransferRequested:
        if source == destination:
            raise ValueError(f"source and destination are both {source!r}: an instance is not its own source")
        for field, name in (("source", source), ("destination", destination)):
            try:
                escape(name)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        checked = checked_prompt(prompt)
        try:
            return TransferRequested(
                request_id=f"{self.requester}.{self._sequence + 1}",
                request_hash=request_hash(model=model, salt=salt, source=source, prompt=checked.canonical()),
                requester=self.requester,
                source=source,
                destination=destination,
                prompt=checked,
                model=model,
                salt=salt,
                on_miss=on_miss,
                budget_s=budget_s,
            )
        except ValidationError as error:
            raise ValueError(_first_problem(error)) from error

    async def _queue(self, bus: Bus, handle: TransferHandle, data: bytes) -> None:
        request = handle.request
        if reason := await self._rooms.refusal(bus, request.destination):
            handle.hear_verdict(Verdict("skipped_busy", reason))
            return
        subject = self._topics.transfer(request.destination, request.request_hash)
        stored = await bus.store(subject, data, message_id=request.request_id)
        if isinstance(stored, NotStored):
            if stored.reason == "pending":  # waiting or running; only the destination knows which
                await self._ask_directly(bus, handle, data, queued=True)
            else:
                handle.hear_verdict(Verdict("skipped_busy", "the broker's request queue is full; try again later"))

    async def _ask_directly(self, bus: Bus, handle: TransferHandle, data: bytes, *, queued: bool = False) -> None:
        """Put a request to its destination; `queued`: the queue holds it already."""
        destination = handle.request.destination
        answer = await bus.request(self._topics.command(destination, Command.TRANSFER), data, wait_s=ANSWER_S)
        if isinstance(answer, NoAnswer):
            why = "does not listen now" if answer.reason == "nobody_listens" else "did not answer in time"
            if not queued:
                if answer.reason == "nobody_listens":
                    handle.hear_verdict(Verdict("refused", f"{destination} {why}, and an urgent request is not queued"))
                handle.hear_queued(f"{destination} {why}; it may have taken the request all the same")
                return
            handle.hear_queued(
                f"the same request is already in the queue, and {destination} {why}; it is taken when {destination} "
                "comes back, or leaves the queue ten minutes after it was made"
            )
            return
        event = self._decoded(answer)
        if event is not None and isinstance(event.body, TransferVerdict):
            handle.hear_verdict(_verdict(event.body))

    async def _hear(self, delivery: Delivery) -> None:
        event = self._decoded(delivery.data)
        if event is None:
            return
        body = event.body
        if isinstance(body, TransferVerdict):
            for handle in self._ours(body.request_hash):
                if handle.request.request_id == body.request_id:
                    handle.hear_verdict(_verdict(body))
                elif body.verdict == "accepted":  # what it had joined is run anew: its run has handed it back
                    handle.hear_moved(body.transfer)
        elif isinstance(body, TransferOutcome):
            for handle in self._ours(body.request_hash):
                handle.hear_outcome(body)

    def _ours(self, hash_: str) -> Iterator[TransferHandle]:
        return (handle for handle in tuple(self._handles) if handle.request_hash == hash_)

    def _decoded(self, data: bytes) -> Event | None:
        try:
            return decode(data)
        except PeerError:
            self.malformed += 1
            return None


def transfer_and_wait(
    *,
    source: str,
    destination: str,
    prompt: Asked,
    url: str | None = None,
    token: str | None = None,
    wait_s: float = 60.0,
) -> tuple[Verdict, TransferOutcome | None]:
    """Ask for one transfer and await what comes of it, for scripts that have no event loop of their own."""

    async def ask() -> tuple[Verdict, TransferOutcome | None]:
        async with Publisher(url, token) as publisher:
            handle = await publisher.transfer(source=source, destination=destination, prompt=prompt)
            return await handle.verdict(), await handle.outcome(wait_s)

    return asyncio.run(ask())


def checked_prompt(prompt: Asked) -> Prompt:
    """Return the prompt as it travels; ValueError says which part does not fit."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt is empty: there is nothing to transfer")
        return Prompt(text=prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise _unfit(f"prompt must be text, token ids or chat messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("prompt is empty: there is nothing to transfer")
    if isinstance(prompt[0], dict):
        return Prompt(messages=tuple(_message(position, item) for position, item in enumerate(prompt)))
    return Prompt(tokens=token_bytes([_token(position, item) for position, item in enumerate(prompt)]))


def _message(position: int, item: object) -> Message:
    if not isinstance(item, dict):
        raise _unfit(f"prompt message {position} must be a dict with role and content, got {type(item).__name__}")
    try:
        return Message.model_validate(item)
    except ValidationError as error:
        raise ValueError(f"prompt message {position}: {_first_problem(error)}") from error


def _token(position: int, item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise _unfit(f"prompt token {position} must be a whole number, got {type(item).__name__}")
    if not 0 <= item <= TOKEN_ID_MAX:
        raise ValueError(f"prompt token {position} must lie in 0…{TOKEN_ID_MAX}, got {item}")
    return item


def _unfit(text: str) -> ValueError:
    """A wrong type is a ValueError here too: whoever asks catches one class for every field that does not fit."""
    return ValueError(text)


def _verdict(body: TransferVerdict) -> Verdict:
    return Verdict(body.verdict, body.reason, body.transfer)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"[:_TEXT_MAX]
