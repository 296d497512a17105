"""The gates of all instances that a gateway speaks for: made when one is first needed, dropped when it is long gone.

Instances may have names that are used once, as those of pods do. What they counted stays in the totals.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvbus.gateway.directory import Directory
from kvbus.gateway.gate import GateStatistics, TransferGate
from kvbus.gateway.restarts import Restarts
from kvbus.gateway.settings import GatewaySettings


class Gates:
    """A gate for each instance that was ever asked for and is known still, by name."""

    def __init__(self, settings: GatewaySettings, directory: Directory) -> None:
        self._settings = settings
        self._directory = directory
        self._gates: dict[str, TransferGate] = {}
        self._restarts = Restarts()
        self._dropped = GateStatistics()

    def __contains__(self, instance: str) -> bool:
        return instance in self._gates

    def names(self) -> list[str]:
        """Return whose gates there are."""
        return list(self._gates)

    def gate(self, instance: str, now: float) -> TransferGate:
        """Return the gate of an instance; a new one takes the place of those that are long gone."""
        if instance not in self._gates:
            self.drop_gone(now)
            settings = self._settings
            self._gates[instance] = TransferGate(
                inflight_max=settings.inflight_max,
                dedup_ttl_s=settings.dedup_ttl_s,
                entries_max=settings.entries_max,
            )
        return self._gates[instance]

    def drop_gone(self, now: float) -> None:
        """Drop the gates of instances that were not registered for an hour and for which nothing runs."""
        kept = self._settings.instances
        for name, gate in list(self._gates.items()):
            if gate.is_idle and name not in kept and not self._directory.knows(name):
                self._dropped += replace(gate.statistics(now), seen=0, max_inflight=0)
                self._restarts.forget(name)
                del self._gates[name]

    def total(self, names: Iterable[str], now: float) -> GateStatistics:
        """Return the counters of instances, added up, with those of all that were dropped."""
        return sum((self.gate(name, now).statistics(now) for name in names), self._dropped)

    def notice_restart(self, instance: str, now: float) -> None:
        """A member that started again has an empty pool: what was brought into it may be brought again."""
        if self._restarts.registered(instance, self._directory.instances.get(instance, {})):
            self.gate(instance, now).forget_ended()
