"""The observers that ship with the package, tested with the real libraries."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import aiockpt
import aiockpt.observers
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.states import large_state


def produce_every_outcome(observer: aiockpt.Observer, folder: Path) -> tuple[aiockpt.SaveResult, aiockpt.LoadResult]:
    """Produce each outcome of saves, loads and deletions; return the results of the save and the load that succeed."""
    gate = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(observers=[observer], on_busy="skip", on_failure="warn") as ckpt:
        result = ckpt.save(large_state(20), folder / "good")
        held = ckpt.submit({"x": 1}, folder / "held", storage=gate)
        assert ckpt.submit({"x": 1}, folder / "skipped").skipped
        cancelled = held.cancel()
        gate.open("create")
        assert cancelled.result()
        ckpt.ready()
        fault = FaultyStorage(LocalStorage(), "write", OSError(28, "No space left on device"))
        assert ckpt.save({"x": 1}, folder / "full", storage=fault).error is not None
        ckpt.load(folder / "good")
        loaded = ckpt.last_load
        assert loaded is not None
        for call in (ckpt.load, ckpt.delete):
            with pytest.raises(aiockpt.CheckpointNotFoundError):
                call(folder / "gone")
        ckpt.delete(folder / "good")
    return result, loaded


# --- logging --------------------------------------------------------------------------------------------


def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiockpt.observers")
    result, loaded = produce_every_outcome(aiockpt.observers.LoggingObserver(), tmp_path)
    records = [record for record in caplog.records if record.name == "aiockpt.observers"]
    by_name: dict[str, list[logging.LogRecord]] = {}
    for record in records:
        by_name.setdefault(record.aiockpt_event, []).append(record)
    (written,) = by_name["written"]
    assert written.levelno == logging.INFO
    assert written.getMessage().startswith(f"saved {tmp_path}/good: 10.0 MiB in ")
    assert (written.bytes, written.seconds, written.path) == (result.nbytes, result.written_s, f"{tmp_path}/good")
    (failed,) = by_name["failed"]
    assert failed.levelno == logging.ERROR
    assert "No space left on device" in failed.getMessage()
    assert [by_name[name][0].levelno for name in ("cancelled", "skipped")] == [logging.WARNING] * 2
    good, bad = by_name["loaded"]
    assert (good.levelno, good.bytes) == (logging.INFO, loaded.nbytes)
    assert (bad.levelno, bad.path) == (logging.ERROR, f"{tmp_path}/gone")
    assert [record.levelno for record in by_name["deleted"]] == [logging.ERROR, logging.INFO]
    assert {record.levelno for name in ("save_started", "staged") for record in by_name[name]} == {logging.DEBUG}


def test_log_lines_of_a_given_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = logging.getLogger("mine")
    caplog.set_level(logging.DEBUG, "mine")
    observer = aiockpt.observers.LoggingObserver(mine, level=logging.DEBUG)
    with aiockpt.SyncCheckpointer(observers=[observer]) as ckpt:
        ckpt.save({"x": 1}, tmp_path / "a\nb")
    (line,) = [record for record in caplog.records if record.aiockpt_event == "written"]
    assert (line.name, line.levelno) == ("mine", logging.DEBUG)
    assert "\n" not in line.getMessage()


# --- Prometheus -----------------------------------------------------------------------------------------


def test_prometheus_metrics(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    begun = time.time()
    result, loaded = produce_every_outcome(aiockpt.observers.PrometheusObserver(registry), tmp_path)
    families = {each.name: each for each in text_string_to_metric_families(client.generate_latest(registry).decode())}
    value = registry.get_sample_value
    outcomes = {
        name: value("aiockpt_saves_total", {"outcome": name}) for name in ("written", "failed", "cancelled", "skipped")
    }
    assert outcomes == dict.fromkeys(outcomes, 1.0)
    assert value("aiockpt_saves_in_flight") == 0
    assert value("aiockpt_saved_bytes_total") == value("aiockpt_last_save_bytes") == result.nbytes
    assert begun < value("aiockpt_last_save_timestamp_seconds") < time.time()
    assert value("aiockpt_save_written_seconds_sum") == pytest.approx(result.written_s)
    assert value("aiockpt_save_captured_seconds_sum") == pytest.approx(result.captured_s)
    assert value("aiockpt_save_written_seconds_count") == 1
    assert value("aiockpt_loaded_bytes_total") == loaded.nbytes
    assert value("aiockpt_load_seconds_sum") == pytest.approx(loaded.loaded_s)
    for name in ("loads", "deletions"):
        assert [value(f"aiockpt_{name}_total", {"outcome": each}) for each in ("done", "failed")] == [1.0, 1.0]
    assert all(family.documentation for family in families.values())
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    for name, family in families.items():  # Prometheus asks for base units, and for counters that end with _total
        if family.type == "histogram":
            assert name.endswith("_seconds"), name
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples), name
    with pytest.raises(ValueError, match=r"Duplicated.*give that one to several checkpointers"):
        aiockpt.observers.PrometheusObserver(registry)
    aiockpt.observers.PrometheusObserver(registry, namespace="other")


def test_all_outcomes_are_exported_before_the_first_save() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    aiockpt.observers.PrometheusObserver(registry)
    assert registry.get_sample_value("aiockpt_saves_total", {"outcome": "failed"}) == 0


# --- OpenTelemetry --------------------------------------------------------------------------------------


def test_opentelemetry_spans_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(shutdown_on_exit=False), MeterProvider([reader], shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    observer = aiockpt.observers.OpenTelemetryObserver(tracers, meters)
    with tracers.get_tracer("training").start_as_current_span("step") as step:
        result, loaded = produce_every_outcome(observer, tmp_path)
    spans = exporter.get_finished_spans()
    saves = {Path(span.attributes["aiockpt.path"]).name: span for span in spans if span.name == "aiockpt.save"}
    assert {name: span.attributes["aiockpt.outcome"] for name, span in saves.items()} == {
        "good": "written",
        "held": "cancelled",
        "full": "failed",
    }
    good = saves["good"]
    assert all(span.parent.span_id == step.get_span_context().span_id for span in saves.values())
    assert good.attributes["aiockpt.bytes"] == result.nbytes
    assert (good.end_time - good.start_time) / 1e9 == pytest.approx(result.written_s, rel=0.5)
    assert [event.name for event in good.events] == ["staged"]
    assert saves["full"].status.status_code is StatusCode.ERROR
    assert "No space left" in saves["full"].status.description
    assert [event.name for event in saves["full"].events][-1] == "exception"
    phases = {span.name: span for span in spans if span.parent and span.parent.span_id == good.context.span_id}
    assert set(phases) == {f"aiockpt.{name}" for name in ("capture", "plan", "stage", "write", "commit")}
    assert phases["aiockpt.write"].attributes["aiockpt.bytes"] == result.nbytes
    assert all(good.start_time <= span.start_time <= span.end_time <= good.end_time for span in phases.values())
    loads = [span for span in spans if span.name == "aiockpt.load"]
    assert [span.attributes["aiockpt.outcome"] for span in loads] == ["done", "failed"]
    assert loads[0].attributes["aiockpt.bytes"] == loaded.nbytes
    assert [s.attributes["aiockpt.outcome"] for s in spans if s.name == "aiockpt.delete"] == ["failed", "done"]

    (resource,) = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert {name: metric.unit for name, metric in metrics.items() if name.startswith("aiockpt.save")} == {
        "aiockpt.saves": "{save}",
        "aiockpt.saves.in_flight": "{save}",
        "aiockpt.save.io": "By",
        "aiockpt.save.captured": "s",
        "aiockpt.save.staged": "s",
        "aiockpt.save.duration": "s",
    }
    counts = {point.attributes["aiockpt.outcome"]: point.value for point in metrics["aiockpt.saves"].data.data_points}
    assert counts == {"written": 1, "failed": 1, "cancelled": 1, "skipped": 1}
    assert [point.value for point in metrics["aiockpt.saves.in_flight"].data.data_points] == [0]
    assert [point.value for point in metrics["aiockpt.save.io"].data.data_points] == [result.nbytes]
    assert [point.sum for point in metrics["aiockpt.save.duration"].data.data_points] == [
        pytest.approx(result.written_s)
    ]
    tracers.shutdown()
    meters.shutdown()


# --- without the libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "missing", "extra"),
    [
        (aiockpt.observers.PrometheusObserver, "prometheus_client", "prometheus"),
        (aiockpt.observers.OpenTelemetryObserver, "opentelemetry", "otel"),
    ],
)
def test_missing_library_names_the_extra(
    make: Callable[[], object], missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"pip install 'aiockpt\[{extra}\]'"):
        make()
