"""Reads what a `/metrics` answers: by Prometheus' own parser, and by promtool, as a person would check it."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.absent import absent

PROMTOOL_S = 60.0


@dataclass(frozen=True)
class Exposed:
    """One answer of a `/metrics`."""

    text: str

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(one for family in text_string_to_metric_families(self.text) for one in family.samples)

    @property
    def names(self) -> frozenset[str]:
        """The names of all metrics, as their TYPE lines have them."""
        return frozenset(line.split()[2] for line in self.text.splitlines() if line.startswith("# TYPE "))

    def of(self, name: str, **labels: str) -> Iterator[Sample]:
        """The samples of this name that have these labels."""
        for one in self.samples:
            if one.name == name and labels.items() <= one.labels.items():
                yield one

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample that this is."""
        (one,) = self.of(name, **labels)
        return float(one.value)

    def labels(self, name: str, label: str) -> set[str]:
        """The values that a label has."""
        return {one.labels[label] for one in self.of(name)}


def promtool(*arguments: str, stdin: str = "", folder: Path | None = None) -> str:
    """Run promtool, and return what it found to say; AssertionError where it found a fault."""
    program = shutil.which("promtool")
    if program is None:
        absent("promtool is missing: apt-get install prometheus")
    ran = subprocess.run(
        [program, *arguments], input=stdin, cwd=folder, capture_output=True, text=True, timeout=PROMTOOL_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def well_named(exposed: Exposed) -> None:
    """Have promtool check names, kinds, units and help of an answer that has some."""
    assert exposed.samples
    assert promtool("check", "metrics", stdin=exposed.text) == ""
