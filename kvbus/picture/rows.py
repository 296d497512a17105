"""What a picture shows: frozen rows, all times as unix nanoseconds of the members' own clocks.

No row holds a prompt or a token id: the picture sees what an observer may see.
"""

from dataclasses import dataclass, field

Who = tuple[str, str]
"""Instance and member."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One worker process of an instance. Counts are None while nobody has told them."""

    instance: str
    member: str
    epoch: int
    registered: bool = False
    """Whether the registry holds its record: one that is gone was not refreshed for ten seconds."""
    state: str = ""
    """`draining`, `drained` or `leaving`, as its record says; empty while it takes requests."""
    engine: str = ""
    model: str = ""
    ranks: int = 0
    block_tokens: int = 0
    page_bytes: int = 0
    transports: tuple[str, ...] = ()
    pages: int | None = None
    pages_free: int | None = None
    pages_cached: int | None = None
    pages_lent: int | None = None
    """Pages that peers and quarantine take up; cached pages that are lent are among the cached ones too."""
    pages_quarantined: int | None = None
    pages_spoiled: int | None = None
    """Of the quarantined ones, those whose bytes were no longer those of their digests."""
    leases_held: int | None = None
    transfers_running: int | None = None
    heard_ns: int = 0
    """When it last said anything; 0: never since this picture began."""


@dataclass(frozen=True, slots=True)
class TransferRow:
    """A transfer in flight. `pages_asked` are leased for it on its destination; those of all ranks are added up."""

    transfer: str
    request_hash: str
    source: str
    destination: str
    step: str
    """The last step that was told, in the words of `transfer_step`: accepted, resolved, leased, asking, moving…"""
    text: str
    began_ns: int
    step_ns: int
    pages_asked: int
    pages_moved: int


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease that is held. `transfer` is empty for those of the engine's own."""

    instance: str
    member: str
    epoch: int
    ticket: int
    transfer: str
    rank: int
    direction: str
    """`read`, `write`, or empty while that is not known."""
    peer: str
    pages: int
    stage: str
    """A word of `kvbus.ledger.held.Stage`."""
    since_ns: int
    since_known: bool
    """False where it was held before this picture began: it is older than `since_ns` says."""


@dataclass(frozen=True, slots=True)
class OutOfUseRow:
    """Pages that nobody may use, and why. `ticket` is 0 where they are the pool's and belong to no lease any more."""

    instance: str
    member: str
    pages: int
    why: str
    since_ns: int
    ticket: int = 0
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class IsolatedRow:
    """A peer to which a member submits nothing more. `runs_anew`: it came back, and is accepted when next used."""

    instance: str
    member: str
    peer: str
    why: str
    since_ns: int
    runs_anew: bool = False


@dataclass(frozen=True, slots=True)
class EndedRow:
    """How a transfer ended; `outcome` is a word of `transfer_outcome`."""

    transfer: str
    request_hash: str
    source: str
    destination: str
    outcome: str
    failure: str
    reason: str
    pages_wanted: int
    pages_held: int
    pages_moved: int
    length_bytes: int
    queue_s: float
    grant_s: float
    move_s: float
    total_s: float
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What ended since this picture began; `outcomes` by their words."""

    outcomes: dict[str, int] = field(default_factory=dict)
    pages_moved: int = 0
    length_bytes: int = 0

    @property
    def ended(self) -> int:
        """All of them."""
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Shown:
    """A whole picture at one moment. Rows are bounded, counts are not: a count says what the rows are taken from."""

    members: tuple[MemberRow, ...]
    transfers: tuple[TransferRow, ...]
    """The ones that run longest first."""
    transfers_count: int
    leases: tuple[LeaseRow, ...]
    """Those of transfers, the oldest first."""
    leases_count: int
    leases_local: int
    """The engines' own, which are counted and not shown one by one."""
    out_of_use: tuple[OutOfUseRow, ...]
    out_of_use_pages: int
    isolated: tuple[IsolatedRow, ...]
    ended: tuple[EndedRow, ...]
    """The newest first."""
    totals: Totals
    events: int
    """Events heard since this picture began."""
    lost: int
    """How often the log no longer held what followed; each time the members were asked for their state."""
