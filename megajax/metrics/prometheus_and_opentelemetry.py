"""Training metrics for Prometheus, and metrics and events for OpenTelemetry.

The instruments are those of the OpenTelemetry SDK; Prometheus reads them under the same names with `_` for `.`.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from megajax.command_line.help import field_texts
from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.display.text import say
from megajax.metrics.config import TelemetryConfig
from megajax.metrics.record import EvaluationRecord, Record, StepRecord
from megajax.metrics.throughput import Rates
from megajax.metrics.writer import Writer
from megajax.processes.world import split_address

PREFIX = "megajax."
EXPORT_SECONDS = 5
"""Limit of one request to the collector."""
NANOSECONDS = 10**9
EVENT_PHASES = {"start": ("setup", "setup_seconds"), "compile": ("compiling", "seconds")}
"""Event -> its phase, and its field with the seconds. The step that follows a compilation contains it."""
LONGEST = 300
"""Characters of an error that are printed."""


class TelemetryWriter(Writer):
    """Records as gauges, times and events as counters, events as spans of a trace for each attempt.

    Errors of the collector do not end the run; the first one is printed.
    """

    def __init__(self, config: TelemetryConfig, run: str):
        """run: name of the run, a label of all values. Raises UserError if the port of Prometheus is not free."""
        for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            require(module, "logging.telemetry", otherwise="remove logging.telemetry")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        self._labels, self._stack = {"run": run}, ExitStack()
        readers = []
        if config.prometheus is not None:
            readers.append(self._prometheus(config.prometheus))
        if config.otlp is not None:
            self._stack.enter_context(_first_error_printed(config.otlp))
            readers.append(_metric_reader(config.otlp, config.every_seconds))
        resource = Resource.create({"service.name": "megajax", "service.instance.id": run})
        metrics = MeterProvider(metric_readers=readers, resource=resource)
        self._stack.callback(metrics.shutdown, timeout_millis=2000 * EXPORT_SECONDS)
        self._meter, self._gauges = metrics.get_meter("megajax"), dict[str, Any]()
        steps = field_texts(StepRecord) | field_texts(Rates)
        self._texts = {"train": steps, "evaluation": field_texts(EvaluationRecord)}
        self._steps = self._counter("steps", "Steps of this process.")
        self._seconds = self._counter("seconds", "Wall time of this process by phase.")
        self._events = self._counter("events", "Events by name.")
        for phase in ("step", "data_wait", "evaluation", "save"):
            # From 0: Prometheus does not count the first value that it sees as an increase.
            self._seconds.add(0, {**self._labels, "phase": phase})
        self._spans = None if config.otlp is None else self._open_trace(config.otlp, resource)

    def log(self, record: Record) -> None:
        line, labels = record.line(), dict(self._labels)
        layers, group = line.pop("by_layer", {}), "train"
        if isinstance(record, EvaluationRecord):
            labels["split"], group = line.pop("split"), "evaluation"
        self._set(group, line, labels)
        if not isinstance(record, StepRecord):
            return
        self._steps.add(1, {**labels, "skipped": str(record.skipped).lower()})
        for phase, seconds in {"step": record.rates.step_seconds, **record.phases}.items():
            if not phase.endswith(("_min", "_max")):
                self._seconds.add(seconds, {**labels, "phase": phase})
        if record.detailed:
            numbers = layers.pop("layers", ())
            for name, values in layers.items():
                for layer, value in zip(numbers, values, strict=True):
                    self._set("layers", {name: value}, {**labels, "layer": str(layer)})

    def event(self, name: str, /, **fields: Any) -> None:
        self._events.add(1, {**self._labels, "event": name})
        if name in EVENT_PHASES:
            phase, key = EVENT_PHASES[name]
            self._seconds.add(fields[key], {**self._labels, "phase": phase})
        if name == "goodput":
            self._set("goodput", {"share": fields["effective"]}, self._labels)
            for cause, seconds in fields["lost_seconds"].items():
                self._set("goodput", {"lost_seconds": seconds}, {**self._labels, "cause": cause})
        if self._spans is not None:
            end = fields.pop("time", time.time())
            start = int((end - (fields.get("seconds") or 0)) * NANOSECONDS)
            span = self._spans(name, start_time=start)
            span.set_attributes({key: _plain(value) for key, value in fields.items() if value is not None})
            span.end(int(end * NANOSECONDS))

    def close(self) -> None:
        self._stack.close()

    def _set(self, group: str, values: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Set gauges to the numbers among `values`."""
        for name, value in values.items():
            if isinstance(value, int | float):
                path = f"{PREFIX}{group}.{name}"
                if path not in self._gauges:
                    text = self._texts.get(group, {}).get(name, f"{name} of {group}, as in the files of the run.")
                    self._gauges[path] = self._meter.create_gauge(path, description=" ".join(text.split()))
                self._gauges[path].set(float(value), labels)

    def _counter(self, name: str, text: str) -> Any:
        return self._meter.create_counter(f"{PREFIX}{name}", description=text)

    def _prometheus(self, address: str) -> Any:
        """Answer Prometheus at HOST:PORT."""
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        host, port = cast(tuple[str, int], split_address(address))
        try:
            server, thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UserError(
                f"logging.telemetry.prometheus={address} can't be opened: {error.strerror or error}. Set another port, "
                "or remove it"
            ) from error
        self._stack.callback(thread.join)
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        return PrometheusMetricReader(scope_info_enabled=False, registry=registry)

    def _open_trace(self, url: str, resource: Any) -> Callable[..., Any]:
        """(name, start_time) -> a span of this attempt's trace, from any thread."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        spans = TracerProvider(resource=resource)
        spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", timeout=EXPORT_SECONDS)))
        self._stack.callback(spans.shutdown)
        tracer = spans.get_tracer("megajax")
        attempt = tracer.start_span("attempt")
        self._stack.callback(attempt.end)
        return partial(tracer.start_span, context=trace.set_span_in_context(attempt))


class _FirstError(logging.Handler):
    """Prints the first message of the SDK, which logs several for every failed attempt, and no other."""

    def __init__(self, url: str):
        super().__init__(logging.WARNING)
        self._url, self._printed = url, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._printed:
            self._printed = True
            text = f"logging.telemetry.otlp={self._url}: {record.getMessage()[:LONGEST]}"
            say(f"{text}; training goes on, and further errors are not printed")


@contextmanager
def _first_error_printed(url: str) -> Generator[None]:
    messages, handler = logging.getLogger("opentelemetry"), _FirstError(url)
    messages.addHandler(handler)
    propagated, messages.propagate = messages.propagate, False
    try:
        yield
    finally:
        messages.removeHandler(handler)
        messages.propagate = propagated


def _metric_reader(url: str, every_seconds: float) -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(f"{url}/v1/metrics", timeout=EXPORT_SECONDS)
    return PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * every_seconds)


def _plain(value: object) -> str | bool | int | float:
    """A value as an attribute of a span may be."""
    return value if isinstance(value, str | bool | int | float) else str(value)
