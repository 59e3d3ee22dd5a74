"""Observers that log saves and loads, and that export metrics and traces; `aiockpt.Observer` is their interface.

::

    ckpt = aiockpt.AsyncCheckpointer(observers=[aiockpt.observers.LoggingObserver()])

`PrometheusObserver` needs ``pip install 'aiockpt[prometheus]'``, `OpenTelemetryObserver` ``'aiockpt[otel]'``.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.errors import printable, printable_key
from aiockpt.telemetry.card import size_text, time_text
from aiockpt.telemetry.observer import CallEvent as CallEvent
from aiockpt.telemetry.observer import Observer as Observer
from aiockpt.telemetry.observer import SaveEvent as SaveEvent

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, MeterProvider
    from opentelemetry.trace import Span, TracerProvider
    from prometheus_client import CollectorRegistry

    from aiockpt.telemetry.progress import Outcome
    from aiockpt.telemetry.saves import LoadResult, MirrorBacklog, MirrorResult, SaveResult
    from aiockpt.telemetry.timeline import Timed

__all__ = [
    "CallEvent",
    "LoggingObserver",
    "Observer",
    "OpenTelemetryObserver",
    "PrometheusObserver",
    "SaveEvent",
]


# --- logs ----------------------------------------------------------------------------------------------


class LoggingObserver(Observer):
    """Logs a line for each event: failures as errors, skipped saves as warnings.

    The figures are attributes of the log records too, for formatters that write JSON: ``aiockpt_event``, which is the
    name of the observer's method, ``path``, and where they are known ``bytes`` and ``seconds``.

    Args:
        logger: where to log; None: the logger "aiockpt.observers".
        level: the level of what goes well.
    """

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logging.getLogger("aiockpt.observers") if logger is None else logger
        self._level = level

    def save_started(self, event: SaveEvent) -> None:
        """Log at the level DEBUG: most programs only ask how it ends."""
        self._log(logging.DEBUG, "save_started", "saving %s", event.path)

    def staged(self, event: SaveEvent) -> None:
        """Log at the level DEBUG."""
        figures = {"bytes": event.nbytes, "seconds": event.elapsed_s}
        self._log(logging.DEBUG, "staged", "staged %s after %s", event.path, time_text(event.elapsed_s), **figures)

    def written(self, event: SaveEvent, result: SaveResult) -> None:
        """Log size, time and speed."""
        size, took, speed = size_text(result.nbytes), time_text(result.written_s), size_text(result.bytes_per_s)
        figures = {"bytes": result.nbytes, "seconds": result.written_s}
        self._log(self._level, "written", "saved %s: %s in %s (%s/s)", result.path, size, took, speed, **figures)

    def _unwritten(self, event: SaveEvent, outcome: Outcome, error: BaseException) -> None:
        """Log a failure as an error, all else as a warning."""
        level = logging.ERROR if outcome == "failed" else logging.WARNING
        self._log(level, outcome, "%s was not saved: %s", event.path, error, seconds=event.elapsed_s)

    def loaded(self, event: CallEvent, result: LoadResult | None) -> None:
        """Log size, time and speed, or the error."""
        if result is None:
            self._log_failure(logging.ERROR, "loaded", event)
            return
        size, took, speed = size_text(result.nbytes), time_text(result.loaded_s), size_text(result.bytes_per_s)
        figures = {"bytes": result.nbytes, "seconds": result.loaded_s}
        self._log(self._level, "loaded", "loaded %s: %s in %s (%s/s)", event.path, size, took, speed, **figures)

    def deleted(self, event: CallEvent) -> None:
        """Log the deletion, or the error."""
        if event.error is not None:
            self._log_failure(logging.ERROR, "deleted", event)
            return
        took = time_text(event.elapsed_s)
        self._log(self._level, "deleted", "deleted %s in %s", event.path, took, seconds=event.elapsed_s)

    def mirrored(self, event: CallEvent, result: MirrorResult | None, backlog: MirrorBacklog) -> None:
        """Log size, time and what is left, or the error."""
        left = {"backlog_steps": len(backlog.steps), "backlog_bytes": backlog.nbytes}
        if result is None:
            self._log_failure(logging.WARNING, "mirrored", event, **left)
            return
        size, took = size_text(result.nbytes), time_text(result.mirrored_s)
        figures = {"bytes": result.nbytes, "sent_bytes": result.sent_bytes, "seconds": result.mirrored_s, **left}
        text = "mirrored %s: %s in %s; %d steps are left"
        self._log(self._level, "mirrored", text, event.path, size, took, len(backlog.steps), **figures)

    def _log_failure(self, level: int, name: str, event: CallEvent, **figures: float) -> None:
        text = f"%s was not {name}: %s"
        self._log(level, name, text, event.path, event.error, seconds=event.elapsed_s, **figures)

    def _log(self, level: int, name: str, text: str, path: str, *args: object, **figures: float) -> None:
        shown = [printable(str(value)) if isinstance(value, BaseException) else value for value in args]
        extra = {"aiockpt_event": name, "path": path, **figures}
        self._logger.log(level, text, printable_key(path), *shown, extra=extra)


# --- Prometheus ----------------------------------------------------------------------------------------

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_BY = ("outcome",)


class PrometheusObserver(Observer):
    """Counts and measures saves, loads and deletions in metrics of `prometheus_client`.

    The program exports them, as with ``prometheus_client.start_http_server(9000)``. One observer can be given to
    several checkpointers. The table of the metrics is in the documentation's page "observing".

    Args:
        registry: where to register the metrics; None: the default registry. A registry takes each name once, so a
            second observer needs a registry of its own, or another namespace.
        namespace: what the names begin with.

    Raises:
        ImportError: prometheus_client is not installed; the message names the extra.
        ValueError: the registry has such metrics already.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, namespace: str = "aiockpt") -> None:
        try:
            import prometheus_client as client
        except ImportError as exc:
            raise ImportError(
                "a PrometheusObserver needs prometheus_client: pip install 'aiockpt[prometheus]'"
            ) from exc
        names: Any = {"namespace": namespace, "registry": client.REGISTRY if registry is None else registry}
        counter: Any = partial(client.Counter, **names)
        gauge: Any = partial(client.Gauge, **names)
        histogram: Any = partial(client.Histogram, buckets=_SECONDS, **names)
        try:
            self._saves = counter("saves_total", "Saves that have ended, by outcome", _BY)
        except ValueError as exc:
            raise ValueError(
                f"the registry has the metrics of a PrometheusObserver already ({exc}): give that one to several "
                "checkpointers, or pass namespace= or registry="
            ) from exc
        self._in_flight = gauge("saves_in_flight", "Saves that have begun and not ended")
        self._captured = histogram("save_captured_seconds", "How long save() held its caller")
        self._staged = histogram("save_staged_seconds", "From the call of save until all tensors were copied")
        self._written = histogram("save_written_seconds", "From the call of save until the checkpoint was durable")
        self._saved_bytes = counter("saved_bytes_total", "Bytes of the files of checkpoints that were written")
        self._last_time = gauge("last_save_timestamp_seconds", "When the last checkpoint was written, Unix time")
        self._last_bytes = gauge("last_save_bytes", "Bytes of the files of the last checkpoint that was written")
        self._loads = counter("loads_total", "Loads that have ended, by outcome", _BY)
        self._loaded = histogram("load_seconds", "From the call of load until everything was loaded")
        self._read_bytes = counter("loaded_bytes_total", "Bytes that loads have read")
        self._deletions = counter("deletions_total", "Deletions that have ended, by outcome", _BY)
        self._mirrors = counter("mirrors_total", "Attempts to mirror a step that have ended, by outcome", _BY)
        self._mirrored_bytes = counter("mirrored_bytes_total", "Bytes that were sent to mirrors")
        self._backlog = gauge("mirror_backlog_steps", "Steps that the mirror lacks and will get")
        self._backlog_bytes = gauge("mirror_backlog_bytes", "Bytes of the files of these steps")
        self._mirror_time = gauge(
            "mirror_newest_timestamp_seconds", "When the mirror's newest step was saved, Unix time"
        )
        for outcome in (
            "written",
            "failed",
            "cancelled",
            "skipped",
        ):  # present from the beginning, so that a rate sees the first failure
            self._saves.labels(outcome)
        for outcome in ("done", "failed"):
            self._loads.labels(outcome)
            self._deletions.labels(outcome)
            self._mirrors.labels(outcome)
        # By number, which is unique in the process: the observer may belong to several checkpointers.
        self._running: set[int] = set()

    def save_started(self, event: SaveEvent) -> None:
        """Count it as in flight."""
        self._running.add(event.number)
        self._in_flight.inc()

    def staged(self, event: SaveEvent) -> None:
        """Measure the time."""
        self._staged.observe(event.elapsed_s)

    def written(self, event: SaveEvent, result: SaveResult) -> None:
        """Count it, and measure times and bytes."""
        self._end(event, "written")
        self._captured.observe(result.captured_s)
        self._written.observe(result.written_s)
        self._saved_bytes.inc(result.nbytes)
        self._last_bytes.set(result.nbytes)
        self._last_time.set(event.time)

    def _unwritten(self, event: SaveEvent, outcome: Outcome, error: BaseException) -> None:
        self._end(event, outcome)

    def _end(self, event: SaveEvent, outcome: Outcome) -> None:
        self._saves.labels(outcome).inc()
        if event.number in self._running:  # else it was skipped at the call
            self._running.discard(event.number)
            self._in_flight.dec()

    def loaded(self, event: CallEvent, result: LoadResult | None) -> None:
        """Count it, and measure time and bytes."""
        self._loads.labels("failed" if result is None else "done").inc()
        if result is not None:
            self._loaded.observe(result.loaded_s)
            self._read_bytes.inc(result.nbytes)

    def deleted(self, event: CallEvent) -> None:
        """Count it."""
        self._deletions.labels("done" if event.error is None else "failed").inc()

    def mirrored(self, event: CallEvent, result: MirrorResult | None, backlog: MirrorBacklog) -> None:
        """Count it, and measure what is left."""
        self._mirrors.labels("failed" if result is None else "done").inc()
        self._mirrored_bytes.inc(0 if result is None else result.sent_bytes)
        self._backlog.set(len(backlog.steps))
        self._backlog_bytes.set(backlog.nbytes)
        self._mirror_time.set(backlog.newest_time)


# --- OpenTelemetry -------------------------------------------------------------------------------------

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
            facts["bytes"] = result.nbytes
            span.set_attribute("aiockpt.path", result.path)  # the fallback, if it went there
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
