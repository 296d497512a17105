"""Lending with a page server beside it: where nothing but its socket leads to the pages, the source ends access itself.

Such pages are sent by this process, so access has ended once the server has put the lease aside, whatever the reader
does. That happens when every connection with the lease has ended (a reader whose host has lost power does not pin
pages for ever), when its peer is isolated, when a newer process of that member borrows, and at a shutdown. Leases that
can be reached in other ways, too, end as all others do.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvbus.dataplane.lending import LendingBackend, Lent, Reader
from kvbus.dataplane.reader import EPOCHS_MAX, PEERS_MAX
from kvbus.dataplane.socket_server import Served, SocketServer
from kvbus.errors import BackendError
from kvbus.events import ReaderKey
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Failed, Order, SubmissionRejectedError


class ServedLending(LendingBackend):
    """A `LendingBackend` that opens leases at the page server and closes them there; without a server, just that."""

    def __init__(self, *, wake: Callable[[], None], server: SocketServer | None) -> None:
        super().__init__(wake=wake)
        self._server = server
        self._served: dict[int, Reader] = {}
        self._closed: list[Reader] = []
        self._borrowed: OrderedDict[tuple[str, str], OrderedDict[int, None]] = OrderedDict()

    def submit(self, order: Order) -> None:
        """As every lending; the pages can be read from here on, before their secret leaves."""
        super().submit(order)
        reader = order.hint
        if not isinstance(reader, Reader) or not reader.secret:
            return
        try:
            self._serve(order, reader)
        except BackendError as error:
            del self._lent[reader.key]
            raise SubmissionRejectedError(FailureClass.LEASE_REFUSED, str(error)) from error
        key = reader.key
        if self._is_new(key):
            # The newer process says nothing for the older one (P4): its leases end because they are served no more.
            who = (key.instance, key.member)
            self._stop(lambda other: (other.instance, other.member) == who and other.epoch != key.epoch)

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first."""
        self._note_ended()
        return super().changes()

    def closed_here(self) -> Sequence[Reader]:
        """Return and forget the readers whose access the server ended, or who said over their connection that it has.

        Their leases go back by `changes`; this is for whoever keeps a book of readers.
        """
        closed, self._closed = self._closed, []
        return closed

    def isolate(self, peer: str) -> None:
        """Lend nothing more to that peer, and serve it no more."""
        super().isolate(peer)
        self._stop(lambda key: key.instance == peer)

    def isolate_epoch(self, peer: str, epoch: int) -> None:
        """Lend nothing more to one process of a peer, and serve it no more."""
        super().isolate_epoch(peer, epoch)
        self._stop(lambda key: (key.instance, key.epoch) == (peer, epoch))

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Lend nothing more, serve nothing more; return what may still be read. May be called again, never waits."""
        self._stop(lambda _: True)
        self._note_ended()
        return super().shutdown(budget_s)

    def release_hold(self) -> None:
        """End the page server; the memory is the pool's."""
        if self._server is not None:
            self._server.close()
            self._note_ended()

    def _is_new(self, key: ReaderKey) -> bool:
        """Whether this process of a member borrows for the first time: one that lives on beside its next is not."""
        who = (key.instance, key.member)
        epochs = self._borrowed.setdefault(who, OrderedDict())
        self._borrowed.move_to_end(who)
        if len(self._borrowed) > PEERS_MAX:
            self._borrowed.popitem(last=False)
        is_new = key.epoch not in epochs
        epochs[key.epoch] = None
        if len(epochs) > EPOCHS_MAX:
            epochs.popitem(last=False)
        return is_new

    def _serve(self, order: Order, reader: Reader) -> None:
        if self._server is None:
            raise BackendError("there is no page server")
        view = order.view
        self._server.open(Served(order.ticket, view.rank, reader.secret, view.pages, view.counters))
        self._served[order.ticket] = reader

    def _stop(self, meant: Callable[[ReaderKey], bool]) -> None:
        """Close leases at the server; each ends when the server has said so, if nothing else leads to its pages."""
        if self._server is not None:
            for ticket in [ticket for ticket, reader in self._served.items() if meant(reader.key)]:
                self._server.close_lease(ticket)

    def _note_ended(self) -> None:
        """Take the readers' words that came over their connections, then the server's own."""
        if self._server is None:
            return
        ended = self._server.ended()  # asked for first: of those, none that was released is missing below
        for ticket in self._server.released():
            if (reader := self._served.get(ticket)) is not None and self.acknowledge(reader.key, reader.nonce):
                self._closed.append(reader)
        for ticket in ended:
            reader = self._served.pop(ticket, None)
            if reader is not None and reader.by_socket_only:
                self._end_here(reader)

    def _end_here(self, reader: Reader) -> None:
        if (fenced := self._fenced.pop(reader.key, None)) is not None:  # its lease went back before
            self._remember(fenced)
            self._closed.append(reader)
        elif (lent := self._lent.get(reader.key)) is not None:
            self._closed.append(reader)
            self._end(lent, Failed(FailureClass.PEER_LOST, "its pages are served no more"), Evidence.ENDPOINT_DESTROYED)

    def _remember(self, lent: Lent) -> None:
        """Whatever has ended a lease, it is served no more."""
        super()._remember(lent)
        if self._server is not None and lent.pair[0] in self._served:
            self._server.close_lease(lent.pair[0])
