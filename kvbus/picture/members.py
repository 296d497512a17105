"""Who is there: each member's record, its run, its pages, and the peers that it has isolated."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvbus.events import AttemptMade, FactsSeen, Header, HeartbeatSeen, InstanceRecord
from kvbus.picture.rows import IsolatedRow, MemberRow, OutOfUseRow, Who

ISOLATED_MAX = 1_000
"""Isolated peers kept in all; a member isolates one at a time, after seconds of silence."""
MEMBERS_MAX = 10_000
"""Members known at a time; whoever may speak on the bus may invent names."""
ROOM = 1_000
"""So many make room at once, those that were silent longest: each time all leases are looked at."""
KEEP_NS = 3_600 * 1_000_000_000
"""For how long a member is shown that is registered no more, as on the roll of the metrics."""
_MEMBER_TICKET = 0
_PEER_LOST = "peer_lost"


@dataclass(frozen=True, slots=True)
class PoolSaid:
    """What a member says of its pool, as counters or as its cache's answer; None: it does not say."""

    instance: str
    member: str
    pages: int | None = None
    pages_free: int | None = None
    pages_cached: int | None = None
    pages_lent: int | None = None
    pages_quarantined: int | None = None
    pages_spoiled: int | None = None


@dataclass(slots=True)
class _Run:
    """One run of a member, and when it last spoke."""

    epoch: int
    last_ns: int


@dataclass(slots=True)
class Members:
    """Rows by instance and member; an epoch is compared for equality only, and a later word of another is a new run.

    `on_gone` hears of members that are forgotten: silent for longest where there are too many, or long unregistered.
    """

    on_gone: Callable[[Collection[Who]], None]
    members_max: int = MEMBERS_MAX
    room: int = ROOM
    _known: OrderedDict[Who, None] = field(default_factory=OrderedDict)
    """All of them, the one that was silent longest first."""
    _gone_ns: dict[Who, int] = field(default_factory=dict)
    """Since when who is not registered was seen not to be, and has not spoken."""
    _rows: dict[Who, MemberRow] = field(default_factory=dict)
    _runs: dict[Who, _Run] = field(default_factory=dict)
    _isolated: dict[tuple[str, str, str], IsolatedRow] = field(default_factory=dict)
    _quarantined_ns: dict[Who, int] = field(default_factory=dict)

    def hears(self, header: Header) -> tuple[bool, bool]:
        """Whether this word counts, and whether it begins a new run of its member."""
        key = header.i, header.m
        self._note(key)
        self._gone_ns.pop(key, None)
        run = self._runs.get(key)
        if run is None or (run.epoch != header.e and header.t > run.last_ns):
            self._runs[key] = _Run(header.e, header.t)
            self._began(key, header)
            return True, run is not None
        if run.epoch != header.e:
            return False, False
        run.last_ns = max(run.last_ns, header.t)
        return True, False

    def beat(self, header: Header, body: HeartbeatSeen) -> None:
        """Take a heartbeat."""
        self._change(
            (header.i, header.m), epoch=header.e, heard_ns=header.t, transfers_running=body.transfers_running,
            leases_held=body.leases_held, pages_free=body.pages_free, pages_cached=body.pages_cached,
            pages_lent=body.pages_lent, state=body.state or "",
        )  # fmt: skip

    def registered(self, records: Iterable[tuple[Header, InstanceRecord]], now_ns: int | None = None) -> None:
        """Take the whole registry: who is not in it is shown as gone, and an hour of `now_ns` later not at all."""
        known = {(header.i, header.m): (header, record) for header, record in records}
        for key in list(self._rows):
            if key not in known:
                self._change(key, registered=False)
        if now_ns is not None:
            self._drop_gone(known, now_ns)
        for key, (header, record) in known.items():
            self._note(key)
            self._change(
                key, registered=True, state=record.state or "", engine=record.engine, model=record.model,
                ranks=record.ranks, block_tokens=record.block_tokens, page_bytes=record.page_bytes,
                transports=record.transports, pages=record.pages, epoch=header.e,
                heard_ns=max(header.t, self._heard_ns(key)),
            )  # fmt: skip

    def pool(self, said: PoolSaid, now_ns: int) -> None:
        """Take what a member says of its pool."""
        key = said.instance, said.member
        names = ("pages", "pages_free", "pages_cached", "pages_lent", "pages_quarantined", "pages_spoiled")
        self._change(key, **{name: value for name in names if (value := getattr(said, name)) is not None})
        if not said.pages_quarantined:
            self._quarantined_ns.pop(key, None)
        else:
            self._quarantined_ns.setdefault(key, now_ns)

    def isolations(self, header: Header, body: FactsSeen) -> None:
        """Note peers that a member has isolated."""
        for row in body.details:
            if row.ticket == _MEMBER_TICKET and row.failure == _PEER_LOST and row.peer:
                isolated = IsolatedRow(header.i, header.m, row.peer, row.text, header.t)
                if len(self._isolated) < ISOLATED_MAX:
                    self._isolated[header.i, header.m, row.peer] = isolated

    def attempted(self, header: Header, body: AttemptMade) -> None:
        """A member that tries with a peer has accepted it again."""
        self._isolated.pop((header.i, header.m, body.peer), None)

    def rows(self) -> tuple[MemberRow, ...]:
        """Return all members by name."""
        return tuple(self._rows[key] for key in sorted(self._rows))

    def isolated(self) -> tuple[IsolatedRow, ...]:
        """Return the isolated peers, the last one first."""
        return tuple(sorted(self._isolated.values(), key=lambda row: -row.since_ns))

    def out_of_use(self) -> list[OutOfUseRow]:
        """Return what pools have in quarantine, beside what leases retain."""
        return [
            OutOfUseRow(row.instance, row.member, row.pages_quarantined, _why(row), self._quarantined_ns.get(key, 0))
            for key, row in sorted(self._rows.items())
            if row.pages_quarantined
        ]

    def _began(self, key: tuple[str, str], header: Header) -> None:
        for place in [place for place in self._isolated if place[:2] == key]:
            del self._isolated[place]
        for place, row in self._isolated.items():
            if row.peer in {header.i, f"{header.i}/{header.m}"}:
                self._isolated[place] = replace(row, runs_anew=True)
        if key in self._rows:
            counts: Mapping[str, None] = dict.fromkeys(_COUNTS)
            self._change(key, epoch=header.e, heard_ns=header.t, **counts)
        self._quarantined_ns.pop(key, None)

    def _note(self, key: Who) -> None:
        """Take note of a word about a member; where there are too many, forget those silent longest."""
        if key not in self._known and len(self._known) >= self.members_max:
            self._forget([who for who, _ in zip(self._known, range(self.room), strict=False)])
        self._known[key] = None
        self._known.move_to_end(key)

    def _drop_gone(self, registered: Collection[Who], now_ns: int) -> None:
        for key in [key for key in self._gone_ns if key in registered]:
            del self._gone_ns[key]
        for key in self._known:
            if key not in registered:
                self._gone_ns.setdefault(key, now_ns)
        self._forget([key for key, since_ns in self._gone_ns.items() if now_ns - since_ns > KEEP_NS])

    def _forget(self, gone: Collection[Who]) -> None:
        if not gone:
            return
        for key in gone:
            self._known.pop(key, None)
            self._gone_ns.pop(key, None)
            self._rows.pop(key, None)
            self._runs.pop(key, None)
            self._quarantined_ns.pop(key, None)
        among = frozenset(gone)
        for place in [place for place in self._isolated if place[:2] in among]:
            del self._isolated[place]
        self.on_gone(among)

    def _heard_ns(self, key: tuple[str, str]) -> int:
        return self._rows[key].heard_ns if key in self._rows else 0

    def _change(self, key: Who, **changes: object) -> None:
        row = self._rows.get(key)
        if row is None:
            self._note(key)
            row = MemberRow(key[0], key[1], 0)
        self._rows[key] = replace(row, **changes)  # type: ignore[arg-type] # the names are those of its fields


_COUNTS = (
    "pages_free", "pages_cached", "pages_lent", "pages_quarantined", "pages_spoiled", "leases_held",
    "transfers_running",
)  # fmt: skip


def _why(row: MemberRow) -> str:
    if row.pages_spoiled:
        return f"{row.pages_spoiled} of them changed after they were sealed: see pages_spoiled"
    return "their lease went back before access to them was known to have ended"
