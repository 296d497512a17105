"""One speaker's events as bytes, without a model of each header: what its headers share is checked and packed once."""

from kvbus.codec import begun_map, packer
from kvbus.events import VERSION, Header, fields_of
from kvbus.parts import Body

Fields = dict[str, object]
"""A body as it is packed."""


class Speaker:
    """Encodes what one member, or one requester, says; `encode` gives the same bytes. For one thread."""

    def __init__(self, instance: str, member: str = "", epoch: int = 0) -> None:
        shared = Header(k="any", i=instance, m=member, e=epoch, s=0, t=0)
        self._shared = {"i": shared.i, "m": shared.m, "e": shared.e}
        self._heads: dict[str, bytes] = {}
        self._pack = packer(fields_of)

    def event(self, kind: str, fields: Fields, cause: str, sequence: int, sent_ns: int) -> bytes:
        """Return the bytes of one event; what varies in its header is as little checked as its fields."""
        head = self._heads.get(kind) or self._begin(kind)
        return head + self._pack({"s": sequence, "t": sent_ns, "c": cause, "b": fields})[1:]

    def said(self, body: Body, cause: str, sequence: int, sent_ns: int) -> bytes:
        """Return the bytes of one event whose body was made, and so checked."""
        return self.event(body.KIND, fields_of(body), cause, sequence, sent_ns)

    def _begin(self, kind: str) -> bytes:
        """Return how all events of one kind begin; they are kept, since there are few kinds."""
        head = self._heads[kind] = begun_map({"v": VERSION, "k": kind, **self._shared}, 4)
        return head
