"""A bus whose connection is lost while a request is on its way, and the request with it."""

from kvbus.errors import BusError
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.transport import NotStored, Stored


class CutBus(MemoryBus):
    """Loses its connection with the first message that it is to store; `restore` brings it back.

    The broker that is back then takes nothing yet for so many tries (`unready`).
    """

    def __init__(self, broker: MemoryBroker, *, unready: int = 0) -> None:
        super().__init__(broker)
        self.unready = unready
        self.stores = 0

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """Store it, unless it is one of the first."""
        self.stores += 1
        if self.stores == 1:
            self.cut()
            raise BusError("the connection was closed while a call was in progress; call again once it is back")
        if self.stores <= 1 + self.unready:
            raise BusError("no stream answers for this; was ensure_assets run?", subject=subject)
        return await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
