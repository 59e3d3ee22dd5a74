"""An observer that exports spans and metrics by OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.telemetry.observer import CallEvent, Observer, SaveEvent

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from aiockpt.telemetry.progress import Outcome
    from aiockpt.telemetry.saves import LoadResult, MirrorBacklog, MirrorResult, SaveResult
    from aiockpt.telemetry.timeline import Timed

_PHASES = ("capture", "plan", "stage", "write", "commit", "open", "read", "load_state_dict")


class OpenTelemetryObserver(Observer):
    """Makes a span for each save, load and deletion, and metrics, by the OpenTelemetry API.

    Which SDK receives them, and where that sends them, is up to the program. The span of a save is a child of the span
    in which `save` was called; below it are spans of its phases. The tables of names are in the documentation's page
    "observing".

    Args:
        tracer_provider: where spans go; None: the global one.
        meter_provider: where metrics go; None: the global one.

    Raises:
        ImportError: OpenTelemetry is not installed; the message names the extra.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as exc:
            raise ImportError("an OpenTelemetryObserver needs opentelemetry-api: pip install 'aiockpt[otel]'") from exc
        self._trace = trace
        self._tracer = trace.get_tracer("aiockpt", tracer_provider=tracer_provider)
        meter = metrics.get_meter("aiockpt", meter_provider=meter_provider)
        self._saves = meter.create_counter("aiockpt.saves", "{save}", "Saves that have ended, by outcome")
        self._in_flight = meter.create_up_down_counter(
            "aiockpt.saves.in_flight", "{save}", "Saves that have begun and not ended"
        )
        self._saved = meter.create_counter("aiockpt.save.io", "By", "Bytes of the files of checkpoints")
        self._captured = meter.create_histogram("aiockpt.save.captured", "s", "How long save() held its caller")
        self._staged = meter.create_histogram("aiockpt.save.staged", "s", "Until all tensors were copied")
        self._written = meter.create_histogram("aiockpt.save.duration", "s", "Until the checkpoint was durable")
        self._loads = meter.create_counter("aiockpt.loads", "{load}", "Loads that have ended, by outcome")
        self._read = meter.create_counter("aiockpt.load.io", "By", "Bytes that loads have read")
        self._loaded = meter.create_histogram("aiockpt.load.duration", "s", "Until everything was loaded")
        self._deletions = meter.create_counter("aiockpt.deletions", "{deletion}", "Deletions that have ended")
        self._mirrors = meter.create_counter("aiockpt.mirrors", "{step}", "Attempts to mirror a step that have ended")
        self._mirrored = meter.create_counter("aiockpt.mirror.io", "By", "Bytes that were sent to mirrors")
        self._spans: dict[int, tuple[Span, float]] = {}  # with the times at which they began, as of time.time

    # --- saves --------------------------------------------------------------------------------------

    def save_started(self, event: SaveEvent) -> None:
        """Begin the span: this is called in the context of the caller, whose span is the parent."""
        self._in_flight.add(1)
        started = event.time - event.elapsed_s  # all times are counted from here: two clocks would drift apart
        self._spans[event.number] = self._begin("aiockpt.save", event, started), started

    def staged(self, event: SaveEvent) -> None:
        """Add an event to the span."""
        self._staged.record(event.elapsed_s)
        if event.number in self._spans:
            span, started = self._spans[event.number]
            span.add_event("staged", {"aiockpt.bytes": event.nbytes}, _ns(started + event.elapsed_s))

    def written(self, event: SaveEvent, result: SaveResult) -> None:
        """End the span, and add spans of the phases."""
        self._captured.record(result.captured_s)
        self._written.record(result.written_s)
        self._saved.add(result.nbytes)
        if event.number in self._spans:
            span, started = self._spans[event.number]
            facts = {"tensors": result.tensors, "objects": result.objects, "files": len(result.files)}
            facts |= {"bytes": result.nbytes, "path": result.path}  # the fallback's, if it went there
            span.set_attributes({f"aiockpt.{name}": value for name, value in facts.items()})
            self._add_phases(span, result, started)
        self._end(event, "written")

    def _unwritten(self, event: SaveEvent, outcome: Outcome, error: BaseException) -> None:
        self._end(event, outcome, error if outcome == "failed" else None)

    def _end(self, event: SaveEvent, outcome: Outcome, error: BaseException | None = None) -> None:
        self._saves.add(1, {"aiockpt.outcome": outcome})
        if event.number in self._spans:  # a save that was skipped at the call has none
            span, started = self._spans.pop(event.number)
            self._in_flight.add(-1)
            self._close(span, started + event.elapsed_s, outcome, error)

    # --- loads and deletions --------------------------------------------------------------------------

    def loaded(self, event: CallEvent, result: LoadResult | None) -> None:
        """Make a span, with spans of the phases."""
        facts = {} if result is None else {"bytes": result.nbytes, "tensors": result.tensors}
        if result is not None:
            self._loaded.record(result.loaded_s)
            self._read.add(result.nbytes)
        self._add_call("load", self._loads, event, facts, result)

    def deleted(self, event: CallEvent) -> None:
        """Make a span."""
        self._add_call("delete", self._deletions, event, {})

    def mirrored(self, event: CallEvent, result: MirrorResult | None, backlog: MirrorBacklog) -> None:
        """Make a span."""
        facts = {"backlog": len(backlog.steps)}
        if result is not None:
            self._mirrored.add(result.sent_bytes)
            facts["bytes"] = result.nbytes
        self._add_call("mirror", self._mirrors, event, facts)

    def _add_call(
        self, name: str, count: Counter, event: CallEvent, facts: dict[str, int], result: Timed | None = None
    ) -> None:
        outcome, started = "done" if event.error is None else "failed", event.time - event.elapsed_s
        count.add(1, {"aiockpt.outcome": outcome})
        span = self._begin(f"aiockpt.{name}", event, started)
        span.set_attributes({f"aiockpt.{fact}": value for fact, value in facts.items()})
        if result is not None:
            self._add_phases(span, result, started)
        self._close(span, event.time, outcome, event.error)

    # --- spans --------------------------------------------------------------------------------------

    def _begin(self, name: str, event: SaveEvent | CallEvent, started: float) -> Span:
        return self._tracer.start_span(name, attributes={"aiockpt.path": event.path}, start_time=_ns(started))

    def _close(self, span: Span, time: float, outcome: str, error: BaseException | None) -> None:
        span.set_attribute("aiockpt.outcome", outcome)
        if error is not None:
            span.record_exception(error, timestamp=_ns(time))
            span.set_status(self._trace.StatusCode.ERROR, str(error))
        span.end(_ns(time))

    def _add_phases(self, parent: Span, result: Timed, started: float) -> None:
        """Add a span for each kind of work, from its first beginning to its last end."""
        context: Any = self._trace.set_span_in_context(parent)
        events = result.timeline()
        for name in _PHASES:
            group = [event for event in events if event.name == name]
            if group:
                # The events are sorted by their beginnings.
                begin, end = group[0].start_s, max(event.end_s for event in group)
                span = self._tracer.start_span(f"aiockpt.{name}", context, start_time=_ns(started + begin))
                span.set_attribute("aiockpt.bytes", sum(event.nbytes for event in group))
                span.end(_ns(started + end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
