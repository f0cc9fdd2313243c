"""A monitor that serves the latest metrics of a run to Prometheus, by HTTP from the first rank."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from onefold.config import ConfigError

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_SECTIONS = ("Train/Samples/", "onefold/")


class MetricsServer:
    """Serves `http://HOST:PORT/metrics` from a thread of its own, in Prometheus' text format, until it is closed.

    Only the given address listens. Metrics have no secrets, but there is no authentication either.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"onefold.metrics_address = {address!r} is no address. Use host:port, such as 127.0.0.1:9400."
            )
        metrics = self._metrics = _Metrics()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                metrics.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise ConfigError(
                f"onefold.metrics_address = {address!r}: {error}. Use an address of the first rank's node and a port "
                "that no other process uses."
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="onefold-metrics", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._server)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Replace the values of metrics."""
        self._metrics.update(event_list)

    def write_ranks(self, ranks: Mapping[int, Mapping[str, float]]) -> None:
        """Replace the metrics of ranks, by rank and name. They have the label `rank`."""
        self._metrics.update_ranks(ranks)


class _Metrics:
    """The latest value of each metric."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._of_ranks: dict[int, dict[str, float]] = {}

    def update(self, events: Iterable[tuple[str, Any, int]]) -> None:
        """Replace the values of the metrics in a list of events."""
        values: dict[str, float] = {}
        for name, value, samples in events:
            for section in _SECTIONS:
                name = name.removeprefix(section)
            values[f"onefold_{_NOT_IN_NAMES.sub('_', name)}"] = float(value)
            values["onefold_samples"] = samples
        values["onefold_last_step_timestamp_seconds"] = time.time()
        with self._lock:
            self._values |= values

    def update_ranks(self, ranks: Mapping[int, Mapping[str, float]]) -> None:
        """Replace the metrics of ranks."""
        with self._lock:
            self._of_ranks = {rank: dict(values) for rank, values in ranks.items()}

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        with self._lock:
            lines = {name: [f"{name} {value!r}"] for name, value in self._values.items()}
            for rank, values in sorted(self._of_ranks.items()):
                for name, value in values.items():
                    name = f"onefold_rank_{name}"
                    lines.setdefault(name, []).append(f'{name}{{rank="{rank}"}} {value!r}')
        return "".join("\n".join([f"# TYPE {name} gauge", *each, ""]) for name, each in sorted(lines.items()))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        found = request.path.partition("?")[0] == "/metrics"
        body = self.text().encode() if found else b"The metrics are at /metrics.\n"
        request.send_response(200 if found else 404)
        request.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


def _close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
