"""What a metric is: a name for Prometheus, and the counters by which an instance tells it.

A worker counts by flat names (`ucx_ended_completed`). Here each metric says which of them it is made of, with its
labels in braces: `{binding}_ended_{evidence}`. Bindings and domains are found in what was counted; all other labels
have their words in the code. So whatever an answer from the bus holds, no label grows with what is asked.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import product

from kvbus.roles.spread import bound_text, bucket_name, sum_name

Counted = Mapping[str, int | float | str]
"""Counters by name, as `stats` answers them."""
Labels = Mapping[str, str]

FOUND_MAX = 16
"""Bindings or domains of one answer: a worker has four of the first and one of the second for each pool."""
FOUND_PATTERN = re.compile(r"[a-z0-9-]{1,32}")
"""What they are called; without `_`, which ends a name in the counters."""
BINDING_SIGN, DOMAIN_SIGN = "_submissions", "_stopped"
"""Who has such a counter is a binding; who has only the second is a domain."""

_LABEL = re.compile(r"\{(\w+)\}")


class Kind(StrEnum):
    """The kinds of Prometheus that kvbus uses."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric; `suffix` and the label `le` are those of a histogram's parts."""

    labels: Labels
    value: float
    suffix: str = ""


@dataclass(frozen=True)
class Metric:
    """One metric: its name, kind and meaning, and the counter that it is read from.

    `words` holds the values of those labels that are not found in what was counted. Of a histogram `counter` is the
    name of its spread (`kvbus/roles/spread.py`), and `bounds` are the upper bounds of its buckets.
    """

    name: str
    kind: Kind
    about: str
    counter: str
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bounds: Sequence[float] = ()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels that the metric has beside those of whoever is read."""
        return tuple(_LABEL.findall(self.counter))

    def read(self, counted: Counted, found: Mapping[str, Sequence[str]]) -> Iterator[Sample]:
        """Yield what was counted of this; nothing where that is missing, or is no number.

        Of a counter whose words are known each one is told from the start, as 0: so nobody misses the first that comes.
        """
        if self.kind is Kind.HISTOGRAM:
            yield from self._read_buckets(counted)
            return
        unseen = 0.0 if counted and self.words and self.kind is Kind.COUNTER else None
        for words in product(*(self.words.get(label) or found.get(label, ()) for label in self.labels)):
            labels = dict(zip(self.labels, words, strict=True))
            value = number(counted.get(self.counter.format(**labels), unseen))
            if value is not None:
                yield Sample(labels, value)

    def _read_buckets(self, counted: Counted) -> Iterator[Sample]:
        keys = [*(bucket_name(self.counter, bound) for bound in self.bounds), bucket_name(self.counter, math.inf)]
        counts = [number(counted.get(key)) for key in keys]
        total, so_far = number(counted.get(sum_name(self.counter))), 0.0
        if total is None:
            return
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            so_far += count or 0.0
            yield Sample({"le": bound_text(bound)}, so_far, "_bucket")
        yield Sample({}, so_far, "_count")
        yield Sample({}, total, "_sum")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one of those who count has counted, and the labels that tell it from the others."""

    counted: Counted
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that are read together, and whom they are read from."""

    metrics: Sequence[Metric]
    readings: Sequence[Reading]

    def families(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """Yield each metric of which there is a sample, with all of them."""
        found = [found_in(reading.counted) for reading in self.readings]
        for metric in self.metrics:
            samples = [
                Sample({**reading.labels, **one.labels}, one.value, one.suffix)
                for reading, here in zip(self.readings, found, strict=True)
                for one in metric.read(reading.counted, here)
            ]
            if samples:
                yield metric, samples


def found_in(counted: Counted) -> dict[str, tuple[str, ...]]:
    """Return the bindings and domains that these counters speak of."""
    bindings = _named(counted, BINDING_SIGN)
    domains = _named(counted, DOMAIN_SIGN) - bindings
    return {"binding": tuple(sorted(bindings)[:FOUND_MAX]), "domain": tuple(sorted(domains)[:FOUND_MAX])}


def _named(counted: Counted, sign: str) -> set[str]:
    names = {key.removesuffix(sign) for key in counted if key.endswith(sign)}
    return {name for name in names if FOUND_PATTERN.fullmatch(name)}


def number(value: float | str | None) -> float | None:
    """Return a counter's value; None where it is no finite number."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
