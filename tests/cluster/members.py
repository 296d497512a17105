"""Instances with several members, one rank each: restarted member by member while transfers are asked for."""

from functools import partial

from kvbus.engines.toy import ToyOptions
from tests.cluster.actors import REST_S, Actors
from tests.cluster.files import TRAFFIC_S, count_traffic

MEMBERS = {"a": ("a0", "a1"), "b": ("b0", "b1")}
"""The containers of each instance, in the order of their ranks."""
SETTLES_AFTER = 5
"""So many transfers settle at each instance between two restarts: it is back, with both of its members."""


def rolling_restart(actors: Actors) -> None:
    """Two instances of two ranks each are restarted member by member under three requests a second: none fails."""
    workers = [service for services in MEMBERS.values() for service in services]
    actors.until_healthy(workers)
    _until_more_settle(actors)
    for service in workers:
        actors.stack.fault("restart", service)
        actors.until_healthy([service])
        _until_more_settle(actors)
    told = count_traffic(actors, "traffic")
    actors.row.check(not told["skipped"], f"{told['skipped']} requests were not asked for: too many were running")
    rate = told["asked"] / told["took_s"]
    actors.row.notes.append(f"{told['asked']} requests, {rate:.1f} a second, {told['repeats']} tries beyond the first")
    for place, (destination, text) in enumerate(reversed(told["sample"])):
        for rank, service in enumerate(MEMBERS[destination]):
            options = ToyOptions(rank=rank, ranks=len(MEMBERS[destination]))
            actors.compare(service, text, from_pages=not place, options=options)  # the last came after all restarts
    for service in workers:
        no_share = partial(_has_no_share, actors, service)
        actors.until(no_share, REST_S, f"{service} has no share in a transfer that is not over")


def _until_more_settle(actors: Actors) -> None:
    """Return once so many more transfers have settled into each instance; whoever leads it counts them."""
    before = {instance: _settled(actors, instance) for instance in MEMBERS}
    for instance, settled in before.items():
        least = settled + SETTLES_AFTER
        actors.until(
            lambda instance=instance, least=least: _settled(actors, instance) >= least,  # type: ignore[misc]
            TRAFFIC_S,
            f"{least} transfers settle at {instance}",
        )


def _settled(actors: Actors, instance: str) -> int:
    return sum(actors.counter(service, "transfers_settled") for service in MEMBERS[instance])


def _has_no_share(actors: Actors, service: str) -> bool:
    return actors.counter(service, "settle_shares") == 0
