"""A Prometheus text endpoint on loopback: the newest value of every number, labelled with its rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftline.errors import InputError
from draftline.monitor.events import LoggedEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = {"alarms"}  # these add up; everything else is a gauge


class PrometheusSink:
    """Serves http://127.0.0.1:port/metrics. Raises InputError where the port is taken; port 0 takes any free one."""

    def __init__(self, port: int, scalars: Callable[[LoggedEvent], dict[str, float]]) -> None:
        self._scalars = scalars
        self._values: dict[tuple[str, str], float] = {}  # (metric, labels) -> value
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler(self.text))
        except OSError as error:
            raise InputError(
                f"monitor.prometheus_port {port}: {error.strerror}", "name a free port, or 0 for any"
            ) from error
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, logged: LoggedEvent) -> None:
        for name, value in self._scalars(logged).items():
            key = metric(name, logged.rank)
            with self._lock:
                self._values[key] = self._values.get(key, 0.0) + value if name in COUNTERS else value

    def text(self) -> str:
        """All values in the text format, each metric once with its type."""
        with self._lock:
            values = sorted(self._values.items())
        lines, before = [], ""
        for (name, labels), value in values:
            if name != before:
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines.append(f"{name}{{{labels}}} {value:.17g}")
            before = name
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metric(name: str, rank: int) -> tuple[str, str]:
    """draftline's name as Prometheus wants it: "phase_seconds/get" -> draftline_phase_seconds with label part="get"."""
    base, _, part = name.partition("/")
    base = "draftline_" + re.sub(r"\W", "_", base) + ("_total" if base in COUNTERS else "")
    escaped = part.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return base, f'rank="{rank}"' + (f',part="{escaped}"' if part else "")


def handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is not worth a line on the run's terminal."""

    return Handler
