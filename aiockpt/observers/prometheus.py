"""An observer that exports metrics to Prometheus, by prometheus_client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.telemetry.observer import CallEvent, Observer, SaveEvent

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aiockpt.telemetry.progress import Outcome
    from aiockpt.telemetry.saves import LoadResult, MirrorBacklog, MirrorResult, SaveResult

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
        counter, gauge = partial(client.Counter, **names), partial(client.Gauge, **names)
        histogram = partial(client.Histogram, buckets=_SECONDS, **names)
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
