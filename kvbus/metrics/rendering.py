"""Prometheus' text format, by prometheus-client. Importing this module imports that: do so only where it is wanted."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest

from kvbus.metrics.reading import Kind, Section

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The format's own version; every Prometheus reads it."""


class Exposition:
    """Renders sections together with what this process costs: memory, processor time, open files."""

    def __init__(self) -> None:
        self._sections: Sequence[Section] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def render(self, sections: Sequence[Section]) -> bytes:
        """Return what is to be answered; for one caller at a time."""
        self._sections = sections
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Promise nothing: what there is to tell is known when it is asked for."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield a family for each metric that has samples."""
        for section in self._sections:
            for metric, samples in section.families():
                counts = metric.kind is Kind.COUNTER
                name = metric.name.removesuffix("_total") if counts else metric.name
                family = Metric(name, metric.about, metric.kind.value)
                for one in samples:
                    family.add_sample(metric.name + one.suffix, dict(one.labels), one.value)
                yield family
