"""Which transport an order takes: pure arithmetic over what both sides offer, how far they are apart, and the pages.

The costs are a table, measured once between two processes of one host, and not a calibration at each start: two
transports that differ by a third cannot be told apart in a few milliseconds on a busy machine, so that equal orders
would take different ways after each restart. What counts is the ratios, and those are the kernel's rather than the
machine's: a copy out of a mapping, a system call per piece, a system call and two copies. Whoever measured otherwise
gives that table (`costs_of`), or names the transport.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvbus.errors import ConfigError
from kvbus.parts import ProcessIdentity


class Distance(StrEnum):
    """How far the lender's process is from here."""

    SAME_PROCESS = "same process"
    SAME_HOST = "same host"
    OTHER_CONTAINER = "another container of this host"
    OTHER_HOST = "another host"
    UNKNOWN = "somewhere"

    @property
    def shares_processes(self) -> bool:
        """Whether a pid means the same on both sides: what reads another process's memory needs that."""
        return self in {Distance.SAME_PROCESS, Distance.SAME_HOST}


def distance_between(here: ProcessIdentity, there: ProcessIdentity | None) -> Distance:
    """Return how far apart two processes are."""
    if there is None:
        return Distance.UNKNOWN
    if here.boot_id != there.boot_id:
        return Distance.OTHER_HOST
    if here.pid_namespace != there.pid_namespace:
        return Distance.OTHER_CONTAINER
    return Distance.SAME_PROCESS if here == there else Distance.SAME_HOST


COST_MIN_US: Final = 0.001
"""Nothing is that quick: a table of zeros still gives ratios."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a way costs in microseconds: for each order, for each page on top, and for each MiB on top."""

    order_us: float
    page_us: float
    mib_us: float

    def of(self, pages: int, page_bytes: int) -> float:
        """Return the cost of one order; above zero, for it is compared by ratio."""
        return max(COST_MIN_US, self.order_us + pages * (self.page_us + self.mib_us * page_bytes / (1 << 20)))


Costs = Mapping[str, Cost]
"""By way: what a transport becomes over a distance."""

MEASURED: Final[Costs] = MappingProxyType(
    {
        "memory": Cost(150, 2.5, 180),
        "ucx over cma": Cost(710, 5, 290),
        "ucx over tcp": Cost(820, 36, 570),
        "socket": Cost(710, 1.2, 440),
    }
)
"""What bench/ways.py prints, the middle of seven runs on two cores that much other work kept busy: 1 to 256 scattered
pages of 4 KiB to 2 MiB. Each thread that has to be woken for an order waited for its turn there, and few pages by
memory are read without waking one. An order over cma and one by socket cost the same within the noise, and stand with
one number.

TCP was measured over loopback. A slower network adds the same to both ways that use it. RDMA was not measured: no
wheel of UCX has it. Where it is, name `ucx`."""

LAST: Final = "ucx over tcp"
"""Never before another way that leads there, whatever it costs: the source's process does the same work as for a
socket, and a fault of its UCX ends that process (ucx_strands.py)."""

DEAREST: Final = MEASURED[LAST]
"""For a way that nobody measured: never before one that somebody did."""


def costs_of(measured: Mapping[str, tuple[float, float, float]]) -> Costs:
    """Return the table with what was measured on this host in its place; ConfigError for a way that there is not."""
    if unknown := sorted(set(measured) - set(MEASURED)):
        raise ConfigError(f"transport_costs names {', '.join(unknown)}; the ways are {', '.join(MEASURED)}")
    return MappingProxyType({**MEASURED, **{way: Cost(*numbers) for way, numbers in measured.items()}})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way that can be tried, and what it would cost."""

    transport: str
    way: str
    cost_us: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """What to try, best first, and why: `left_out` gives the reason why a transport is last, or not there at all."""

    distance: Distance
    pages: int
    page_bytes: int
    candidates: tuple[Candidate, ...]
    lanes: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in the order in which they are tried."""
        return tuple(candidate.transport for candidate in self.candidates)

    def text(self, transport: str, refused: Mapping[str, str] | None = None) -> str:
        """Say why that transport is the one; `refused`: what was tried before it, and came to nothing."""
        said = dict(self.left_out) | {name: f"refused: {why}" for name, why in (refused or {}).items()}
        chosen = next(candidate for candidate in self.candidates if candidate.transport == transport)
        dearer = [
            f"{other.way} costs {other.cost_us / chosen.cost_us:.1f} ×"
            for other in self.candidates
            if other.transport != transport and other.transport not in said
        ]
        parts = [", ".join(dearer)] if dearer else []
        parts += [f"{name} {why}" for name, why in said.items() if name != transport]
        what = f"{self.pages} page{'' if self.pages == 1 else 's'} of {_size(self.page_bytes)}"
        lanes = f" ({', '.join(self.lanes)})" if self.lanes and transport == "ucx" else ""
        return "; ".join([f"by {chosen.way}{lanes}: {self.distance}, {what}", *parts])


class Planner:
    """Ranks transports for orders; the same question always gets the same answer."""

    def __init__(self, here: ProcessIdentity, costs: Costs = MEASURED) -> None:
        self._here = here
        self._costs = costs

    def rank(
        self,
        *,
        ours: Sequence[str],
        offered: Iterable[str],
        lender: ProcessIdentity | None,
        pages: int,
        page_bytes: int,
        resting: Mapping[str, str] | None = None,
        lanes: Sequence[str] = (),
    ) -> Ranking:
        """Rank those of our transports that are offered: the cheapest first, then LAST, then what was refused lately.

        `resting` says of a transport why it was refused; `lanes` are those of UCX's connection to there, where it has
        been made: what they say counts more than the distance. A transport that cannot lead there at all is left out,
        unless there is no other: then the attempt itself shall say what is wrong. Equal costs keep our own order.
        """
        distance, there, rest = distance_between(self._here, lender), set(offered), resting or {}
        left_out = {name: "not offered" for name in ours if name not in there}
        usable = [name for name in ours if name in there]
        led = [name for name in usable if name != "memory" or distance.shares_processes or lender is None]
        if led:
            left_out |= {name: "does not lead there" for name in usable if name not in led}
            usable = led
        ways = {name: way_of(name, distance, lanes) for name in usable}
        candidates = [self._candidate(name, way, pages, page_bytes) for name, way in ways.items()]
        candidates.sort(key=lambda one: (one.transport in rest, one.way == LAST, one.cost_us))
        left_out |= {one.transport: "over tcp comes last" for one in candidates[1:] if one.way == LAST}
        left_out |= {name: f"was refused lately ({rest[name]})" for name in usable if name in rest}
        return Ranking(distance, pages, page_bytes, tuple(candidates), tuple(lanes), MappingProxyType(left_out))

    def _candidate(self, transport: str, way: str, pages: int, page_bytes: int) -> Candidate:
        cost = self._costs.get(way, DEAREST)
        return Candidate(transport, way, cost.of(pages, page_bytes))


def way_of(transport: str, distance: Distance, lanes: Sequence[str] = ()) -> str:
    """Return what a transport becomes over a distance: UCX reads another process's memory, or its tcp connection.

    On one host UCX may have to do without cma, for example between two IPC namespaces; its lanes tell.
    """
    if transport != "ucx":
        return transport
    by_cma = any(lane.startswith("cma") for lane in lanes) if lanes else distance.shares_processes
    return "ucx over cma" if by_cma else LAST


def _size(length_bytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if length_bytes >= 1 << shift:
            return f"{length_bytes / (1 << shift):g} {unit}"
    return f"{length_bytes} bytes"
