"""The planner: which transport an order takes, and that it takes none that leads nowhere."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.dataplane.planner import LAST, MEASURED, Cost, Distance, Planner, Ranking, costs_of, distance_between, way_of
from kvbus.errors import ConfigError
from kvbus.parts import ProcessIdentity

UNTIMED = settings(deadline=None)
OURS = ("ucx", "memory", "socket")
HERE = ProcessIdentity(pid=10, start_ticks=1, boot_id="boot", pid_namespace=7)
SIBLING = HERE.model_copy(update={"pid": 11})
CONTAINER = HERE.model_copy(update={"pid_namespace": 8})
ELSEWHERE = HERE.model_copy(update={"boot_id": "another"})

names = st.lists(st.sampled_from([*OURS, "pigeon"]), unique=True)
lenders = st.sampled_from([HERE, SIBLING, CONTAINER, ELSEWHERE, None])
pages = st.integers(1, 4096)
sizes = st.integers(9, 23).map(lambda power: 1 << power)
resting = st.dictionaries(st.sampled_from(OURS), st.just("no permission"))
lanes = st.sampled_from([(), ("tcp/lo",), ("tcp/lo", "cma/memory")])
amounts = st.floats(0, 1e6, allow_nan=False)
costs = st.fixed_dictionaries({way: st.builds(Cost, amounts, amounts, amounts) for way in MEASURED})


def rank(
    *,
    ours: tuple[str, ...] = OURS,
    offered: tuple[str, ...] = OURS,
    lender: ProcessIdentity | None = SIBLING,
    count: int = 22,
    page_bytes: int = 64 << 10,
    rest: dict[str, str] | None = None,
    known: tuple[str, ...] = (),
    table: dict[str, Cost] | None = None,
) -> Ranking:
    return Planner(HERE, table or MEASURED).rank(
        ours=ours, offered=offered, lender=lender, pages=count, page_bytes=page_bytes, resting=rest, lanes=known
    )


questions = st.fixed_dictionaries(
    {
        "lender": lenders,
        "count": pages,
        "page_bytes": sizes,
        "rest": resting,
        "known": lanes,
        "table": costs,
    }
)


@UNTIMED
@given(names, names, questions)
def test_nothing_is_tried_that_one_side_lacks_and_something_is_wherever_both_have_one(
    ours: list[str], offered: list[str], question: dict[str, Any]
) -> None:
    ranking = rank(ours=tuple(ours), offered=tuple(offered), **question)
    both = set(ours) & set(offered)
    assert set(ranking.transports) <= both
    assert bool(ranking.transports) == bool(both)
    assert len(set(ranking.transports)) == len(ranking.transports)
    assert both <= set(ranking.transports) | {"memory"}
    assert set(ours) - set(ranking.transports) <= set(ranking.left_out)


@UNTIMED
@given(st.permutations(OURS), questions)
def test_the_same_question_gets_the_same_answer_in_whatever_order_offers_come(
    offered: list[str], question: dict[str, Any]
) -> None:
    first, second = rank(offered=tuple(offered), **question), rank(offered=OURS, **question)
    assert first == second
    assert first.text(first.transports[0]) == second.text(second.transports[0])


@UNTIMED
@given(lenders, pages, sizes, resting, costs)
def test_the_cheapest_is_tried_first_ucx_over_tcp_after_it_and_what_was_refused_lately_last(
    lender: ProcessIdentity | None, count: int, page_bytes: int, rest: dict[str, str], table: dict[str, Cost]
) -> None:
    ranking = rank(lender=lender, count=count, page_bytes=page_bytes, rest=rest, table=table)
    keys = [(one.transport in rest, one.way == LAST, one.cost_us) for one in ranking.candidates]
    assert keys == sorted(keys)


@UNTIMED
@given(lenders, pages, sizes, costs, amounts)
def test_what_is_picked_stays_picked_when_it_gets_cheaper_or_another_dearer(
    lender: ProcessIdentity | None, count: int, page_bytes: int, table: dict[str, Cost], more_us: float
) -> None:
    picked = rank(lender=lender, count=count, page_bytes=page_bytes, table=table).candidates[0]
    for way, cost in table.items():
        if way == picked.way:
            changed = Cost(0, cost.page_us, cost.mib_us)
        else:
            changed = Cost(cost.order_us + more_us, cost.page_us, cost.mib_us)
        again = rank(lender=lender, count=count, page_bytes=page_bytes, table=table | {way: changed})
        assert again.candidates[0].transport == picked.transport


@UNTIMED
@given(st.sampled_from(list(MEASURED.values())), pages, sizes, pages, sizes)
def test_more_or_larger_pages_never_cost_less(cost: Cost, few: int, small: int, others: int, larger: int) -> None:
    assert cost.of(few, small) <= cost.of(few + others, max(small, larger))


@UNTIMED
@given(pages, sizes, resting)
def test_mapped_memory_is_left_out_where_pids_mean_other_processes(
    count: int, page_bytes: int, rest: dict[str, str]
) -> None:
    for lender in (CONTAINER, ELSEWHERE):
        ranking = rank(lender=lender, count=count, page_bytes=page_bytes, rest=rest)
        assert "memory" not in ranking.transports
        assert ranking.left_out["memory"].startswith("does not lead there")
        assert "ucx over cma" not in {one.way for one in ranking.candidates}
        alone = rank(offered=("memory",), lender=lender, count=count, page_bytes=page_bytes, rest=rest)
        assert alone.transports == ("memory",)  # its own failure says more than a refusal to try


def test_where_a_lender_is_follows_from_who_it_is() -> None:
    found = [distance_between(HERE, there) for there in (HERE, SIBLING, CONTAINER, ELSEWHERE, None)]
    assert found == [
        Distance.SAME_PROCESS, Distance.SAME_HOST, Distance.OTHER_CONTAINER, Distance.OTHER_HOST, Distance.UNKNOWN,
    ]  # fmt: skip


def test_costs_that_were_measured_here_take_their_place_in_the_table_and_unknown_ways_are_refused() -> None:
    table = costs_of({"socket": (1, 0, 0)})
    assert table["socket"] == Cost(1, 0, 0)
    assert table["memory"] == MEASURED["memory"]
    assert Planner(HERE, table).rank(
        ours=OURS, offered=OURS, lender=SIBLING, pages=22, page_bytes=65536
    ).transports == ("socket", "memory", "ucx")  # fmt: skip
    with pytest.raises(ConfigError, match="carrier pigeon; the ways are memory, ucx over cma"):
        costs_of({"carrier pigeon": (1, 1, 1)})


def test_what_ucx_connected_over_counts_more_than_the_distance() -> None:
    assert way_of("ucx", Distance.SAME_HOST) == "ucx over cma"
    assert way_of("ucx", Distance.SAME_HOST, ("tcp/lo",)) == "ucx over tcp"
    assert way_of("ucx", Distance.OTHER_HOST, ("tcp/eth0",)) == "ucx over tcp"


@pytest.mark.parametrize(
    ("count", "page_bytes", "lender", "first"),
    [
        (1, 64 << 10, SIBLING, "memory"),
        (256, 64 << 10, SIBLING, "memory"),
        (32, 2 << 20, SIBLING, "memory"),
        (1024, 32 << 10, SIBLING, "memory"),
        (256, 16 << 10, SIBLING, "memory"),
        (256, 4 << 10, SIBLING, "memory"),
        (1, 4 << 10, CONTAINER, "socket"),
        (256, 64 << 10, CONTAINER, "socket"),
    ],
)
def test_the_measured_table_picks_what_was_fastest_when_it_was_measured(
    count: int, page_bytes: int, lender: ProcessIdentity, first: str
) -> None:
    assert rank(count=count, page_bytes=page_bytes, lender=lender).transports[0] == first


@pytest.mark.parametrize(
    ("count", "page_bytes", "first"),
    [
        (16, 4 << 10, "socket"),
        (256, 4 << 10, "socket"),
        (256, 16 << 10, "socket"),
        (16, 64 << 10, "ucx"),
        (256, 64 << 10, "ucx"),
        (1, 256 << 10, "ucx"),
        (8, 2 << 20, "ucx"),
    ],
)
def test_where_memory_cannot_be_mapped_small_pages_go_by_socket_and_larger_ones_by_ucx(
    count: int, page_bytes: int, first: str
) -> None:
    found = rank(count=count, page_bytes=page_bytes, offered=("ucx", "socket"), known=("tcp/lo", "cma/memory"))
    assert found.transports[0] == first


@UNTIMED
@given(pages, sizes, costs)
def test_between_hosts_sockets_are_taken_whatever_ucx_over_tcp_costs(
    count: int, page_bytes: int, table: dict[str, Cost]
) -> None:
    for lender in (CONTAINER, ELSEWHERE):
        ranking = rank(count=count, page_bytes=page_bytes, lender=lender, table=table)
        assert ranking.transports == ("socket", "ucx")
        assert "ucx over tcp comes last" in ranking.text("socket")
        assert rank(offered=("ucx",), count=count, page_bytes=page_bytes, lender=lender).transports == ("ucx",)


def test_the_reason_names_the_distance_the_pages_and_why_not_the_others() -> None:
    assert rank().text("memory") == (
        "by memory: same host, 22 pages of 64 KiB; ucx over cma costs 2.7 ×, socket costs 3.0 ×"
    )
    assert rank(count=1, offered=("ucx",), known=("tcp/lo", "cma/memory")).text("ucx") == (
        "by ucx over cma (tcp/lo, cma/memory): same host, 1 page of 64 KiB; memory not offered; socket not offered"
    )
    assert rank(lender=ELSEWHERE, rest={"ucx": "no answer"}).text("socket", {"ucx": "it is frozen"}) == (
        "by socket: another host, 22 pages of 64 KiB; memory does not lead there; ucx refused: it is frozen"
    )
