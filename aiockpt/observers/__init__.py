"""Observers that log saves and loads, and that export metrics and traces; `aiockpt.Observer` is their interface.

::

    ckpt = aiockpt.AsyncCheckpointer(observers=[aiockpt.observers.LoggingObserver()])

`PrometheusObserver` needs ``pip install 'aiockpt[prometheus]'``, `OpenTelemetryObserver` ``'aiockpt[otel]'``.
"""

from aiockpt.observers.logs import LoggingObserver as LoggingObserver
from aiockpt.observers.opentelemetry import OpenTelemetryObserver as OpenTelemetryObserver
from aiockpt.observers.prometheus import PrometheusObserver as PrometheusObserver
from aiockpt.telemetry.observer import CallEvent as CallEvent
from aiockpt.telemetry.observer import Observer as Observer
from aiockpt.telemetry.observer import SaveEvent as SaveEvent

__all__ = [
    "CallEvent",
    "LoggingObserver",
    "Observer",
    "OpenTelemetryObserver",
    "PrometheusObserver",
    "SaveEvent",
]
