"""Whole workers under credentials of their own: what they need works, and what is not theirs is denied."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from kvbus.bus_access import DeniedError, new_credential, read_credential
from kvbus.commands.audit import audit_log
from kvbus.commands.auditing import Verdict
from kvbus.commands.permission_checks import permission_lines
from kvbus.events import StatsAnswered, StatsAsked, decode, decode_all
from kvbus.names import token_bytes
from kvbus.permissions import User, inbox_of
from kvbus.picture.following import Surroundings, begin
from kvbus.picture.whole import Picture
from kvbus.restoring import snapshots
from kvbus.topics import Command, Query
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Delivery
from tests.flow.guarded import DASH, GATEWAY, OPERATOR, GuardedTown, guarded_town, instance
from tests.flow.members import MEMBERS, assert_audit_is_clean, decisions, leader
from tests.flow.town import ANSWER_S, TOPICS, as_text, prompt
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

A, B = instance("a"), instance("b")
DENIALS = ("permissions violation", "does not let this user")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[GuardedTown]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with guarded_town(Path(name), A, B) as running:
            await asyncio.gather(running.start("a", backend="auto"), running.start("b", allow=["a"], backend="auto"))
            yield running


def denials(town: GuardedTown, name: str) -> list[str]:
    """What a worker's log says about rights that it lacked."""
    lines = town.workers[name].log.read_text().lower().splitlines()
    return [line for line in lines if any(word in line for word in DENIALS)]


async def test_workers_with_their_own_credentials_complete_a_transfer(pair: GuardedTown) -> None:
    ids = prompt("guarded", 6)
    await pair.answer("a", ids, store=True)
    outcome = await pair.stage(ids)
    assert outcome.outcome == "settled", outcome
    assert await pair.held("b", ids) == 6
    again = await pair.verdict(ids)  # a repeat is answered too: over the queue, or by the destination itself
    assert again.verdict == "deduped", again
    await pair.at_rest("a", "b")
    assert denials(pair, "a") == denials(pair, "b") == []


async def test_a_missing_prefix_is_computed_by_the_source_under_its_own_credential(pair: GuardedTown) -> None:
    ids = prompt("computed", 4)
    outcome = await pair.stage(ids)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 4), outcome
    assert denials(pair, "a") == denials(pair, "b") == []


async def test_every_right_of_every_user_is_as_it_should_be_on_the_broker(pair: GuardedTown) -> None:
    async def both_take_work() -> bool:
        readers = (await contents(pair))["KVB_TRANSFER"][2]
        return readers == 2

    await until(both_take_work, what="both workers have made the consumer of their queue")
    before = await contents(pair)
    for user in pair.users:
        bus = await pair.connect(user)
        try:
            lines = await permission_lines(bus, user, TOPICS, other="b" if user == A else "a")
            assert [line for line in lines if not line.ok] == [], user
            assert {line.expected for line in lines} == {True, False}  # both kinds were tried
        finally:
            await bus.close()
    assert await contents(pair) == before  # and trying them has changed nothing


async def contents(town: GuardedTown) -> dict[str, list[object]]:
    """Where the logs, the queue and the counters begin, what they lack, who reads them, and their subjects.

    Late facts of what was before may come; these do not change by themselves.
    """
    found: dict[str, list[object]] = {}
    for stream in ("KVB_TRANSFER", "KVB_FACTS", "KVB_SETTLE", f"KV_{BUCKET_EPOCH}"):
        asked = b'{"subjects_filter": ">"}'
        answer = json.loads(await town.bus.ask(f"$JS.API.STREAM.INFO.{stream}", asked, wait_s=ANSWER_S))
        state = answer["state"]
        missing = state["last_seq"] - state["first_seq"] + 1 - state["messages"]
        found[stream] = [state["first_seq"], missing, state["consumer_count"], sorted(state.get("subjects", {}))]
    return found


# P25
async def test_one_instance_cannot_speak_for_another_nor_for_the_broker(pair: GuardedTown) -> None:
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    everything = [await pair.bus.subscribe(subject, hear) for subject in ("kv.live.settle.a", "kv.hb.c", "kv.shares.a")]
    before = await pair.bus.history(TOPICS.settle("a"))
    bus = await pair.connect(B)
    try:
        for subject in (TOPICS.live_settle("a"), TOPICS.heartbeat("c"), TOPICS.shares("a")):
            await bus.publish(subject, b"forged")
            with pytest.raises(DeniedError, match="does not let this user publish"):
                await bus.request(subject, b"forged", wait_s=5)
        for subject in (TOPICS.facts("a"), TOPICS.settle("a")):
            with pytest.raises(DeniedError, match="publish on"):
                await bus.store(subject, b"forged", message_id="forged")
        with pytest.raises(DeniedError):
            await bus.put(BUCKET_INSTANCES, "a=2Fm0", b"forged")
    finally:
        await bus.close()
    assert [delivery.data for delivery in heard if delivery.data == b"forged"] == []
    assert len(await pair.bus.history(TOPICS.settle("a"))) == len(before)
    for subscription in everything:
        await subscription.close()


async def test_a_worker_sends_its_answer_to_an_inbox_and_nowhere_else(pair: GuardedTown) -> None:
    """Whoever asks names the reply subject: with another's log as that, the answer would stand there, as its word."""
    before, asked = len(await pair.bus.history(TOPICS.settle("a"))), pair.encoded(StatsAsked())
    async with bare_client(pair, OPERATOR) as client:
        served = (await client.request(TOPICS.query("a", Query.STATS), asked, timeout=ANSWER_S)).data
        assert isinstance(decode(served).body, StatsAnswered)
        for _ in range(20):
            await client.publish(TOPICS.query("a", Query.STATS), asked, reply=TOPICS.settle("a"))
        await client.flush()
    assert await pair.stats("a")  # asked later, answered: the earlier ones have been served
    assert len(await pair.bus.history(TOPICS.settle("a"))) == before


async def test_a_user_cannot_have_itself_asked_and_answer_on_the_log_of_another(pair: GuardedTown) -> None:
    """Rights to answer whatever reply subject was received would be rights to publish anywhere."""
    before = len(await pair.bus.history(TOPICS.settle("a")))
    own = TOPICS.command("b", Command.LEASE, "spare")
    async with bare_client(pair, B) as client:

        async def answer(message: Msg) -> None:
            await client.publish(message.reply, b"forged")

        await client.subscribe(own, cb=answer)
        await client.publish(own, b"", reply=TOPICS.settle("a"))
        await client.flush()
        await until(lambda: client.last_error is not None, what="the broker has denied the answer")
        assert TOPICS.settle("a") in str(client.last_error)
    assert len(await pair.bus.history(TOPICS.settle("a"))) == before


async def test_a_stored_message_cannot_be_sent_on_to_the_log_of_another(pair: GuardedTown) -> None:
    """A direct get answers with the message itself, on whatever subject its asker names."""
    before = [delivery.data for delivery in await pair.bus.history(TOPICS.settle("a"))]
    async with bare_client(pair, B) as client:
        for key in ("a=2Fm0", "b=2Fm0"):
            subject = f"$KV.{BUCKET_INSTANCES}.{key}"
            await client.publish(f"$JS.API.DIRECT.GET.KV_{BUCKET_INSTANCES}.{subject}", b"", reply=TOPICS.settle("a"))
        await client.flush()
    assert [delivery.data for delivery in await pair.bus.history(TOPICS.settle("a"))] == before


async def test_a_message_to_a_bucket_cannot_purge_the_keys_of_others(pair: GuardedTown) -> None:
    async with bare_client(pair, B) as client:
        subject = f"$KV.{BUCKET_INSTANCES}.b=2Fm0"
        answer = await client.request(subject, b"mine", headers={"Nats-Rollup": "all"}, timeout=ANSWER_S)
        assert b"rollup not permitted" in answer.data, answer.data
    assert "a=2Fm0" in await pair.bus.keys(BUCKET_INSTANCES)


async def test_an_observer_sees_facts_and_no_prompt(pair: GuardedTown) -> None:
    text = as_text(prompt("secret of the requester", 5))
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    bus = await pair.connect(DASH)
    try:
        for subject in (TOPICS.live_facts(), TOPICS.live_settle(), TOPICS.heartbeat()):
            await bus.subscribe(subject, hear)
        for subject in (TOPICS.transfer_filter(), "kv.cmd.>", TOPICS.result("gateway"), "_INBOX.>", ">"):
            with pytest.raises(DeniedError, match="subscribe to"):
                await bus.subscribe(subject, hear)
        outcome = await pair.stage(text)

        def seen() -> bool:
            events = (event for one in heard for event in decode_all(one.data))
            return any(getattr(event, "body", None) == outcome for event in events)

        await until(seen, what="the outcome is seen live")
        await until(lambda: any(one.subject == TOPICS.heartbeat("a") for one in heard), what="a heartbeat is heard")
    finally:
        await bus.close()
    told = await asyncio.to_thread(pair.kvbus, "watch", "--once", "--all", "--json", user=DASH)
    assert told.returncode == 0, told.stderr
    assert outcome.transfer in told.stdout
    tokens = token_bytes(list(text.encode()))
    for start in range(0, len(text) - 16, 16):  # no sixteen characters of it, in any form that it travels in
        for piece in (text[start : start + 16].encode(), tokens[4 * start : 4 * start + 64]):
            assert all(piece not in one.data for one in heard)
            assert piece.hex() not in told.stdout
        assert text[start : start + 16] not in told.stdout


async def test_a_picture_is_as_whole_for_a_requester_as_for_an_observer(pair: GuardedTown) -> None:
    for user in (GATEWAY, DASH):
        bus, picture = await pair.connect(user), Picture()
        try:
            await begin(bus, TOPICS, picture)
            await Surroundings(bus, TOPICS, picture).look()
            told = {row.instance: row.pages_quarantined for row in picture.members()}
            assert {name: told[name] for name in ("a", "b")} == {"a": 0, "b": 0}, user
            counts: Counter[str] = Counter()
            states = [event.header.i async for event in snapshots(bus, TOPICS, counts)]
            assert {"a", "b"} <= set(states)
            assert not [name for name in bus.health().counters if name.startswith("denied")], user
        finally:
            await bus.close()


async def test_commands_work_under_the_credentials_of_who_needs_them(pair: GuardedTown) -> None:
    text = as_text(prompt("staged", 4))
    staged = await asyncio.to_thread(pair.kvbus, "stage", "--from", "a", "--to", "b", text, user=GATEWAY)
    assert staged.returncode == 0, staged.stdout + staged.stderr
    audited = await asyncio.to_thread(pair.kvbus, "audit", user=DASH)
    assert "clean" in audited.stdout, audited.stdout + audited.stderr
    prepared = await asyncio.to_thread(pair.kvbus, "init", "--facts-mib", "256", user=OPERATOR)
    assert prepared.returncode == 0, prepared.stderr
    checked = await asyncio.to_thread(pair.kvbus, "auth", "check", "--dir", str(pair.keys))
    assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_a_command_without_the_right_or_the_credential_ends_with_one_sentence(pair: GuardedTown) -> None:
    for arguments, user, said in (
        (("init",), GATEWAY, "does not let this user publish on $JS.API.STREAM.INFO.KV_kvbus_epoch"),
        (("stage", "--from", "a", "--to", "b", "x"), DASH, "does not let this user"),
        (("audit",), A, "does not let this user publish on $JS.API.CONSUMER.CREATE.KVB_"),
        (("audit",), None, "refused these credentials"),
        (("worker", "--instance", "b"), A, "this credential is that of instance a: give the one of b"),
        (("worker", "--instance", "a", "--member", "m7"), A, "covers the members m0 of a, and not m7"),
    ):
        ran = await asyncio.to_thread(pair.kvbus, *arguments, user=user)
        lines = [line for line in ran.stderr.splitlines() if line.startswith("kvbus: ")]
        assert ran.returncode == 2, (arguments, ran.stdout, ran.stderr)
        assert len(lines) == 1, ran.stderr
        assert said in lines[0], lines


async def test_a_right_that_is_taken_away_is_said_in_the_log_and_costs_nothing_once_it_is_back(
    pair: GuardedTown,
) -> None:
    log, lease = pair.workers["a"].log, f"{TOPICS.command('a', Command.LEASE)}.*"
    own = ", ".join(f'"kv.cmd.a.{verb}.*"' for verb in ("plan", "cache", "drain"))
    pair.change({f'"{TOPICS.facts("a")}", ': "", f'"{lease}", {own}, "kv.query': '"kv.query'})
    try:
        ids = prompt("while the right is away", 3)
        await pair.answer("a", ids, store=True)  # facts that nobody takes
        for subject in (TOPICS.facts("a"), TOPICS.command("a", Command.LEASE, "m0")):

            def said(subject: str = subject) -> bool:
                return any(subject in line for line in denials(pair, "a"))

            await until(said, what=f"the log of a says that {subject} is denied")
        stored = len(await pair.events("a"))
        missed = await pair.verdict(ids)
        assert missed.verdict == "accepted"
        assert pair.workers["a"].alive
        retries = log.read_text().count("violation")
    finally:
        pair.restore()
    assert retries < 200  # each kind of complaint is logged at most once in five seconds

    async def lends_again() -> bool:
        return (await pair.stage(prompt("after", 3))).outcome == "settled"

    await until(lends_again, 100, what="a lends again, without a restart")
    assert pair.workers["a"].alive
    await pair.at_rest("a", "b")

    async def nothing_is_missing() -> bool:
        _, result = await audit_log(pair.bus, TOPICS)
        return result.verdict is Verdict.CLEAN and len(await pair.events("a")) > stored

    await until(nothing_is_missing, what="the facts that waited are stored, and the audit is clean")


async def test_a_user_that_is_removed_is_out_at_once_and_back_when_it_is_restored(pair: GuardedTown) -> None:
    b, key = pair.workers["b"], read_credential(pair.credential(B)).key
    pair.change({key: new_credential(B, "kv").key})
    try:
        await until(lambda: "refused these credentials" in b.log.read_text(), 60, what="the log of b says so")
        assert b.alive
    finally:
        pair.restore()

    async def takes_again() -> bool:
        return (await pair.stage(prompt("b is back", 3))).outcome == "settled"

    await until(takes_again, 100, what="b takes again, without a restart")


async def test_members_of_one_instance_agree_under_one_credential() -> None:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with guarded_town(Path(name), instance("a", *MEMBERS), instance("b", *MEMBERS)) as town:
            await asyncio.gather(
                town.start_all("a", MEMBERS, backend="auto"), town.start_all("b", MEMBERS, backend="auto", allow=["a"])
            )
            first = await leader(town)
            ids = prompt("both ranks, guarded", 5)
            outcome = await town.stage(ids)
            assert outcome.outcome == "settled", outcome
            assert "visible" in [event.header.k for event in await decisions(town, outcome.transfer)]
            town.workers[first].kill()  # the other leads next, and the one that comes back reads what it missed
            await town.start_again(first)
            await leader(town)
            again = await town.stage(prompt("after a member's death", 3))
            assert again.outcome == "settled", again
            assert [line for name in town.workers for line in denials(town, name)] == []
            await assert_audit_is_clean(town)


@asynccontextmanager
async def bare_client(town: GuardedTown, user: User) -> AsyncIterator[NatsClient]:
    """A user that keeps no rule of ours: the client itself, with the user's own credential."""
    credential = read_credential(town.credential(user))

    async def ignore(_error: Exception) -> None:
        """What is denied is asked for as `last_error`."""

    client = await nats.connect(
        town.broker.url, nkeys_seed_str=credential.seed, inbox_prefix=inbox_of(credential.key), error_cb=ignore
    )
    try:
        yield client
    finally:
        await client.close()
