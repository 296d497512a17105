"""A reader's last word, told in band: shorter than the way over the bus, and repeated there until it is confirmed."""

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from kvbus.codec import pack, unpack
from kvbus.dataplane.ucp import AM_BYTES_MAX
from kvbus.errors import PeerError
from kvbus.events import ReaderKey

NOTICE_AM_ID: Final = 1
"""The number of these messages among UCX's active messages."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A reader's word that its access under this grant has ended; the nonce proves that it had the grant."""

    key: ReaderKey
    nonce: bytes

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return pack({"key": self.key.model_dump(), "nonce": self.nonce})

    @classmethod
    def decode(cls, data: bytes) -> "Notice":
        """Return the notice in a message; PeerError where it is none."""
        document = unpack(data, length_max_bytes=AM_BYTES_MAX)
        nonce = document.get("nonce")
        if not isinstance(nonce, bytes):
            raise PeerError("notice has no nonce", got=type(nonce).__name__)
        try:
            return cls(ReaderKey.model_validate(document.get("key")), nonce)
        except ValidationError as error:
            raise PeerError("notice has no reader key", problem=error.errors(include_url=False)[0]["msg"]) from error
