"""A backend of several: each order goes to the one that the planner ranks first among those that its grant offers.

An attempt goes on to the next one only where nothing of it has escaped: the first one rejected it, or says that it
was never submitted. So a host without UCX, a container without the lender's /proc, or a broken wire-up costs a try and
no transfer. What has touched memory once ends where it was. Either way the next orders from that peer do not begin
with what failed: it rests for a while, and is only tried where nothing else is left.

Which way an order took, and why, is told once by ticket, for whoever follows the transfer.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.dataplane.planner import Planner, Ranking
from kvbus.dataplane.reader import ATTEMPTS_MAX, PEERS_MAX, Isolation, Pair
from kvbus.dataplane.reading import ReadOrder
from kvbus.errors import BackendError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Backend, Change, Failed, Order, SubmissionRejectedError

PASSED_ON = frozenset({FailureClass.TRANSPORT, FailureClass.PEER_LOST})
"""What another transport may make better; a bad grant or an isolated peer stays what it is."""
REST_ORDERS = 64
"""Orders from a peer that pass by a transport which it refused: a seldom wasted try, and no long memory of a fault that
has gone. Its next epoch starts without any."""

Who = tuple[str, int]
"""Peer and epoch: what is known of one process holds for no later one, which may be elsewhere."""
Lanes = Callable[[str], Sequence[str]]
"""By peer: over which lanes of its own a transport reads from there, as far as that is known."""


class Way(NamedTuple):
    """One thing to tell of a transfer: a step and its words. `moving`: which way and why; `moved`: over which lanes."""

    step: str
    text: str


class Found(NamedTuple):
    """What was found of a lender's pages, for it to know: rows whose bytes differ, and how many were rewritten."""

    differing: tuple[int, ...] = ()
    changed: int = 0


@dataclass(slots=True)
class _Given:
    order: Order
    who: Who
    left: list[Backend]
    ranking: Ranking | None
    now: str = ""
    stopped: bool = False
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Rest:
    why: str
    orders_left: int = REST_ORDERS


@dataclass(frozen=True, slots=True)
class ChoosingStatistics:
    """Orders by the transport that took them, tries that came to nothing, and how many of those went on elsewhere.

    `lanes` counts, by a transport's own lane, the peers that were last read over it; `opened` names the transports, and
    `failed` those that have broken down for good, with why.
    """

    opened: tuple[str, ...]
    taken: Mapping[str, int]
    refused: Mapping[str, int]
    passed_on: int
    lanes: Mapping[str, int]
    failed: Mapping[str, str]


class ChoosingReader:
    """Several backends as one `Backend`; all of its methods belong to one thread, the holder's.

    Without a planner they stand in their order of preference. The backends are started and registered by whoever made
    them. `lanes` knows, by transport, over which lanes that one reads.
    """

    def __init__(
        self,
        name: str,
        backends: Sequence[Backend],
        *,
        planner: Planner | None = None,
        lanes: Mapping[str, Lanes] | None = None,
    ) -> None:
        self._name = name
        self._backends = tuple(backends)
        self._planner = planner
        self._lanes = lanes or {}
        self._isolation = Isolation()
        self._given: dict[Pair, _Given] = {}
        self._peers: OrderedDict[str, set[str]] = OrderedDict()
        self._resting: OrderedDict[Who, dict[str, _Rest]] = OrderedDict()
        self._ways: OrderedDict[int, list[Way]] = OrderedDict()
        self._lanes_of: OrderedDict[Who, tuple[str, ...]] = OrderedDict()
        self._taken: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._passed_on = 0
        self._found: OrderedDict[int, Found] = OrderedDict()
        self._failed: dict[str, str] = {}
        self._kept: list[Change] = []

    def __repr__(self) -> str:
        return f"<ChoosingReader {' '.join(backend.name for backend in self._backends)} attempts={len(self._given)}>"

    @property
    def name(self) -> str:
        """The binding's name; which transport carried the bytes of an order is that transport's to say."""
        return self._name

    def submit(self, order: Order) -> None:
        """Give the order to the first backend that takes it; SubmissionRejectedError where none does."""
        hint = order.hint
        if not isinstance(hint, ReadOrder):
            raise SubmissionRejectedError(FailureClass.GRANT_REFUSED, f"hint is a {type(hint).__name__}")
        if self._isolation.refuses(order.peer, hint.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        pair = (order.ticket, order.attempt)
        if pair in self._given:
            raise SubmissionRejectedError(FailureClass.CONTRADICTION, f"attempt {pair} is already under way")
        offered = [backend for backend in self._backends if getattr(hint.grant, backend.name) is not None]
        if not offered:
            names = ", ".join(backend.name for backend in self._backends)
            raise SubmissionRejectedError(FailureClass.GRANT_REFUSED, f"the grant offers no access by {names}")
        self._offer(self._planned(order, hint, offered))

    def ways(self, ticket: int) -> Sequence[Way]:
        """Return and forget what is to be told of the way that this ticket's order takes, oldest first."""
        return self._ways.pop(ticket, ())

    def found(self, ticket: int) -> Found:
        """Return and forget what this ticket's order found of the lender's pages."""
        return self._found.pop(ticket, Found())

    def statistics(self) -> ChoosingStatistics:
        """Return the counters as they stand."""
        lanes = Counter(lane for lanes in self._lanes_of.values() for lane in lanes)
        return ChoosingStatistics(
            opened=tuple(backend.name for backend in self._backends),
            taken=dict(self._taken),
            refused=dict(self._refused),
            passed_on=self._passed_on,
            lanes=dict(lanes),
            failed=dict(self._failed),
        )

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call; an attempt that goes on elsewhere has not changed.

        BackendError once the last transport has broken down; what others listed before that comes with the next call.
        """
        listed, self._kept = self._kept, []
        failed = len(self._failed)
        for backend in self._backends:
            for change in self._listed(backend):
                passed = self._pass_on(change, backend.name)
                if passed is not None:
                    listed.append(passed)
        if failed < len(self._failed) == len(self._backends):
            self._kept = listed
            raise BackendError("; ".join(self._failed.values()))
        return listed

    def _listed(self, backend: Backend) -> Sequence[Change]:
        """Return a transport's changes; one that has broken down refuses from now on, and orders go on elsewhere."""
        try:
            return backend.changes()
        except BackendError as error:
            self._failed[backend.name] = str(error)
            return ()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Ask every backend; all but the one that has the attempt take no notice."""
        if (given := self._given.get((ticket, attempt))) is not None:
            _stop(given)
        for backend in self._backends:
            backend.cancel(ticket, attempt)

    def isolate(self, peer: str) -> None:
        """Refuse that peer in the epochs seen so far, and end what runs with it."""
        self._isolation.isolate(peer)
        used = self._peers.get(peer, set())
        for given in self._given.values():
            if given.order.peer == peer:
                _stop(given)
        for backend in self._backends:
            if backend.name in used:  # one that never saw the peer would isolate its next run
                backend.isolate(peer)

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Shut every backend; return the attempts that still owe evidence. May be called again."""
        for given in self._given.values():
            _stop(given)
        share_s = budget_s / len(self._backends)
        return tuple(pair for backend in self._backends for pair in backend.shutdown(share_s))

    def release_hold(self) -> None:
        """End every backend."""
        for backend in self._backends:
            backend.release_hold()

    def _planned(self, order: Order, hint: ReadOrder, offered: list[Backend]) -> _Given:
        """Put the offered backends in the order in which they are to be tried."""
        grant = hint.grant
        who = (order.peer, grant.lender_epoch)
        if self._planner is None:
            return _Given(order, who, offered, None)
        lender = hint.lender or (grant.memory.process if grant.memory is not None else None)
        ranking = self._planner.rank(
            ours=tuple(backend.name for backend in self._backends),
            offered=tuple(backend.name for backend in offered),
            lender=lender,
            pages=len(grant.page_indexes()),
            page_bytes=grant.pool.page_bytes,
            resting=self._rested(who),
            lanes=self._lanes_of.get(who, ()),
        )
        by_name = {backend.name: backend for backend in offered}
        return _Given(order, who, [by_name[name] for name in ranking.transports], ranking)

    def _offer(self, given: _Given) -> None:
        while given.left:
            backend = given.left.pop(0)
            try:
                backend.submit(given.order)
            except SubmissionRejectedError as rejection:
                if rejection.failure not in PASSED_ON:
                    raise
                self._note_refusal(given, backend.name, rejection.text)
                if not given.left:
                    raise
                continue
            given.now = backend.name
            self._given[given.order.ticket, given.order.attempt] = given
            self._taken[backend.name] += 1
            self._note_peer(given.order.peer, backend.name)
            self._tell(given.order.ticket, "moving", _way(given))
            return

    def _pass_on(self, change: Change, name: str) -> Change | None:
        """Return the change, or None where the attempt goes on with another backend."""
        pair = (change.ticket, change.attempt)
        given = self._given.get(pair)
        if given is None or change.evidence is None:
            return change
        result = change.result
        if isinstance(result, Failed) and result.failure in PASSED_ON and not given.stopped:
            self._note_refusal(given, name, result.text)
            if change.evidence is Evidence.NEVER_SUBMITTED and given.left:
                try:
                    self._offer(given)
                except SubmissionRejectedError:
                    del self._given[pair]
                    return change
                self._passed_on += 1
                return None
        if change.differing or change.changed:
            self._found[change.ticket] = Found(change.differing, change.changed)
            if len(self._found) > ATTEMPTS_MAX:  # nobody asked; one for each attempt that may be under way is enough
                self._found.popitem(last=False)
        self._note_lanes(given, name)
        del self._given[pair]
        return change

    # ---------------------------------------------------------------------------------------------- what is remembered

    def _rested(self, who: Who) -> Mapping[str, str]:
        """Count one order from that peer, and return what it still passes by, and why."""
        resting = self._resting.get(who, {})
        for name, rest in tuple(resting.items()):
            rest.orders_left -= 1
            if rest.orders_left < 0:
                del resting[name]
        return {name: rest.why for name, rest in resting.items()}

    def _note_refusal(self, given: _Given, name: str, why: str) -> None:
        given.refused[name] = why
        self._refused[name] += 1
        self._resting.setdefault(given.who, {})[name] = _Rest(why)
        self._resting.move_to_end(given.who)
        if len(self._resting) > PEERS_MAX:
            self._resting.popitem(last=False)

    def _note_lanes(self, given: _Given, name: str) -> None:
        lanes = tuple(self._lanes[name](given.order.peer)) if name in self._lanes else ()
        if not lanes or lanes == self._lanes_of.get(given.who):  # what is known stands in the step before
            return
        self._tell(given.order.ticket, "moved", f"over {', '.join(lanes)}")
        self._lanes_of[given.who] = lanes
        self._lanes_of.move_to_end(given.who)
        if len(self._lanes_of) > PEERS_MAX:
            self._lanes_of.popitem(last=False)

    def _tell(self, ticket: int, step: str, text: str) -> None:
        self._ways.setdefault(ticket, []).append(Way(step, text))
        if len(self._ways) > ATTEMPTS_MAX:  # nobody asked; one line for each attempt that may be under way is enough
            self._ways.popitem(last=False)

    def _note_peer(self, peer: str, name: str) -> None:
        self._peers.setdefault(peer, set()).add(name)
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)


def _stop(given: _Given) -> None:
    """Let the attempt go on with no other backend, and learn nothing from its end: we ended it."""
    given.left.clear()
    given.stopped = True


def _way(given: _Given) -> str:
    if given.ranking is not None:
        return given.ranking.text(given.now, given.refused)
    return "; ".join([f"by {given.now}", *(f"{name} refused: {why}" for name, why in given.refused.items())])
