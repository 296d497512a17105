"""Spans of OpenTelemetry, where somebody has installed and configured it; nothing at all elsewhere.

Nobody but this module knows OpenTelemetry. It is looked at only once a provider can have been set, so that a process
that traces nothing imports nothing and makes no object for a span (R23). A caller's `traceparent` is carried on all the
same: whoever comes next may trace.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from kvbus.errors import ConfigError
from kvbus.traceparent import checked_traceparent
from kvbus.version import VERSION

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context as OtelContext
    from opentelemetry.sdk.trace.export import SpanExporter

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | tuple[str, ...]

NAME = "kvbus"
_EXPORTERS = "opentelemetry_traces_exporter"
_OTLP = ("otlp_proto_http", "otlp_proto_grpc", "otlp")
_ASKED_BY = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_HERE: ContextVar[str | None] = ContextVar("kvbus_traceparent", default=None)


class Span:
    """One span, or none; its `traceparent` is what goes to whoever acts for it: without a span, its caller's."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: "otel.Span | None", traceparent: str | None) -> None:
        self._span = span
        self.traceparent = traceparent

    @property
    def is_recorded(self) -> bool:
        """Whether it is more than a caller's traceparent, and has not ended."""
        return self._span is not None

    def note(self, **attributes: Value) -> None:
        """Say more about it."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def event(self, name: str, text: str = "") -> None:
        """Say that something happened within it."""
        if self._span is not None:
            self._span.add_event(name, {"kvbus.text": text} if text else {})

    def end(self, failure: str = "") -> None:
        """End it, as failed where a reason is given; ending it again changes nothing."""
        span, self._span = self._span, None
        if span is None:
            return
        if failure:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - it is installed: there is a span

            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()


NO_SPAN = Span(None, None)


def is_on() -> bool:
    """Whether somebody traces here, so that spans are made."""
    return _provider() is not None


def begin(
    name: str, parent: str | None = None, attributes: Mapping[str, Value] | None = None, *, kind: Kind = "internal"
) -> Span:
    """Begin a span; `parent` is a traceparent, and without one it is the first of a trace of its own."""
    provider = _provider()
    if provider is None:
        return Span(None, parent) if parent else NO_SPAN
    from opentelemetry import trace  # noqa: PLC0415 - it is imported already: there is a provider

    span = provider.get_tracer(NAME, VERSION).start_span(
        name,
        context=_context(parent),
        kind=trace.SpanKind[kind.upper()],
        attributes=_named(attributes or {}),
    )
    context = span.get_span_context()
    if not context.is_valid:
        return Span(None, parent)
    return Span(span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")


@contextmanager
def within(traceparent: str | None) -> Iterator[None]:
    """Let `current` return this in the block, and in the tasks that are begun in it."""
    token = _HERE.set(traceparent)
    try:
        yield
    finally:
        _HERE.reset(token)


def current() -> str | None:
    """Return the traceparent of what runs here: that of `within`, else of the caller's own span of OpenTelemetry."""
    here = _HERE.get()
    if here is not None or _provider() is None:
        return here
    from opentelemetry import trace  # noqa: PLC0415 - as above

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def set_up(environment: Mapping[str, str] = os.environ) -> bool:
    """Configure OpenTelemetry where its own variables ask for it; whether it was. ConfigError says what is missing.

    `OTEL_TRACES_EXPORTER` names an exporter (`otlp`, `console`); an OTLP endpoint alone stands for `otlp`. What else
    the SDK reads from the environment holds too: sampler, resource, batches.
    """
    asked = [name for name in _ASKED_BY if environment.get(name)]
    wanted = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if not asked or wanted == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            f"{asked[0]} asks for traces, and OpenTelemetry is not installed: pip install 'kvbus[traces]'"
        )
    if _provider() is not None:  # whoever started us has set one
        return True
    from opentelemetry import trace  # noqa: PLC0415 - traces are asked for
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above

    resource = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": NAME})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(wanted)))
    trace.set_tracer_provider(provider)
    return True


def _exporter(wanted: str) -> "SpanExporter":
    found = {point.name: point for point in entry_points(group=_EXPORTERS)}
    names = _OTLP if wanted == "otlp" else (wanted,)
    for name in names:
        if name in found:
            exporter: SpanExporter = found[name].load()()
            return exporter
    known = ", ".join(sorted(found)) or "none"
    raise ConfigError(f"there is no exporter of traces named {wanted!r}: pip install 'kvbus[traces]'", installed=known)


def _provider() -> "otel.TracerProvider | None":
    """Return the provider that somebody has set in this process."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider: otel.TracerProvider = trace.get_tracer_provider()
    unset = isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
    return None if unset else provider


def _context(traceparent: str | None) -> "OtelContext":
    """Return a context whose parent is a span elsewhere, and whatever span is current here is not."""
    from opentelemetry import trace  # noqa: PLC0415 - there is a provider
    from opentelemetry.context import Context  # noqa: PLC0415 - as above

    checked = checked_traceparent(traceparent)
    if checked is None:
        return Context()
    _, trace_id, span_id, flags = checked.split("-")
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes under names of ours; one with a dot in it has its name from OpenTelemetry's conventions."""
    return {name if "." in name else f"kvbus.{name}": value for name, value in attributes.items()}
