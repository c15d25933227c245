"""A collector of OpenTelemetry's spans, as real exporters send them: OTLP over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class Span:
    """One that has ended. `parent` is empty at the beginning of a trace; attributes are strings here."""

    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, str]


class Collector:
    """What has come so far; `url` is where exporters send it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._changed = threading.Condition()
        self._spans: list[Span] = []

    def add(self, body: bytes) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        found = [
            Span(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                {a.key: str(getattr(a.value, a.value.WhichOneof("value") or "string_value")) for a in span.attributes},
            )
            for resource in sent.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self._spans += found
            self._changed.notify_all()

    def await_span(self, name: str, *, trace: str = "", **attributes: str) -> Span:
        """The first of that name, trace and attributes of ours; exporters send it a while after its end."""
        wanted = {f"sglang_reshard.{key}": value for key, value in attributes.items()}
        end = time.monotonic() + 30
        with self._changed:
            while True:
                for span in self._spans:
                    if span.name == name and span.trace.startswith(trace) and wanted.items() <= span.attributes.items():
                        return span
                if not self._changed.wait(end - time.monotonic()):
                    raise AssertionError(f"no span {name} of trace {trace!r} with {wanted} among {self._spans}")

    def trace(self, trace: str) -> list[Span]:
        with self._changed:
            return [span for span in self._spans if span.trace == trace]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this host."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.add(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}{PATH}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
