"""`/v1/kv_transfer`: ask for a transfer, look at it, stop it, follow all of them, and the published counters."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kvbus.events import TransferOutcome, TransferStep
from kvbus.gateway import transfer_words as words
from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.asked import asked
from kvbus.gateway.feed import Told
from kvbus.gateway.parts import Parts
from kvbus.gateway.routing import Door, instance_of
from kvbus.gateway.streams import EventStream, require_room
from kvbus.subscriber import Seen
from kvbus.topics import REQUEST_HASH_PATTERN

PATH = "/v1/kv_transfer"
WAIT_MAX_S = 30.0
"""One long poll; shorter than the minute after which most proxies give up."""
ACCEPTED = 202

_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_DECIMAL: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")


def doors(parts: Parts) -> list[Door]:
    """Return the doors of transfers; `stats` and `events` stand before the hash, which they would match."""
    here = TransferDoors(parts)
    return [
        Door("POST", PATH, here.ask, words.ASK),
        Door("GET", f"{PATH}/stats", here.stats, words.STATS),
        Door("GET", f"{PATH}/events", here.events, words.EVENTS),
        Door("GET", f"{PATH}/{{request_hash}}", here.look, words.LOOK),
        Door("DELETE", f"{PATH}/{{request_hash}}", here.cancel, words.CANCEL),
    ]


class TransferDoors:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def ask(self, request: Request) -> Response:
        """Ask for a transfer."""
        body = await self._parts.bodies.json_object(request)
        try:
            wanted = asked(body)
        except ValueError as error:
            raise Problem(400, str(error)) from error
        answered = await self._parts.transfers.ask(wanted, instance_of(request))
        document = asdict(answered) | {"deduped": answered.status == "deduped"}
        return answer(document, ACCEPTED)

    async def stats(self, request: Request) -> Response:
        """Return the published counters."""
        transfers, instance = self._parts.transfers, instance_of(request)
        if instance:
            instance = await transfers.served(instance)
        return answer(asdict(transfers.statistics(instance)))

    async def look(self, request: Request) -> Response:
        """Return where a transfer is; with `wait_s`, once it has ended or that long after."""
        wait_s = _wait_s(request.query_params.get("wait_s"))
        transfers = self._parts.transfers
        record = transfers.find(_hash_of(request), await self._instance(request))
        if wait_s:
            await transfers.until_ended(record, wait_s)
            if not record.ended:  # it may not have been taken on, and is remembered no more then
                record = transfers.find(record.request_hash, record.destination)
        return answer(record.document())

    async def cancel(self, request: Request) -> Response:
        """Ask for a transfer to stop: what was delivered whole is kept."""
        transfers = self._parts.transfers
        record = transfers.find(_hash_of(request), await self._instance(request))
        await transfers.cancel(record)
        return answer({"status": "cancelling", "request_hash": record.request_hash}, ACCEPTED)

    async def events(self, request: Request) -> Response:
        """Follow steps and outcomes."""
        feed = self._parts.feed
        instance, wanted_hash = await self._instance(request), request.query_params.get("request_hash", "")
        if wanted_hash and not REQUEST_HASH_PATTERN.fullmatch(wanted_hash):
            raise Problem(400, "request_hash must be 32 lower-case hex characters")
        place = request.headers.get("last-event-id") or request.query_params.get("after", "")
        if place and not _NUMBER.fullmatch(place):
            raise Problem(400, "the place to go on from must be the id of an event")
        require_room(feed)  # behind the last wait: others may have joined meanwhile
        client = feed.join(_filter(instance, wanted_hash), after=int(place) if place else None)
        return EventStream(feed, client)

    async def _instance(self, request: Request) -> str:
        instance = instance_of(request)
        return await self._parts.transfers.served(instance) if instance else ""


class TransferTeller:
    """Makes messages for clients of the steps and outcomes in the facts."""

    def hear(self, seen: Seen) -> Iterable[Told]:
        """Take one event."""
        header, body = seen.event.header, seen.event.body
        if isinstance(body, TransferStep):
            document: dict[str, object] = {
                "transfer": body.transfer,
                "request_hash": body.request_hash,
                "destination": header.i,
                "step": body.step,
                "text": body.text,
            }
            name = "step"
        elif isinstance(body, TransferOutcome):
            document, name = body.model_dump(), "outcome"
        else:
            return
        data = json.dumps(document | {"time_ns": header.t}).encode()
        yield Told(name, seen.sequence, data, header.i, body.request_hash)


def _filter(instance: str, request_hash: str) -> Callable[[Told], bool]:
    def wanted(told: Told) -> bool:
        if told.name not in {"step", "outcome"}:
            return told.name == "lagged"
        return instance in {"", told.destination} and request_hash in {"", told.request_hash}

    return wanted


def _hash_of(request: Request) -> str:
    text = str(request.path_params["request_hash"])
    if not REQUEST_HASH_PATTERN.fullmatch(text):
        raise Problem(404, "a request hash is 32 lower-case hex characters")
    return text


def _wait_s(text: str | None) -> float:
    if text is None:
        return 0.0
    if not _DECIMAL.fullmatch(text) or float(text) > WAIT_MAX_S:
        raise Problem(400, f"wait_s must be a number of seconds, at most {WAIT_MAX_S:g}")
    return float(text)
