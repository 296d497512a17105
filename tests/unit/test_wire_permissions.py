"""Who the table of channels says sends and hears a kind is who the broker lets send and hear it, and nobody else is."""

import pytest

from kvbus.channels import CHANNELS, Channel, Party, Store
from kvbus.permissions import AssetNames, Permissions, Role, User, permissions_of
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES
from scripts.wire_document import ASSETS, EXAMPLES, TOPICS, address

NAMES = AssetNames(
    transfer=ASSETS.transfer,
    facts=ASSETS.facts,
    settle=ASSETS.settle,
    instances=ASSETS.bucket(BUCKET_INSTANCES),
    epochs=BUCKET_EPOCH,
    blocks=ASSETS.blocks,
)
USERS = {
    Party.REQUESTER: User(Role.REQUESTER, EXAMPLES["requester"]),
    Party.SOURCE: User(Role.INSTANCE, EXAMPLES["source"], ("m0", "m1")),
    Party.DESTINATION: User(Role.INSTANCE, EXAMPLES["destination"], ("m0", "m1")),
    Party.MEMBER: User(Role.INSTANCE, EXAMPLES["instance"], ("m0", "m1")),
    Party.COORDINATOR: User(Role.INSTANCE, EXAMPLES["instance"], ("m0", "m1")),
    Party.FOLLOWER: User(Role.OBSERVER, "watcher"),
}
"""Whom each party is to the broker; what the broker itself repeats, nobody else may say."""


def allowed(user: User) -> Permissions:
    return permissions_of(user, "KEY", TOPICS, NAMES)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_who_sends_may_publish_and_nobody_else_may(channel: Channel) -> None:
    subject = address(channel).format(**EXAMPLES)
    senders = {USERS[one.sender].role for one in channel.carries if one.sender in USERS}
    may = {user.role for user in USERS.values() if allowed(user).may_publish(subject)}
    assert may == senders


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_who_hears_may_subscribe_where_no_stream_is_read_instead(channel: Channel) -> None:
    subject = address(channel).format(**EXAMPLES)
    for party in {party for one in channel.carries for party in one.hearers}:
        assert allowed(USERS[party]).may_subscribe(subject) is (channel.stored is Store.NOTHING), party


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_another_instance_may_not_speak_for_a_member(channel: Channel) -> None:
    subject = address(channel).format(**EXAMPLES)
    stranger = allowed(User(Role.INSTANCE, "stranger", ("m0", "m1")))
    own = {Party.MEMBER, Party.COORDINATOR}
    if {one.sender for one in channel.carries} <= own:
        assert not stranger.may_publish(subject)
    else:
        assert not {one.sender for one in channel.carries} & own
