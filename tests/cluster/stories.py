"""All stories, in the order in which they are told: those that share containers stand together."""

from tests.cluster import brokers, files, hosts, members, requesters, workers
from tests.cluster.story import Story

QUIET = ("traffic",)

STORIES = (
    Story("quickstart", "none", files.quickstart, quick=True),
    Story("quickstart", "destination killed at rest", files.worker_restarts, without=QUIET, part="at-rest"),
    Story("quickstart", "broker's disk full", brokers.disk_full, must_settle=False, overlay="disk", without=QUIET),
    Story("quickstart", "clocks differ", hosts.clocks_differ, overlay="clocks", without=QUIET, quick=True),
    Story("partition", "source cut off", workers.cut_off("a"), must_settle=False, part="a-away"),
    Story("partition", "destination cut off", workers.cut_off("b"), must_settle=False, quick=True, part="b-away"),
    Story("partition", "source paused", workers.paused("a"), must_settle=False),
    Story("partition", "destination paused", workers.paused("b"), must_settle=False),
    Story("partition", "source stopped", workers.stopped("a"), must_settle=False),
    Story("partition", "destination stopped", workers.stopped("b"), must_settle=False),
    Story("partition", "source killed", workers.killed("a"), must_settle=False, quick=True),
    Story("partition", "destination killed", workers.killed("b"), must_settle=False),
    Story("partition", "requester killed", requesters.killed, part="hosts"),
    Story("partition", "requester paused", requesters.paused, part="hosts"),
    Story("partition", "requester stopped", requesters.stopped, part="hosts"),
    Story("partition", "requester cut off", requesters.cut_off, part="hosts"),
    Story("partition", "packets lost", hosts.packets_lost, must_settle=False, part="hosts"),
    Story("partition", "source at another address", hosts.moves_house, part="hosts"),
    Story("partition", "source with another model", hosts.another_model, part="hosts"),
    Story("partition", "50 ms delay", hosts.slow_wire, overlay="delay"),
    Story(
        "partition",
        "two instances with one name",
        hosts.name_taken_twice,
        must_settle=False,
        overlay="twin",
        about_s=40,
    ),
    Story("broker-failover", "leader killed", brokers.leader_killed, quick=True, about_s=30),
    Story("broker-failover", "leader paused", brokers.leader_paused, about_s=30),
    Story("broker-failover", "leader stopped", brokers.leader_stopped, about_s=30),
    Story("broker-failover", "leader cut off", brokers.leader_cut_off, about_s=30),
    Story("slow-peer", "none", files.slow_peer, workers=("a", "b", "slow")),
    Story(
        "rolling-restart",
        "each worker restarted",
        files.rolling_restart,
        workers=("a", "b", "c"),
        quick=True,
        by_itself=True,
    ),
    Story("members", "each member restarted", members.rolling_restart, workers=("a0", "a1", "b0", "b1"), about_s=80),
    Story("drain", "none", files.drain, workers=("a", "c")),
    Story("auth", "none", files.auth),
    Story("cluster", "none", files.cluster, workers=("a", "b", "c", "d"), about_s=30),
    Story("transformers", "none", files.transformers, about_s=100),
)
