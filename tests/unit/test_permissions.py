"""Permissions as words: each subject that can be built is somebody's to say or to hear, and nobody else's."""

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.bus_assets import Assets
from kvbus.commands.permission_checks import asset_names, rights_of
from kvbus.permissions import (
    AssetNames,
    Permissions,
    Role,
    User,
    bucket_key,
    covers,
    inbox_of,
    permissions_of,
)
from kvbus.roles.registry import registry_key
from kvbus.topics import Command, Query, Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES

TOPICS = Topics()
NAMES = asset_names(TOPICS)
HASH = "0" * 32
A = User(Role.INSTANCE, "a", ("m0", "m1"))
LONE = User(Role.INSTANCE, "a", ("m0",))
GATEWAY, DASH = User(Role.REQUESTER, "gateway"), User(Role.OBSERVER, "dash")
OPERATOR = User(Role.OPERATOR, "operator")
USERS = {"A": A, "G": GATEWAY, "D": DASH, "O": OPERATOR}

OF_MEMBERS = (Query.STATS, Query.SNAPSHOT)

SAID_AND_HEARD: dict[str, tuple[str, Callable[[str], list[str]], str, str]] = {
    # builder: (of whom, its subjects, who says them, who hears them); A is instance a, G a requester, D an observer
    "transfer": ("b", lambda name: [TOPICS.transfer(name, HASH)], "GO", "O"),
    "transfer: to itself": ("a", lambda name: [TOPICS.transfer(name, HASH)], "GO", "O"),
    "transfer_filter": ("a", lambda name: [TOPICS.transfer_filter(), TOPICS.transfer_filter(name)], "GO", "O"),
    "command": ("b", lambda name: [TOPICS.command(name, Command.LEASE, "m0")], "AO", "O"),
    "command: own lease": ("a", lambda name: [TOPICS.command(name, Command.LEASE, "m1")], "AO", "AO"),
    "command: plan": ("b", lambda name: [TOPICS.command(name, Command.PLAN, "m0")], "O", "O"),
    "command: own plan": ("a", lambda name: [TOPICS.command(name, Command.PLAN, "m0")], "AO", "AO"),
    "command: requests": (
        "b",
        lambda name: [TOPICS.command(name, verb) for verb in (Command.TRANSFER, Command.CANCEL)],
        "GO",
        "O",
    ),
    "command: own requests": (
        "a",
        lambda name: [TOPICS.command(name, verb) for verb in (Command.TRANSFER, Command.CANCEL)],
        "GO",
        "AO",
    ),
    "command: cache": ("b", lambda name: [TOPICS.command(name, Command.CACHE, "m0")], "GO", "O"),
    "command: own cache": ("a", lambda name: [TOPICS.command(name, Command.CACHE, "m0")], "GO", "AO"),
    "command: drain": (
        "a",
        lambda name: [TOPICS.command(name, Command.DRAIN), TOPICS.command(name, Command.DRAIN, "m0")],
        "O",
        "AO",
    ),
    "query": ("b", lambda name: [TOPICS.query(name, Query.STATS)], "DO", "O"),
    "query: own": ("a", lambda name: [TOPICS.query(name, Query.STATS)], "DO", "AO"),
    "query: of a member": ("b", lambda name: [TOPICS.query(name, verb, "m0") for verb in OF_MEMBERS], "GDO", "O"),
    "query: of an own member": ("a", lambda name: [TOPICS.query(name, verb, "m1") for verb in OF_MEMBERS], "GDO", "AO"),
    "query: not answered yet": (
        "a",
        lambda name: [TOPICS.query(name, verb) for verb in (Query.SNAPSHOT, Query.REPLAY)],
        "O",
        "AO",
    ),
    "facts": ("a", lambda name: [TOPICS.facts(name)], "AO", "O"),
    "facts: of another": ("b", lambda name: [TOPICS.facts(name)], "O", "O"),
    "settle": ("a", lambda name: [TOPICS.settle(name)], "AO", "O"),
    "settle: of another": ("b", lambda name: [TOPICS.settle(name)], "O", "O"),
    "facts_filter": ("", lambda _: [TOPICS.facts_filter()], "O", "O"),
    "settle_filter": ("", lambda _: [TOPICS.settle_filter()], "O", "O"),
    "live_facts": ("a", lambda name: [TOPICS.live_facts(name)], "", "GDO"),
    "live_facts: all": ("", lambda _: [TOPICS.live_facts()], "", "GDO"),
    "live_settle": ("a", lambda name: [TOPICS.live_settle(name)], "", "ADO"),
    "live_settle: of another": ("b", lambda name: [TOPICS.live_settle(name)], "", "DO"),
    "result": ("gateway", lambda name: [TOPICS.result(name)], "AO", "GO"),
    "result: of another": ("another", lambda name: [TOPICS.result(name)], "AO", "O"),
    "heartbeat": ("a", lambda name: [TOPICS.heartbeat(name)], "AO", "AGDO"),
    "heartbeat: of another": ("b", lambda name: [TOPICS.heartbeat(name)], "O", "GDO"),
    "shares": ("a", lambda name: [TOPICS.shares(name)], "AO", "AO"),
    "blocks": ("a", lambda name: [TOPICS.blocks(name)], "AO", "O"),
    "blocks: of another": ("b", lambda name: [TOPICS.blocks(name)], "O", "O"),
    "blocks_filter": ("", lambda _: [TOPICS.blocks_filter()], "O", "O"),
    "live_blocks": ("a", lambda name: [TOPICS.live_blocks(name)], "", "GO"),
    "live_blocks: all": ("", lambda _: [TOPICS.live_blocks()], "", "GO"),
    "shares: of another": ("b", lambda name: [TOPICS.shares(name)], "O", "O"),
}


def of(user: User, topics: Topics = TOPICS, names: AssetNames = NAMES) -> Permissions:
    return permissions_of(user, "UKEY", topics, names)


# P25
@pytest.mark.parametrize("case", SAID_AND_HEARD)
def test_each_subject_is_said_and_heard_by_who_needs_it_and_by_nobody_else(case: str) -> None:
    name, build, said, heard = SAID_AND_HEARD[case]
    for subject in build(name):
        assert {who for who, user in USERS.items() if of(user).may_publish(subject)} == set(said), subject
        assert {who for who, user in USERS.items() if of(user).may_subscribe(subject)} == set(heard), subject


def test_no_builder_of_subjects_and_no_verb_is_left_out() -> None:
    builders = {name for name, _ in inspect.getmembers(Topics, callable) if not name.startswith("_")}
    tried = {case.split(":")[0].strip() for case in SAID_AND_HEARD}
    assert builders - {"parse"} == tried
    subjects = [subject for name, build, _, _ in SAID_AND_HEARD.values() for subject in build(name)]
    for verb in (*Command, *Query):
        assert any(verb.value in subject.split(".")[3:4] for subject in subjects), verb


def test_an_instance_of_one_member_has_nothing_to_hear_of_itself() -> None:
    alone = of(LONE)
    for subject in (TOPICS.live_settle("a"), TOPICS.heartbeat("a"), TOPICS.shares("a")):
        assert not alone.may_subscribe(subject)
    assert not any(NAMES.settle in subject for subject in alone.publish)


def test_each_hears_only_its_own_inbox_and_only_instances_answer_on_those_of_others() -> None:
    for user in (A, GATEWAY, DASH):
        assert of(user).may_subscribe(f"{inbox_of('UKEY')}.x.y")
        for other in ("_INBOX.x", "_INBOX.>", f"{inbox_of('UOTHER')}.x", ">"):
            assert not of(user).may_subscribe(other)
    answering = {who for who, user in USERS.items() if of(user).may_publish(f"{inbox_of('UOTHER')}.x")}
    assert answering == {"A", "O"}


def test_nobody_but_an_operator_reads_requests_or_changes_streams() -> None:
    harmful = [
        f"$JS.API.STREAM.{verb}.{stream}"
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "SNAPSHOT", "RESTORE")
        for stream in (NAMES.transfer, NAMES.facts, NAMES.settle, f"KV_{NAMES.instances}", f"KV_{NAMES.epochs}")
    ]
    reading = [
        f"$JS.API.STREAM.MSG.GET.{NAMES.transfer}",
        f"$JS.API.DIRECT.GET.KV_{NAMES.instances}",
        f"$JS.API.DIRECT.GET.KV_{NAMES.instances}.$KV.{NAMES.instances}.x",
        f"$JS.API.CONSUMER.CREATE.{NAMES.transfer}",
        f"$JS.API.CONSUMER.CREATE.{NAMES.transfer}.x.{TOPICS.transfer_filter('b')}",
        f"$JS.API.CONSUMER.CREATE.{NAMES.transfer}.dst-b.{TOPICS.transfer_filter('b')}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{NAMES.transfer}.dst-a",
        f"$JS.API.CONSUMER.MSG.NEXT.{NAMES.transfer}.dst-b",
    ]
    for user in (A, GATEWAY, DASH):
        assert [subject for subject in (*harmful, *reading) if of(user).may_publish(subject)] == []
    assert all(of(OPERATOR).may_publish(subject) for subject in (*harmful, *reading))


def test_who_follows_transfers_reads_facts_and_decisions_and_says_neither() -> None:
    for stream, subjects in ((NAMES.facts, TOPICS.facts_filter()), (NAMES.settle, TOPICS.settle_filter())):
        reading = [
            f"$JS.API.CONSUMER.CREATE.{stream}.reader.{subjects}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.reader",
            f"$JS.API.STREAM.MSG.GET.{stream}",
        ]
        for user in (GATEWAY, DASH, OPERATOR):
            assert all(of(user).may_publish(subject) for subject in reading), (user, stream)
        assert not of(LONE).may_publish(reading[0])
    assert not of(GATEWAY).may_publish(TOPICS.settle("a"))
    assert not of(GATEWAY).may_subscribe(TOPICS.live_settle("a"))


def test_the_names_are_those_that_the_parts_use() -> None:
    for topics in (Topics(), Topics("other")):
        assets, names = Assets(topics), asset_names(topics)
        made = {document["name"] for document in assets.all()}
        buckets = {f"KV_{names.instances}", f"KV_{names.epochs}"}
        assert made == {names.transfer, names.facts, names.settle, names.blocks, *buckets}
        assert (names.instances, names.epochs) == (assets.bucket(BUCKET_INSTANCES), assets.bucket(BUCKET_EPOCH))
    assert bucket_key("a.b", "m/0") == registry_key("a.b", "m/0")


def test_another_prefix_shows_in_every_subject_and_gives_no_right_on_the_first_one() -> None:
    topics = Topics("other")
    for user in (A, GATEWAY, DASH):
        mine = of(user, topics, asset_names(topics))
        for name, build, _, _ in SAID_AND_HEARD.values():
            assert not any(mine.may_publish(subject) or mine.may_subscribe(subject) for subject in build(name))
        assert not mine.may_publish(f"$JS.API.STREAM.INFO.KV_{NAMES.instances}")


def test_the_lists_agree_with_what_a_check_expects_of_the_broker() -> None:
    for user in (A, LONE, GATEWAY, DASH, OPERATOR):
        may = of(user)
        for right in rights_of(user, TOPICS):
            subject = right.subject("b")
            allowed = may.may_publish(subject) if right.verb == "publish" else may.may_subscribe(subject)
            assert allowed == (user.role in right.roles), (user, right.verb, subject)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.*", "a.>", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.>", True),
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        (">", "a", True),
        ("*", ">", False),
    ],
)
def test_a_pattern_covers_what_the_broker_says_it_does(pattern: str, subject: str, *, expected: bool) -> None:
    assert covers(pattern, subject) is expected


@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4))
def test_what_is_a_subject_covers_itself(tokens: list[str]) -> None:
    assert covers(".".join(tokens), ".".join(tokens))
