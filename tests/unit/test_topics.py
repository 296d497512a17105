"""Subjects: what is built can be parsed, nothing else can, and nothing illegal can be built."""

import re
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvbus.errors import PeerError
from kvbus.topics import TOKEN_LENGTH_MAX_BYTES, Command, Family, Query, Subject, Topics, escape, unescape

TOPICS = Topics()
HASH = "0123456789abcdef" * 2
LEGAL_TOKEN = re.compile(r"[A-Za-z0-9_=-]{1,64}")


def fits(name: str) -> bool:
    """Return True where a name can stand on the bus; written apart from the code under test."""
    raw = name.encode(errors="surrogatepass")
    plain = sum(chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-") for byte in raw)
    lone = any(0xD800 <= ord(letter) <= 0xDFFF for letter in name)
    return bool(name) and not lone and plain + 3 * (len(raw) - plain) <= 64


names = st.text(min_size=1, max_size=64).filter(fits)
awkward = st.sampled_from(
    ["a.b", "*", ">", "kv.>", " ", "a b", "\t\n", "é", "世界", "=41", "=", "..", "\x00", "a" * 64, "-_"]
)
subjects: st.SearchStrategy[Callable[[str], tuple[str, Subject]]] = st.sampled_from(
    [
        lambda name: (TOPICS.transfer(name, HASH), Subject(Family.TRANSFER, name, HASH)),
        *[
            lambda name, verb=verb: (TOPICS.command(name, verb), Subject(Family.COMMAND, name, verb.value))
            for verb in Command
        ],
        *[
            lambda name, verb=verb: (TOPICS.query(name, verb), Subject(Family.QUERY, name, verb.value))
            for verb in Query
        ],
        lambda name: (TOPICS.facts(name), Subject(Family.FACTS, name)),
        lambda name: (TOPICS.settle(name), Subject(Family.SETTLE, name)),
        lambda name: (TOPICS.live_facts(name), Subject(Family.LIVE_FACTS, name)),
        lambda name: (TOPICS.live_settle(name), Subject(Family.LIVE_SETTLE, name)),
        lambda name: (TOPICS.result(name), Subject(Family.RESULT, name)),
        lambda name: (TOPICS.heartbeat(name), Subject(Family.HEARTBEAT, name)),
        lambda name: (TOPICS.shares(name), Subject(Family.SHARES, name)),
    ]
)

to_members: st.SearchStrategy[Callable[[str], tuple[str, Subject]]] = st.sampled_from(
    [
        lambda name, verb=verb: (TOPICS.command("b", verb, name), Subject(Family.COMMAND, "b", verb.value, name))
        for verb in Command
    ]
)


@settings(deadline=None)
@given(subjects | to_members, names | awkward)
def test_what_is_built_is_parsed_back(build: Callable[[str], tuple[str, Subject]], name: str) -> None:
    subject, parts = build(name)
    assert TOPICS.parse(subject) == parts


@settings(deadline=None)
@given(subjects | to_members, names | awkward)
def test_a_built_subject_is_legal_whatever_the_name(build: Callable[[str], tuple[str, Subject]], name: str) -> None:
    subject, _ = build(name)
    tokens = subject.split(".")
    assert all(LEGAL_TOKEN.fullmatch(token) for token in tokens)
    assert not set(subject) & set("*> \t\r\n")
    assert len(subject) < 256


@settings(deadline=None)
@given(subjects, st.text(max_size=80))
@example(lambda name: (TOPICS.facts(name), Subject(Family.FACTS, name)), "")
@example(lambda name: (TOPICS.facts(name), Subject(Family.FACTS, name)), "\ud800")
def test_a_name_that_does_not_fit_cannot_be_built(build: Callable[[str], tuple[str, Subject]], name: str) -> None:
    assume(not fits(name))
    with pytest.raises(ValueError, match=r".+"):
        build(name)


@settings(deadline=None)
@given(to_members, st.text(min_size=65, max_size=80) | st.sampled_from(["\ud800", "é" * 11, "." * 22]))
def test_a_member_that_does_not_fit_cannot_be_asked(build: Callable[[str], tuple[str, Subject]], name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        build(name)


@settings(deadline=None)
@given(names, names)
def test_one_name_has_one_token_and_one_token_one_name(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) is (one == other)
    assert unescape(escape(one)) == one


@settings(deadline=None)
@given(st.text(max_size=70) | st.from_regex(r"\A(?:[A-Za-z0-9_-]|=[0-9A-F]{2}){1,24}\Z"))
@example("=41")
@example("=FF")
@example("=")
@example("=4")
@example("=4g")
@example("=c3=a9")
@example("a" * 65)
@example("a\n")
@example("=ED=A0=80")
def test_a_token_is_the_one_form_of_its_name_or_refused(token: str) -> None:
    try:
        name = unescape(token)
    except PeerError:
        return
    assert escape(name) == token


@settings(deadline=None)
@given(st.text(max_size=120))
@example("kv.facts.")
@example("kv.facts.*")
@example("kv.facts.a.b")
@example("kv.live.facts")
@example("kv.live.facts.=41")
@example("kv..a")
@example(f"kv.transfer.a.{HASH}\n")
@example(f"kv.transfer.a.{HASH.upper()}")
@example("kv.cmd.a.explode")
@example("kv.cmd.a")
@example("kv.cmd.a.lease.")
@example("kv.cmd.a.lease.*")
@example("kv.cmd.a.lease.=41")
@example("kv.cmd.a.lease.m0.m1")
@example("kv.query.a.stats.m0")
@example("kv.shares.a.m0")
@example("other.facts.a")
@example("kv.>")
def test_arbitrary_text_is_parsed_to_what_builds_it_or_refused(text: str) -> None:
    refused_or_rebuilt(text)


@settings(deadline=None)
@given(
    st.sampled_from([family.value for family in Family]),
    st.lists(st.text(alphabet="ab.*>=4 1\n_-", max_size=6) | st.sampled_from([HASH, "lease", "stats"]), max_size=4),
)
def test_text_that_looks_like_a_subject_is_parsed_or_refused(family: str, tail: list[str]) -> None:
    refused_or_rebuilt(".".join(["kv", family, *tail]))


def refused_or_rebuilt(text: str) -> None:
    try:
        parts = TOPICS.parse(text)
    except PeerError:
        return
    tokens = ["kv", parts.family.value, escape(parts.name), *([parts.last] if parts.last else [])]
    assert ".".join([*tokens, *([escape(parts.member)] if parts.member else [])]) == text


def test_a_command_goes_to_an_instance_or_to_one_member_of_it() -> None:
    assert TOPICS.command("b", Command.LEASE) == "kv.cmd.b.lease"
    assert TOPICS.command("b", Command.LEASE, "m.0") == "kv.cmd.b.lease.m=2E0"
    for subject in ("kv.cmd.b.lease.", "kv.cmd.b.lease.m.0", "kv.query.b.replay.m0", "kv.shares.b.m0"):
        with pytest.raises(PeerError):
            TOPICS.parse(subject)


def test_of_queries_only_snapshot_and_stats_are_those_of_one_member() -> None:
    assert TOPICS.parse("kv.query.b.stats.m0") == Subject(Family.QUERY, "b", "stats", "m0")
    assert TOPICS.query("b", Query.SNAPSHOT, "m.0") == "kv.query.b.snapshot.m=2E0"
    assert TOPICS.parse("kv.query.b.snapshot.m=2E0") == Subject(Family.QUERY, "b", "snapshot", "m.0")
    for subject in (
        "kv.query.b.replay.m0",
        "kv.query.b.snapshot.",
        "kv.query.b.snapshot.m0.m1",
        "kv.query.b.snapshot.m.0",
    ):
        with pytest.raises(PeerError):
            TOPICS.parse(subject)


@pytest.mark.parametrize("request_hash", ["", "x" * 32, HASH.upper(), HASH[:-1], HASH + "0", HASH + "\n", "*"])
def test_a_transfer_needs_a_request_hash(request_hash: str) -> None:
    with pytest.raises(ValueError, match="request hash"):
        TOPICS.transfer("b", request_hash)


def test_filters_have_wildcards_only_where_a_name_or_hash_would_stand() -> None:
    assert TOPICS.transfer_filter() == "kv.transfer.*.*"
    assert TOPICS.transfer_filter("a.b") == "kv.transfer.a=2Eb.*"
    assert TOPICS.facts_filter() == "kv.facts.*"
    assert TOPICS.settle_filter() == "kv.settle.*"
    assert TOPICS.live_facts() == "kv.live.facts.*"
    assert TOPICS.live_settle() == "kv.live.settle.*"
    assert TOPICS.heartbeat() == "kv.hb.*"


@pytest.mark.parametrize("build", [TOPICS.transfer_filter, TOPICS.live_facts, TOPICS.live_settle, TOPICS.heartbeat])
def test_an_empty_name_is_an_error_and_not_a_filter_for_all(build: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        build("")


@pytest.mark.parametrize(
    "subject",
    [
        TOPICS.transfer_filter(),
        TOPICS.transfer_filter("b"),
        TOPICS.facts_filter(),
        TOPICS.heartbeat(),
        "kv.live.facts.*",
    ],
)
def test_a_filter_is_no_subject(subject: str) -> None:
    with pytest.raises(PeerError):
        TOPICS.parse(subject)


@pytest.mark.parametrize("prefix", ["", "a.b", "*", ">", "kv ", "é", "=41", "a" * 65])
def test_a_prefix_is_one_plain_token(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"prefix|empty|escaped"):
        Topics(prefix)


@settings(deadline=None)
@given(st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z"), names)
def test_another_prefix_is_another_bus(prefix: str, name: str) -> None:
    other = Topics(prefix)
    assert other.parse(other.facts(name)) == Subject(Family.FACTS, name)
    if prefix != "kv":
        with pytest.raises(PeerError):
            TOPICS.parse(other.facts(name))


def test_the_longest_name_fits_exactly() -> None:
    assert escape("a" * TOKEN_LENGTH_MAX_BYTES) == "a" * TOKEN_LENGTH_MAX_BYTES
    assert len(escape("é" * 10 + "abcd")) == TOKEN_LENGTH_MAX_BYTES
    for name in ("a" * 65, "é" * 11, "." * 22):
        with pytest.raises(ValueError, match="at most 64"):
            escape(name)
